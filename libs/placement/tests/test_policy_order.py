import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_worlds import Yard, racks, started, workers

from reflux_placement.errors import InvalidQueue
from reflux_placement.policy.config import PolicyConfig
from reflux_placement.policy.fairshare import in_order
from reflux_placement.policy.quota import Ledger, check_queues
from reflux_placement.policy.view import Ask, Queue
from reflux_placement.topology import Resources


def _asks(queues: str, priorities: str = "") -> list[Ask]:
    return [
        Ask(
            job=f"{queue}{number}", number=number, gang=workers(1), submitted_at=0.0, queue=queue,
            priority=int(priorities[number]) if priorities else 0,
        )
        for number, queue in enumerate(queues)
    ]  # fmt: skip


def _served(asks: list[Ask], queues: dict[str, Queue], share: int = 10) -> list[str]:
    """The order in which asks go when each starts and holds `share` of 100 GPUs."""
    ledger = Ledger(queues, Resources(100, 100_000, 100))
    order = []
    for ask in in_order(asks, ledger):
        order.append(ask.job)
        ledger.charge(ask.queue, (share, 0, 0), firm=False)
    return order


def test_priority_goes_first_then_the_order_of_submission() -> None:
    assert _served(_asks("aaaa", "0121"), {}) == ["a2", "a1", "a3", "a0"]


def test_queues_take_turns_whoever_submitted_first() -> None:
    assert _served(_asks("aaabbb"), {}) == ["a0", "b3", "a1", "b4", "a2", "b5"]


def test_a_queue_of_double_weight_gets_two_turns() -> None:
    queues = {"a": Queue(name="a", weight=2.0), "b": Queue(name="b")}
    order = _served(_asks("aaaaaabbbbbb"), queues)
    assert [sum(job.startswith(queue) for job in order[:6]) for queue in "ab"] == [4, 2]


def test_the_share_is_that_of_the_scarcest_resource() -> None:
    ledger = Ledger({}, Resources(100, 100_000, 1000))
    ledger.charge("a", (10, 60_000, 0), firm=False)
    ledger.charge("b", (50, 1000, 0), firm=False)
    assert [ask.job for ask in in_order(_asks("ab"), ledger)] == ["b1", "a0"]


def test_shares_are_compared_from_the_top_of_the_tree() -> None:
    queues = {
        "left": Queue(name="left"), "a": Queue(name="a", parent="left"), "c": Queue(name="c", parent="left"),
        "b": Queue(name="b"),
    }  # fmt: skip
    order = _served(_asks("aaaabbbbcccc"), queues)
    assert sum(job[0] == "b" for job in order[:8]) == 4
    assert [job[0] for job in order if job[0] != "b"][:4] == ["a", "c", "a", "c"]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2)), max_size=12), st.integers(0, 40))
def test_every_ask_comes_up_once_and_never_behind_a_lower_priority(drawn, share) -> None:
    asks = [
        Ask(job=f"j{n}", number=n, gang=workers(1), submitted_at=0.0, queue=queue, priority=priority)
        for n, (queue, priority) in enumerate(drawn)
    ]
    order = _served(asks, {}, share)
    assert sorted(order) == sorted(ask.job for ask in asks)
    by_job = {ask.job: ask for ask in asks}
    priorities = [by_job[job].priority for job in order]
    assert priorities == sorted(priorities, reverse=True)


def test_fifty_queues_share_one_cycle_by_their_weights() -> None:
    queues = [Queue(name=f"q{i}", weight=1.0 + i % 2) for i in range(50)]
    yard = Yard(racks([15] * 10), queues)
    for number in range(1000):
        yard.submit(f"j{number}", workers(1), queue=f"q{number % 50}")
    decision = yard.cycle()
    counts = {queue.name: 0 for queue in queues}
    for job in started(decision):
        counts[yard.live[job].ask.queue] += 1
    assert sum(counts.values()) == 150
    assert {counts[queue.name] for queue in queues if queue.weight == 2.0} == {4}
    assert {counts[queue.name] for queue in queues if queue.weight == 1.0} == {2}
    assert set(decision.waits) == set(yard.pending)


def test_a_high_priority_job_is_not_held_up_by_the_share_of_its_queue() -> None:
    yard = Yard(racks([4]), config=PolicyConfig(preemption=False))
    yard.submit("big", workers(3), queue="greedy")
    yard.cycle()
    yard.submit("poor", workers(1), queue="modest")
    yard.submit("urgent", workers(1), queue="greedy", priority=1)
    assert started(yard.cycle()) == ["urgent"]


@pytest.mark.parametrize(
    ("queues", "word"),
    [
        ([Queue(name="a", parent="b"), Queue(name="b", parent="a")], "above itself"),
        ([Queue(name="a", parent="nobody")], "does not exist"),
        ([Queue(name="a", weight=0.0)], "above zero"),
        ([Queue(name="a", guaranteed=Resources(9), limit=Resources(8))], "above its limit"),
        ([Queue(name="a", guaranteed=Resources(60)), Queue(name="b", guaranteed=Resources(50))], "promised more"),
        ([Queue(name="a", guaranteed=Resources(8)), Queue(name="b", parent="a", guaranteed=Resources(9))], "promised"),
    ],
)
def test_a_tree_of_queues_that_cannot_be_kept_is_refused(queues, word) -> None:
    with pytest.raises(InvalidQueue, match=word):
        check_queues({queue.name: queue for queue in queues}, Resources(100, 100_000, 1 << 40))
