import math
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from policy_worlds import Yard, racks, started, workers

from reflux_placement.policy.backfill import expected_end
from reflux_placement.policy.config import PolicyConfig
from reflux_placement.policy.cycle import DEFAULT_CONFIG
from reflux_placement.policy.view import Ask, Live, Queue


def _half_full(seconds: float = 100.0, config: PolicyConfig = DEFAULT_CONFIG) -> Yard:
    """A rack of 4 nodes with 2 held for `seconds`; "wide" needs 3 and waits."""
    yard = Yard(racks([4]), config=config)
    yard.submit("running", workers(2), expected_seconds=seconds)
    yard.cycle()
    yard.submit("wide", workers(3), expected_seconds=50.0)
    return yard


def test_a_short_job_starts_in_front_of_a_reservation_and_a_long_one_where_it_is_not_in_the_way() -> None:
    yard = _half_full()
    yard.submit("short", workers(1), expected_seconds=99.0)
    yard.submit("long", workers(1), expected_seconds=1000.0)
    decision = yard.cycle()
    assert started(decision) == ["short", "long"]
    yard.now = 100.0
    yard.end("running", "short")
    assert started(yard.cycle()) == ["wide"]


def test_a_long_job_does_not_take_reserved_room() -> None:
    yard = _half_full()
    yard.submit("long", workers(2), expected_seconds=101.0)
    decision = yard.cycle()
    assert started(decision) == []
    assert decision.waits["long"].cause == "reservation"
    assert "delay wide" in decision.waits["long"].sentence
    assert "within 100 s" in decision.waits["wide"].sentence


def test_a_job_that_does_not_say_how_long_it_runs_is_kept_off_reserved_room() -> None:
    yard = _half_full()
    yard.submit("silent", workers(2))
    assert started(yard.cycle()) == []


def test_reserved_room_without_a_date_is_not_lent_at_all() -> None:
    yard = _half_full(seconds=0.0)
    yard.submit("short", workers(2), expected_seconds=1.0)
    decision = yard.cycle()
    assert started(decision) == []
    assert "at a time that nobody knows" in decision.waits["wide"].sentence


def test_a_stream_of_small_jobs_of_a_poorer_queue_does_not_starve_a_reservation() -> None:
    yard = Yard(racks([4]), [Queue(name="rich"), Queue(name="poor", weight=100.0)])
    yard.submit("old", workers(2), queue="rich")
    yard.cycle()
    yard.submit("wide", workers(4), queue="rich")
    yard.submit("poor0", workers(1), queue="poor")
    yard.cycle()
    for number in range(1, 6):
        yard.submit(f"poor{number}", workers(1), queue="poor")
        assert "wide" not in started(yard.cycle())
    yard.end("old", *(job for job in yard.live if job.startswith("poor")))
    assert started(yard.cycle()) == ["wide"]


def test_a_reservation_yields_to_a_higher_priority_and_is_looked_for_again() -> None:
    yard = _half_full(config=PolicyConfig(preemption=False))
    yard.cycle()
    yard.submit("urgent", workers(2), priority=1)
    decision = yard.cycle()
    assert started(decision) == ["urgent"]
    assert [claim.job for claim in decision.claims] == ["wide"]
    assert decision.claims[0].due_at == math.inf


def test_a_reservation_stays_where_it_is_from_cycle_to_cycle() -> None:
    yard = Yard(racks([2, 2]))
    for number in range(4):
        yard.submit(f"j{number}", workers(1), expected_seconds=100.0 + number)
    yard.cycle()
    yard.submit("wide", workers(2, required_level="rack"))
    first = yard.cycle().claims[0]
    yard.now = 10.0
    second = yard.cycle().claims[0]
    assert first.assignment.used_nodes().tolist() == second.assignment.used_nodes().tolist()
    assert first.due_at == second.due_at == 101.0


def test_a_promise_that_passed_is_made_anew_elsewhere_but_not_after_patience_ran_out() -> None:
    for patience, moved in ((1e9, True), (50.0, False)):
        yard = Yard(racks([2, 2]), config=PolicyConfig(patience_seconds=patience))
        yard.submit("left", workers(2, required_level="rack"), expected_seconds=100.0)
        yard.submit("right", workers(2, required_level="rack"), expected_seconds=150.0)
        yard.cycle()
        yard.submit("wide", workers(2, required_level="rack"))
        before = yard.cycle().claims[0].assignment.domain
        yard.now = 101.0
        after = yard.cycle().claims[0].assignment.domain
        assert (before != after) == moved


def test_the_oldest_job_gets_a_reservation_when_it_waited_too_long_whatever_its_share() -> None:
    for patience, first in ((1e9, "fresh"), (60.0, "wide")):
        queues = [Queue(name="rich"), Queue(name="poor", weight=100.0)]
        yard = Yard(racks([4]), queues, PolicyConfig(patience_seconds=patience))
        yard.submit("rich", workers(1), queue="rich")
        yard.cycle()
        yard.submit("wide", workers(4), queue="rich")
        yard.now = 100.0
        yard.submit("fresh", workers(4), queue="poor")
        yard.cycle()
        yard.end("rich")
        yard.submit("again", workers(1), queue="rich", priority=1)
        yard.cycle()
        assert [claim.job for claim in yard.claims] == [first]


def test_strict_order_lets_nobody_pass() -> None:
    yard = _half_full(config=PolicyConfig(backfill_depth=0))
    yard.submit("short", workers(1), expected_seconds=1.0)
    decision = yard.cycle()
    assert started(decision) == []
    assert decision.waits["short"].cause == "behind"


def test_a_gang_too_large_for_any_domain_blocks_no_small_job() -> None:
    yard = Yard(racks([2, 2], gpus=4))
    yard.submit("impossible", workers(3, required_level="rack"))
    yard.submit("small", workers(1, gpus=1))
    decision = yard.cycle()
    assert started(decision) == ["small"]
    assert not decision.claims


def test_four_and_four_free_keep_a_job_of_eight_waiting_but_not_a_small_one() -> None:
    """kueue#4329: the sum of free GPUs is enough, no domain is."""
    yard = Yard(racks([1, 1], gpus=8))
    yard.submit("halves", workers(2, gpus=4, max_per_domain=1, spread_level="node"))
    yard.cycle()
    assert yard.room.free_NR[:, 0].tolist() == [4, 4]
    yard.submit("eight", workers(1, gpus=8))
    yard.submit("one", workers(1, gpus=1))
    decision = yard.cycle()
    assert started(decision) == ["one"]
    assert decision.waits["eight"].cause == "fragmentation"


def test_a_missed_end_is_expected_after_twice_then_four_times_the_time() -> None:
    ask = Ask(job="j", number=1, gang=workers(1), submitted_at=0.0, expected_seconds=100.0)
    live = Live(ask=ask, started_at=1000.0, saved_at=1000.0)
    assert [expected_end(live, now) for now in (1050.0, 1100.0, 1101.0, 1250.0)] == [1100.0, 1100.0, 1200.0, 1400.0]


def test_a_role_of_zero_replicas_starts_and_the_cycle_goes_on() -> None:
    """kueue#10478: a pod set of count 0 must not loop."""
    yard = Yard(racks([2]))
    gang = workers(1)
    zero = replace(gang.roles[0], role="verifier", count=0)
    yard.submit("loop", replace(gang, roles=(*gang.roles, zero)))
    yard.submit("next", workers(1))
    assert started(yard.cycle()) == ["loop", "next"]
