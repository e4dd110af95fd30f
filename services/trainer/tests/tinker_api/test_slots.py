"""Which replica serves whose weights: never two at once, nobody waits for ever."""

from hypothesis import given, settings
from hypothesis import strategies as st

from reflux_trainer.tinker.slots import Slot, SlotTable


def table(count, slice_seconds=2.0):
    return SlotTable([Slot(index) for index in range(count)], slice_seconds)


def load(slots, slot, version=1):
    if slot.loading:
        slots.hold(slot, slot.target, slot.target, version)
    return slot


def test_calls_of_one_target_share_its_slot_and_others_take_the_one_that_idles_longest():
    slots = table(2)
    first = load(slots, slots.take("a", 0.0))
    assert slots.take("a", 0.1) is first
    second = load(slots, slots.take("b", 0.2))
    assert second is not first
    assert slots.take("c", 0.3) is None
    slots.give_back(second, 0.4)
    third = slots.take("c", 0.5)
    assert third is second
    assert third.loading
    assert slots.resident("b") is None


def test_a_busy_target_lets_others_in_after_its_slice():
    slots = table(1)
    slot = load(slots, slots.take("a", 0.0))
    assert slots.take("b", 0.1) is None
    assert slots.take("a", 1.0) is slot
    assert slots.take("a", 2.5) is None, "b waits for more than a slice"
    slots.give_back(slot, 2.6)
    assert slots.take("a", 2.7) is None, "b was first"
    slots.give_back(slot, 2.8)
    assert slots.take("b", 2.9) is slot


def test_a_failed_publish_leaves_nothing_behind():
    slots = table(1)
    slot = slots.take("a", 0.0)
    slots.hold(slot, "a", "a", 0)
    slots.give_back(slot, 0.1)
    assert slots.resident("a") is None
    assert slots.take("b", 0.2) is slot


def test_a_target_that_nobody_waits_for_any_more_is_in_nobodys_way():
    slots = table(1)
    slot = load(slots, slots.take("a", 0.0))
    with slots.queued("b"):
        assert slots.take("b", 0.1) is None
    assert slots.take("a", 9.0) is slot, "b has gone"
    slots.give_back(slot, 9.1)
    slots.give_back(slot, 9.1)
    assert slots.take("c", 9.2) is slot


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 3)), max_size=40), st.integers(1, 3))
def test_every_call_is_served_in_the_end_by_a_slot_of_its_own_weights(arrivals, count):
    slots, now, open_calls, waiting, served = table(count, 1.0), 0.0, [], [], 0
    todo = list(arrivals)
    while todo or waiting or open_calls:
        now += 0.5
        if todo:
            waiting.append(todo.pop(0))
        for call in list(waiting):
            slot = slots.take(call[0], now)
            if slot is not None:
                load(slots, slot)
                assert slot.target == call[0]
                open_calls.append((now + call[1], call[0], slot))
                waiting.remove(call)
        for end, target, slot in list(open_calls):
            assert slot.target == target, "the weights were exchanged under a call"
            if end <= now:
                slots.give_back(slot, now)
                open_calls.remove((end, target, slot))
                served += 1
        assert now < 500, "a call waits for ever"
    assert served == len(arrivals)
    assert all(slot.users == 0 for slot in slots.slots)
