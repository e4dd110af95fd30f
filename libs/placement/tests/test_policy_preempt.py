import itertools
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pytest
from policy_worlds import Yard, preempted, racks, started, workers

from reflux_placement.gang import Assignment
from reflux_placement.place.search import find_place
from reflux_placement.policy.config import PolicyConfig
from reflux_placement.policy.view import Ask, Live, Preempt, Queue
from reflux_placement.room import Room
from reflux_placement.topology import Resources


def test_eight_gpus_on_four_nodes_do_not_help_a_member_of_eight() -> None:
    """kueue#5243: victims must free one node; if no set does, nobody is evicted."""
    yard = Yard(racks([4], gpus=8))
    yard.submit("fixed", workers(4, gpus=5, max_per_domain=1, spread_level="node"), preemptible=False)
    yard.submit("thin", workers(4, gpus=2, max_per_domain=1, spread_level="node"))
    yard.cycle()
    yard.submit("eight", workers(1, gpus=8), priority=1)
    decision = yard.cycle()
    assert not preempted(decision)
    assert yard.running() == {"fixed", "thin"}
    assert "eight" in decision.waits


def test_only_the_victims_of_one_node_are_stopped_for_a_member_of_a_whole_node() -> None:
    yard = Yard(racks([4], gpus=8))
    for number in range(8):
        yard.submit(f"half{number}", workers(1, gpus=4))
    yard.cycle()
    yard.submit("eight", workers(1, gpus=8), priority=1)
    victims = preempted(yard.cycle())
    assert len(victims) == 2
    assert len({int(yard.room.holdings[job].node_M[0]) for job in victims}) == 1
    yard.stopped()
    assert started(yard.cycle()) == ["eight"]


