import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from policy_worlds import Yard, preempted, racks, started, workers

from reflux_placement.policy.config import PolicyConfig
from reflux_placement.policy.view import Queue
from reflux_placement.topology import Resources


def test_a_queue_borrows_idle_room_up_to_its_limit() -> None:
    yard = Yard(racks([4]), [Queue(name="a", guaranteed=Resources(4), limit=Resources(12)), Queue(name="b")])
    for number in range(4):
        yard.submit(f"a{number}", workers(1), queue="a")
    decision = yard.cycle()
    assert started(decision) == ["a0", "a1", "a2"]
    assert decision.waits["a3"].cause == "quota"
    assert decision.waits["a3"].sentence == "queue a holds 12 of its limit of 12 GPUs; this job needs 4"


def test_use_counts_for_the_queues_above() -> None:
    queues = [Queue(name="top", limit=Resources(8)), Queue(name="a", parent="top"), Queue(name="b", parent="top")]
    yard = Yard(racks([4]), queues)
    for number, queue in enumerate("abab"):
        yard.submit(f"{queue}{number}", workers(1), queue=queue)
    decision = yard.cycle()
    assert started(decision) == ["a0", "b1"]
    assert "queue top holds 8" in decision.waits["a2"].sentence


def test_a_limit_that_names_gpus_only_leaves_cpus_alone() -> None:
    yard = Yard(racks([2]), [Queue(name="a", limit=Resources(4))])
    yard.submit("a0", workers(1), queue="a")
    yard.submit("cpu", workers(1, gpus=0), queue="a")
    assert started(yard.cycle()) == ["a0", "cpu"]


def test_a_limit_of_zero_gpus_means_none() -> None:
    yard = Yard(racks([2]), [Queue(name="a", limit=Resources(0, 8000))])
    yard.submit("gpu", workers(1, gpus=1), queue="a")
    yard.submit("cpu", workers(1, gpus=0), queue="a")
    assert started(yard.cycle()) == ["cpu"]


def test_a_job_that_waits_for_quota_blocks_nobody_not_even_in_its_queue() -> None:
    yard = Yard(racks([4]), [Queue(name="a", limit=Resources(8))])
    yard.submit("large", workers(3), queue="a")
    yard.submit("small", workers(2), queue="a")
    yard.submit("other", workers(2))
    assert set(started(yard.cycle())) == {"small", "other"}


def test_an_elastic_job_starts_at_the_size_that_its_quota_allows() -> None:
    yard = Yard(racks([4]), [Queue(name="a", limit=Resources(8))])
    yard.submit("elastic", workers(4, min_count=2), queue="a")
    yard.cycle()
    assert yard.room.holdings["elastic"].amount.gpus == 8


def test_a_guarantee_is_taken_back_from_who_borrowed_it() -> None:
    queues = [Queue(name="a", guaranteed=Resources(8)), Queue(name="b", guaranteed=Resources(8))]
    yard = Yard(racks([4]), queues)
    for number in range(4):
        yard.submit(f"b{number}", workers(1), queue="b", priority=9)
    yard.cycle()
    for number in range(3):
        yard.submit(f"a{number}", workers(1), queue="a")
    assert len(preempted(yard.cycle())) == 2
    yard.stopped()
    yard.cycle()
    assert {job for job in yard.running() if job[0] == "a"} == {"a0", "a1"}
    assert len([job for job in yard.running() if job[0] == "b"]) == 2


def test_a_guarantee_is_safe_from_the_priority_of_other_queues() -> None:
    yard = Yard(racks([4]), [Queue(name="a", guaranteed=Resources(8)), Queue(name="b", guaranteed=Resources(8))])
    yard.submit("a0", workers(2), queue="a")
    yard.submit("b0", workers(2), queue="b")
    yard.cycle()
    yard.submit("urgent", workers(1), queue="b", priority=9)
    yard.submit("stranger", workers(1), priority=9)
    decision = yard.cycle()
    assert preempted(decision) == {"b0"}
    assert [claim.job for claim in decision.claims if claim.evicting] == ["urgent"]


def test_a_reclaim_inside_a_cohort_leaves_the_queues_outside_alone() -> None:
    queues = [
        Queue(name="top", guaranteed=Resources(12)),
        Queue(name="a", parent="top", guaranteed=Resources(8)),
        Queue(name="b", parent="top", guaranteed=Resources(4)),
        Queue(name="other", guaranteed=Resources(4)),
    ]
    yard = Yard(racks([4]), queues)
    yard.submit("other0", workers(1), queue="other")
    for number in range(3):
        yard.submit(f"b{number}", workers(1), queue="b")
    yard.cycle()
    yard.submit("a0", workers(2), queue="a")
    assert len(preempted(yard.cycle()) & {"b0", "b1", "b2"}) == 2


def test_work_that_cannot_be_preempted_borrows_nothing_that_is_guaranteed() -> None:
    queues = [Queue(name="a", guaranteed=Resources(8)), Queue(name="b", guaranteed=Resources(4))]
    yard = Yard(racks([4]), queues)
    for number in range(4):
        yard.submit(f"b{number}", workers(1), queue="b", preemptible=False)
    decision = yard.cycle()
    assert started(decision) == ["b0", "b1"]
    assert decision.waits["b2"].cause == "quota"
    assert "cannot be preempted" in decision.waits["b2"].sentence


def test_priority_inside_a_full_queue_stops_its_own_lower_work() -> None:
    yard = Yard(racks([4]), [Queue(name="a", limit=Resources(8))])
    yard.submit("low", workers(2), queue="a")
    yard.submit("stranger", workers(1), queue="b")
    yard.cycle()
    yard.submit("urgent", workers(1), queue="a", priority=1)
    assert preempted(yard.cycle()) == {"low"}
    yard.stopped()
    assert started(yard.cycle()) == ["urgent"]
    assert yard.running() == {"urgent", "stranger"}


def test_small_jobs_of_a_full_queue_do_not_starve_a_large_one_that_waited_too_long() -> None:
    for patience, fed in ((1e9, False), (60.0, True)):
        yard = Yard(racks([4]), [Queue(name="a", limit=Resources(8))], PolicyConfig(patience_seconds=patience))
        yard.submit("old0", workers(1), queue="a")
        yard.submit("old1", workers(1), queue="a")
        yard.cycle()
        yard.submit("large", workers(2), queue="a")
        seen: list[str] = []
        for number in range(6):
            yard.now += 50.0
            yard.submit(f"small{number}", workers(1), queue="a")
            yard.end(*list(yard.live)[:1])
            seen += started(yard.cycle())
        assert ("large" in seen) == fed


def test_a_job_with_reserved_room_has_its_quota_too() -> None:
    yard = Yard(racks([4]), [Queue(name="a", limit=Resources(12)), Queue(name="b")])
    yard.submit("b", workers(2), queue="b", expected_seconds=100.0)
    yard.cycle()
    yard.submit("wide", workers(3), queue="a")
    yard.submit("late", workers(1), queue="a")
    yard.submit("quick", workers(1), queue="a", expected_seconds=90.0)
    decision = yard.cycle()
    assert started(decision) == ["quick"]
    assert "12 more are promised to older jobs" in decision.waits["late"].sentence
