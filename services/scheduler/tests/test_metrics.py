"""What the scheduler counts: times by cause, and the time from free room to a running gang."""

from dataclasses import replace

import pytest
from fake_cluster import SPEC as SPEC_OF_A_NODE
from fake_cluster import FakeCluster, candidate, until
from prometheus_client import REGISTRY

from reflux_placement.policy.view import Wait
from reflux_placement.topology import Resources
from reflux_scheduler import controller, jobs, metrics, sightings
from reflux_scheduler.job import Heard, Job, Placement, Report, RolePlaces
from reflux_scheduler.metrics import Metrics
from reflux_scheduler.spec import JobSpec, RoleTemplate

LEVELS = ("node", "nvlink", "block", "cluster")
SPEC = JobSpec("test", (RoleTemplate("learner", 1, Resources(gpus=1), ("x",)),))


def sample(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"reflux_scheduler_{name}", labels) or 0.0


def places(node: str = "n1", level: str = "node") -> Placement:
    return Placement(level, f"c/{node}", (RolePlaces("learner", (node,), (1,), (0,)),))


def queued(name: str, at: float) -> Job:
    return Job(name, 1, SPEC, at, queued_at=at)


class Clock:
    """Stands where it is put."""

    def __init__(self, at: float) -> None:
        self.at = at

    def time(self) -> float:
        return self.at


@pytest.fixture
def clock(monkeypatch):
    clock = Clock(10_000.0)
    monkeypatch.setattr(metrics, "time", clock)
    return clock


def run(counts: Metrics, job: Job, clock: Clock) -> Job:
    """From its place until it runs, in no time."""
    for step in (
        lambda job: jobs.placed(job, places(), clock.at),
        lambda job: jobs.starting(job, clock.at),
        lambda job: sightings.observe_one(job, next(job.placement.seats()), ("n1", ""), _runs(job), clock.at),
    ):
        before, job = job, step(job)
        counts.changed(before, job)
    assert job.state == "RUNNING"
    return job


def _runs(job: Job):
    report = Report(f"{job.id}/learner/0", "running", pid=1, revision=1, attempt=job.attempt)
    return Heard("a", {report.role_id: report})


def free_to_start() -> tuple[float, float]:
    return sample("free_to_start_seconds_sum"), sample("free_to_start_seconds_count")


def test_a_job_that_waited_an_hour_is_told_from_the_second_since_room_was_freed(clock):
    counts = Metrics(LEVELS)
    first = run(counts, queued("a", 10_000.0), clock)
    clock.at = 13_599.0
    ending = jobs.end(first, "CANCELLED", "enough", clock.at)
    counts.changed(first, ending)
    counts.changed(ending, sightings.stopped_member(ending, next(ending.placement.seats()), clock.at))
    clock.at = 13_600.0
    total, count = free_to_start()
    waiting = queued("b", 10_000.0)
    placed = jobs.placed(waiting, places(), clock.at)
    counts.changed(waiting, placed)
    # Another job ends before this one runs: its room is not what this one waited for.
    clock.at = 13_600.5
    counts.changed(first, replace(first, state="FAILED"))
    started = jobs.starting(placed, clock.at)
    counts.changed(placed, started)
    running = sightings.observe_one(started, next(placed.placement.seats()), ("n1", ""), _runs(started), clock.at)
    counts.changed(started, running)
    after, now = free_to_start()
    assert (after - total, now - count) == (pytest.approx(1.5), 1)


def test_a_move_gives_room_back_and_growth_does_not():
    one, grown = places(), Placement("nvlink", "c/r", (RolePlaces("learner", ("n1", "n2"), (1, 1), (0, 0)),))
    assert not metrics._gave_room_back(None, one)
    assert not metrics._gave_room_back(one, grown)
    assert metrics._gave_room_back(grown, one)
    assert metrics._gave_room_back(one, places("n2"))
    assert metrics._gave_room_back(one, None)


def test_the_time_of_a_wait_is_split_by_cause():
    counts = Metrics(LEVELS)
    before = {cause: sample("wait_by_cause_seconds_sum", cause=cause) for cause in ("quota", "resources", "behind")}
    for at, cause in ((100.0, "quota"), (130.0, "resources"), (131.0, "resources"), (140.0, "quota"), (145.0, "quota")):
        counts.waiting({"jobs/a": Wait("jobs/a", cause, "")}, at)
    counts.placed(jobs.placed(queued("a", 90.0), places(), 150.0), backfilled=False)
    after = {cause: sample("wait_by_cause_seconds_sum", cause=cause) for cause in before}
    assert {cause: after[cause] - before[cause] for cause in before} == {"quota": 40.0, "resources": 10.0, "behind": 0}


def test_the_level_above_the_nodes_counts_as_rack_whatever_its_name():
    counts, crossed = Metrics(LEVELS), sample("cross_rack_gangs_total")
    for level in ("node", "nvlink"):
        counts.placed(jobs.placed(queued("a", 0.0), places(level=level), 1.0), backfilled=False)
    assert sample("cross_rack_gangs_total") == crossed
    counts.placed(jobs.placed(queued("a", 0.0), places(level="block"), 1.0), backfilled=False)
    assert sample("cross_rack_gangs_total") == crossed + 1


@pytest.fixture
def often(monkeypatch):
    """Figures are brought up to date at every round."""
    monkeypatch.setattr(controller, "_OBSERVE_SECONDS", 0.0)


async def test_a_scheduler_that_leads_no_more_shows_nothing_that_would_be_added_to_the_leaders_figures(keys, often):
    leader = await candidate(keys, FakeCluster("n1"), 600)
    async with leader.standing("a:1", "a"):
        await (await leader.leading()).create(SPEC_OF_A_NODE, "one")
        await until(lambda: sample("utilisation") == 1.0)
        assert sample("resources", resource="gpus", share="total") == 4
        assert sum(sample("jobs", state=state) for state in ("PENDING", "PLACED")) == 1
    names = {"jobs", "nodes", "resources", "fragmentation", "waiting_jobs", "grants"}
    left = [each.name for each in REGISTRY.collect() if each.samples]
    assert not {f"reflux_scheduler_{name}" for name in names} & set(left)
    assert (sample("utilisation"), sample("leading")) == (0.0, 0.0)


async def test_an_agent_of_a_grant_that_is_over_is_forgotten(keys, often):
    leader = await candidate(keys, FakeCluster("n1", "n2"), 600)
    async with leader.standing("a:1", "a"):
        leading = await leader.leading()
        job = await leading.create(SPEC_OF_A_NODE, "one")
        await until(lambda: leading.book.get(job.id).parts)
        posts = [("n1", f"{job.id}-0"), ("n1", "gone-0"), ("n2", "")]
        for post in posts:
            leading.fleet.register(post, "127.0.0.1:9", "i", (), 0.0)
        await until(lambda: len(leading.fleet.agents()) < 3)
        assert list(leading.fleet.agents()) == [posts[0], posts[2]]