def test_a_gang_that_needs_one_rack_gets_its_victims_from_one_rack() -> None:
    yard = Yard(racks([4, 4]))
    for number in range(8):
        yard.submit(f"low{number}", workers(1))
    yard.cycle()
    yard.submit("gang", workers(3, required_level="rack"), priority=1)
    victims = preempted(yard.cycle())
    assert len(victims) == 3
    assert len({int(yard.room.holdings[job].node_M[0]) // 4 for job in victims}) == 1


def test_the_set_with_the_least_lost_work_is_chosen() -> None:
    yard = Yard(racks([2, 2]))
    for number, node in enumerate("aabb"):
        yard.submit(f"{node}{number}", workers(1, required_level="rack"))
    yard.cycle()
    yard.now = 1000.0
    for job in list(yard.live):
        live = yard.live[job]
        on_second = int(yard.room.holdings[job].node_M[0]) >= 2
        yard.live[job] = Live(ask=live.ask, started_at=0.0, saved_at=990.0 if on_second else 100.0)
    yard.submit("gang", workers(2, required_level="rack"), priority=1)
    decision = yard.cycle()
    action = next(action for action in decision.actions if isinstance(action, Preempt))
    assert all(int(yard.room.holdings[job].node_M[0]) >= 2 for job in action.victims)
    assert action.lost_seconds == 2 * 4 * 10.0


@pytest.mark.parametrize("more", [{"preemptible": False}, {"min_run_seconds": 60.0}, {"priority": 1}])
def test_what_must_not_be_preempted_goes_on(more) -> None:
    yard = Yard(racks([1]))
    yard.submit("safe", workers(1), **more)
    yard.cycle()
    yard.now = 59.0
    yard.submit("urgent", workers(1), priority=1)
    assert not preempted(yard.cycle())
    yard.now = 60.0
    assert preempted(yard.cycle()) == ({"safe"} if "min_run_seconds" in more else set())


def test_freed_room_is_kept_for_its_beneficiary_over_cycles_and_for_nobody_else() -> None:
    yard = Yard(racks([2]))
    yard.submit("low0", workers(1))
    yard.submit("low1", workers(1))
    yard.cycle()
    yard.submit("gang", workers(2), priority=1)
    assert preempted(yard.cycle()) == {"low0", "low1"}
    yard.submit("thief", workers(1), priority=9)
    yard.submit("quick", workers(1, gpus=1), expected_seconds=1.0)
    yard.end("low0")
    yard.stopping.discard("low0")
    decision = yard.cycle()
    assert started(decision) == []
    assert "kept for it" in decision.waits["gang"].sentence
    yard.end("low1")
    yard.stopping.clear()
    assert started(yard.cycle()) == ["gang"]


def test_a_victim_that_starts_again_is_not_taken_for_one_that_is_leaving() -> None:
    yard = Yard(racks([1, 1, 1]))
    yard.submit("low0", workers(1))
    yard.submit("low1", workers(1))
    yard.submit("fixed", workers(1), preemptible=False)
    yard.cycle()
    yard.submit("gang", workers(2), priority=1)
    yard.cycle()
    yard.pending["low0"] = yard.live["low0"].ask
    yard.end("low0", "fixed")
    yard.stopping.discard("low0")
    assert started(yard.cycle()) == ["low0"]
    yard.submit("urgent", workers(1), priority=2)
    assert preempted(yard.cycle()) == {"low0"}


def test_room_is_not_freed_twice_for_a_job_whose_victims_are_still_stopping() -> None:
    yard = Yard(racks([2]))
    yard.submit("low0", workers(1))
    yard.submit("low1", workers(1))
    yard.cycle()
    yard.submit("urgent", workers(1), priority=1)
    assert len(preempted(yard.cycle())) == 1
    assert not preempted(yard.cycle())


def test_the_victims_of_a_job_that_was_withdrawn_meanwhile_are_not_chosen_again() -> None:
    yard = Yard(racks([1]))
    yard.submit("low", workers(1))
    yard.cycle()
    yard.submit("urgent", workers(1), priority=1)
    yard.cycle()
    del yard.pending["urgent"]
    yard.submit("next", workers(1), priority=1)
    assert not preempted(yard.cycle())
    yard.stopped()
    assert started(yard.cycle()) == ["next"]


def test_a_claim_whose_node_dies_is_given_up_and_looked_for_anew() -> None:
    yard = Yard(racks([1, 1]))
    yard.submit("low0", workers(1))
    yard.submit("low1", workers(1))
    yard.cycle()
    yard.submit("urgent", workers(1), priority=1)
    (victim,) = preempted(yard.cycle())
    yard.nodes[int(yard.room.holdings[victim].node_M[0])] = "down"
    assert preempted(yard.cycle()) == {"low0", "low1"} - {victim}


def test_without_preemption_a_high_priority_waits_with_a_reservation() -> None:
    yard = Yard(racks([1]), config=PolicyConfig(preemption=False))
    yard.submit("low", workers(1), expected_seconds=30.0)
    yard.cycle()
    yard.submit("urgent", workers(1), priority=1)
    decision = yard.cycle()
    assert not preempted(decision)
    assert decision.claims[0].due_at == 30.0


def test_elastic_jobs_shrink_before_anybody_stops() -> None:
    yard = Yard(racks([4]))
    yard.submit("elastic", workers(2, min_count=1, max_count=3))
    yard.submit("rigid", workers(1))
    yard.cycle()
    yard.cycle()
    assert yard.room.holdings["elastic"].amount.gpus == 12
    yard.submit("urgent", workers(2), priority=1)
    assert not preempted(yard.cycle())
    assert started(yard.cycle()) == ["urgent"]
    assert yard.room.holdings["elastic"].amount.gpus == 4
    assert yard.running() == {"elastic", "rigid", "urgent"}


def test_a_fragmented_gang_gets_room_by_migration_not_by_stopping_its_equals() -> None:
    yard = Yard(racks([2, 2]))
    for job, rack in (("a", 0), ("b", 1)):
        yard.room.take(job, workers(1), Assignment("node", 2 * rack, {"work": racks([2, 2]).starts[0][2 * rack :][:1]}))
        ask = Ask(job=job, number=rack, gang=workers(1), submitted_at=0.0)
        yard.live[job] = Live(ask=ask, started_at=0.0, saved_at=0.0, movable=True)
    yard.submit("gang", workers(2, required_level="rack"))
    yard.now = 300.0
    assert "Migrate" in [type(action).__name__ for action in yard.cycle().actions]
    assert started(yard.cycle()) == ["gang"]
    assert yard.running() == {"a", "b", "gang"}


def _cheapest(room: Room, ask: Ask, lives: dict[str, Live], now: float) -> float | None:
    """Lost work of the best set of victims, by trying all of them."""
    best = None
    for size in range(1, len(lives) + 1):
        for victims in itertools.combinations(sorted(lives), size):
            trial = room.copy()
            trial.release_all(victims)
            if isinstance(find_place(trial, ask.gang), Assignment):
                lost = sum((now - lives[job].saved_at) * room.holdings[job].amount.gpus for job in victims)
                best = lost if best is None else min(best, lost)
    return best


_GANGS = (
    workers(1),
    workers(2),
    workers(2, required_level="rack"),
    workers(4, gpus=2, required_level="rack"),
    workers(3, gpus=2),
    workers(4, segment_size=2),
    workers(2, max_per_domain=1, spread_level="rack"),
)


def _crowded(rng: random.Random) -> Yard:
    """Four nodes full of jobs of random sizes, at random times since their checkpoints."""
    yard = Yard(racks([2, 2]), config=PolicyConfig(shrinking=False))
    for number in range(rng.randint(1, 7)):
        yard.submit(f"j{number}", workers(rng.randint(1, 3), rng.choice((1, 2, 4))))
    yard.cycle()
    yard.pending.clear()
    yard.claims = ()
    yard.now = 100.0
    for job, live in list(yard.live.items()):
        yard.live[job] = Live(ask=live.ask, started_at=0.0, saved_at=100.0 - rng.randint(0, 50))
    return yard


def test_victims_are_found_whenever_a_set_exists_cost_little_more_and_none_is_superfluous() -> None:
    rng, costs = random.Random(11), []
    for _ in range(90):
        yard = _crowded(rng)
        ask = yard.submit("beneficiary", rng.choice(_GANGS), priority=1)
        before, lives = yard.room.copy(), dict(yard.live)
        decision = yard.cycle()
        if started(decision):
            continue
        best = _cheapest(before, ask, lives, yard.now)
        action = next((action for action in decision.actions if isinstance(action, Preempt)), None)
        assert (action is None) == (best is None)
        if action is None or best is None:
            continue
        costs.append((action.lost_seconds, best))
        for victim in action.victims:
            trial = before.copy()
            trial.release_all(set(action.victims) - {victim})
            assert not isinstance(find_place(trial, ask.gang), Assignment)
    assert len(costs) > 30
    assert all(best <= found for found, best in costs)
    assert sum(found for found, _ in costs) <= 1.02 * sum(best for _, best in costs)


def test_a_borrower_is_not_stopped_for_a_queue_that_would_borrow_itself() -> None:
    queues = [Queue(name="a", guaranteed=Resources(4)), Queue(name="b", guaranteed=Resources(4))]
    yard = Yard(racks([4]), queues)
    for number in range(4):
        yard.submit(f"b{number}", workers(1), queue="b")
    yard.cycle()
    yard.submit("a", workers(2), queue="a")
    assert not preempted(yard.cycle())
