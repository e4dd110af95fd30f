import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reflux_inference_gateway.policy.admission import Admission
from reflux_inference_gateway.policy.waiting_line import Entry

BOUNDED = settings(max_examples=80, deadline=None, derandomize=True)
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["offer", "offer", "offer", "take", "give back", "cancel"]),
        st.integers(0, 30),
        st.sampled_from("abc"),
        st.integers(1, 50),
        st.integers(0, 2),
    ),
    max_size=80,
)


@BOUNDED
@given(EVENTS, st.integers(1, 8))
def test_nothing_is_lost_or_doubled_and_the_queue_stays_bounded(events, room):
    queue, waiting = Admission(room, {"a": 2.0}), {}
    for number, (kind, pick, tenant, cost, priority) in enumerate(events):
        if kind == "offer":
            entry = Entry(
                key=str(number), tenant=tenant, cost=cost, priority=priority, deadline=number + pick, arrival=number
            )
            waiting[entry.key] = entry
            refused = queue.offer(entry)
            assert (refused is not None) == (len(waiting) > room)
            if refused is not None:
                assert waiting.pop(refused.key) == refused
        elif kind == "cancel":
            key = str(number - pick)
            assert queue.cancel(key) == (key in waiting)
            waiting.pop(key, None)
        else:
            taken = queue.take()
            assert (taken is None) == (not waiting)
            if taken is not None:
                assert taken in waiting.values()
                rivals = [one for one in waiting.values() if one.tenant == taken.tenant]
                assert taken.priority == max(one.priority for one in rivals)
                if kind == "take":
                    del waiting[taken.key]
                else:
                    queue.give_back(taken)
        assert len(queue) == len(waiting) <= room
    drained = [taken.key for taken in iter(queue.take, None)]
    assert sorted(drained) == sorted(waiting)
    assert not queue._tenants, "who neither waits nor owes is forgotten"


@BOUNDED
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 20), st.integers(0, 2)), max_size=30),
    st.integers(0, 12),
    st.integers(0, 5),
)
def test_what_is_given_back_changes_neither_the_order_nor_anyones_part(rows, before, tries):
    def drained(tries):
        queue = Admission(100, {"b": 3.0})
        for number, (tenant, cost, priority) in enumerate(rows):
            queue.offer(Entry(key=str(number), tenant=tenant, cost=cost, priority=priority, arrival=number))
        first = [queue.take() for _ in range(before)]
        for _ in range(tries):
            if (taken := queue.take()) is not None:
                queue.give_back(taken)
        return first + list(iter(queue.take, None))

    assert drained(tries) == drained(0)


@BOUNDED
@given(
    st.dictionaries(st.sampled_from("abc"), st.sampled_from([1.0, 2.0, 5.0]), min_size=2),
    st.lists(st.integers(1, 20), min_size=60, max_size=60),
)
def test_while_all_wait_each_tenant_gets_its_part_by_weight(weights, costs):
    queue = Admission(1000, weights)
    for tenant in weights:
        for number, cost in enumerate(costs):
            queue.offer(Entry(key=f"{tenant}{number}", tenant=tenant, cost=cost))
    got, left = dict.fromkeys(weights, 0.0), dict.fromkeys(weights, len(costs))
    while min(left.values()):
        taken = queue.take()
        assert taken is not None
        got[taken.tenant] += taken.cost
        left[taken.tenant] -= 1
        for one in weights:
            for other in weights:
                apart = abs(got[one] / weights[one] - got[other] / weights[other])
                assert apart <= max(costs) / weights[one] + max(costs) / weights[other]


def test_a_flood_of_one_tenant_turns_away_its_own_requests():
    queue = Admission(10)
    refused = [queue.offer(Entry(key=f"flood{number}", tenant="flood", arrival=number)) for number in range(50)]
    assert sum(one is not None for one in refused) == 40
    assert queue.offer(Entry(key="guest", tenant="guest", arrival=50)) == Entry(key="flood9", tenant="flood", arrival=9)
    assert [taken.key for taken in (queue.take(), queue.take())].count("guest") == 1, (
        "it does not wait behind the flood"
    )


def test_a_tenant_that_was_away_gets_no_credit_for_it():
    queue = Admission(100)
    for number in range(20):
        queue.offer(Entry(key=f"a{number}", tenant="a"))
    for _ in range(10):
        queue.take()
    for number in range(10):
        queue.offer(Entry(key=f"b{number}", tenant="b"))
    order = [taken.tenant for taken in iter(queue.take, None)]
    assert order[:10].count("a") in (4, 5, 6)


def test_priority_and_deadline_order_a_tenants_own_requests_only():
    queue = Admission(10)
    queue.offer(Entry(key="plain", tenant="a"))
    queue.offer(Entry(key="late", tenant="a", priority=1, deadline=9.0))
    queue.offer(Entry(key="soon", tenant="a", priority=1, deadline=5.0))
    queue.offer(Entry(key="other", tenant="b"))
    assert [taken.key for taken in iter(queue.take, None)] == ["soon", "other", "late", "plain"]


def test_tenants_that_only_owe_are_bounded_too():
    queue = Admission(5)
    queue.offer(Entry(key="waits", tenant="~"))
    for number in range(300):
        queue.offer(Entry(key=str(number), tenant=str(number), cost=1e9))
        assert queue.take().tenant == str(number)
        assert len(queue._tenants) <= 2 * 5


def test_bad_limits_and_keys_that_wait_already_are_refused():
    with pytest.raises(ValueError, match="room"):
        Admission(0)
    with pytest.raises(ValueError, match="weights"):
        Admission(1, {"a": 0.0})
    queue = Admission(2)
    queue.offer(Entry(key="x"))
    with pytest.raises(ValueError, match="waits already"):
        queue.offer(Entry(key="x"))
