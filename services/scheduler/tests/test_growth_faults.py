"""Room for growth or for a replacement that the cluster does not give: no gang is stopped because it got no more."""

import contextlib
import time
from dataclasses import replace

import pytest
from fake_cluster import FakeCluster, until
from scheduler_in_memory import InMemory, MemoryStore

from reflux_placement.topology import Resources
from reflux_scheduler import growth, jobs
from reflux_scheduler.backends.base import Grant, GrantRefused, GrantStatus
from reflux_scheduler.job import Job, Part, Placement, RolePlaces
from reflux_scheduler.spec import JobSpec, RoleTemplate


class Stingy(FakeCluster):
    """Gives every job its first part, with agents at once; what becomes of later ones is up to the test."""

    def __init__(self, *nodes: str, later: str) -> None:
        super().__init__(*nodes)
        self.later = later
        self.more: list[Grant] = []
        self.world: InMemory

    async def request(self, grant: Grant) -> None:
        await super().request(grant)
        if grant.part > 0:
            self.more.append(grant)
            if self.later == "refused":
                del self.given[grant.id]
                raise GrantRefused("QOSMaxNodePerJob")
            state = {"ended": "ended", "waits": "waiting"}.get(self.later, "granted")
            self.given[grant.id] = GrantStatus(grant.id, state, reason=self.later)
        if grant.part == 0 or self.later == "given":
            for share in grant.shares:
                self.world.machines.up((share.node, grant.id))
                self.world.controller.registered((share.node, grant.id))


@pytest.fixture
async def scheduler():
    async with contextlib.AsyncExitStack() as stack:

        async def start(later: str, *nodes: str, **seconds: float):
            cluster = Stingy(*nodes, later=later)
            cluster.world = InMemory(await cluster.discover(), cluster, MemoryStore(), **seconds)
            return cluster, await stack.enter_async_context(cluster.world.running())

        yield start


def spec(count: int, **fields) -> JobSpec:
    return JobSpec("t", (RoleTemplate("w", count, Resources(gpus=4), ("x",), max_restarts=3, **fields),))


@pytest.mark.parametrize(
    ("later", "seconds", "said"),
    [
        ("refused", {}, "the cluster refuses its room: QOSMaxNodePerJob"),
        ("ended", {}, "grant {id} ended: ended"),
        ("waits", {"grant_seconds": 1.0}, "the cluster did not give its room within 1 s: waits"),
        pytest.param("silent", {"start_seconds": 1.0}, "no agent came to {node} within 1 s", marks=pytest.mark.slow),
    ],
)
async def test_a_job_that_cannot_grow_runs_on_as_it_is_and_does_not_ask_again_soon(scheduler, later, seconds, said):
    cluster, world = await scheduler(later, "n1", "n2", "n3", **seconds)
    job = await world.controller.create(spec(1, min_count=1, max_count=2), "one")
    await until(lambda: world.jobs[job.id].state == "RUNNING")
    world.controller.wake_policy()
    await until(lambda: bool(cluster.more))
    kept = dict(world.machines.running)
    await until(lambda: world.jobs[job.id].grow_after > 0 and len(world.jobs[job.id].parts) == 1)
    now = world.jobs[job.id]
    (more,) = cluster.more
    said = f"stays smaller: {said.format(id=more.id, node=more.shares[0].node)}"
    assert (now.state, now.placement.num_members, now.message) == ("RUNNING", 1, said)
    assert said in [event.text for event in now.events if event.kind == "resized"]
    assert kept == world.machines.running
    assert more.id in cluster.released
    assert world.ledger.room.free_NR[:, 0].sum() == 8
    # The policy looks again, and leaves it alone until the pause is over.
    for _ in range(3):
        assert not await world.controller.planner.cycle()
    assert len(cluster.more) == 1
    cluster.later = "given"
    await world.controller.book.change(job.id, lambda job: replace(job, grow_after=time.time() - 1))
    world.controller.wake_policy()
    await until(lambda: len(world.machines.running) == 2)
    assert kept.items() <= world.machines.running.items()


@pytest.mark.parametrize("later", ["refused", pytest.param("waits", marks=pytest.mark.slow)])
async def test_a_gang_whose_replacement_is_not_given_goes_back_into_the_queue(scheduler, later):
    cluster, world = await scheduler(later, "n1", "n2", "n3", grant_seconds=1.0)
    job = await world.controller.create(spec(2), "one")
    await until(lambda: world.jobs[job.id].state == "RUNNING")
    (first,) = cluster.asked[-1:]
    lost = first.shares[0].node
    world.machines.lose((lost, first.id))
    cluster.given[first.id] = replace(cluster.given[first.id], lost_nodes=(lost,))
    world.fleet.registrations += 1
    world.controller.wake()
    await until(lambda: any(event.kind == "requeued" for event in world.jobs[job.id].events))
    told = [event.text for event in world.jobs[job.id].events if event.kind == "requeued"][-1]
    assert told.startswith(
        "the cluster refuses its room" if later == "refused" else "the cluster did not give its room"
    )
    await until(lambda: len(cluster.more) > 1)
    assert {share.node for share in cluster.more[0].shares} | {lost} <= {"n1", "n2", "n3"}
    assert not world.machines.running


def grown(*parts: int, state: str = "RUNNING", **fields) -> Job:
    count = len(parts)
    nodes = tuple(f"n{rank}" for rank in range(count))
    placement = Placement("rack", "r", (RolePlaces("w", nodes, (15,) * count, parts),))
    held = tuple(Part(number, "granted" if number == 0 else "waiting") for number in sorted(set(parts)))
    return Job("j", 1, spec(count, **fields), 0.0, state=state, placement=placement, parts=held, attempt=1)


def places(job: Job | None) -> tuple[str, ...]:
    return job.placement.roles[0].nodes if job is not None and job.placement is not None else ()


def test_a_gang_shrinks_in_whole_segments_and_never_below_its_least():
    assert places(growth.given_up(grown(0, 0, 1, 1, min_count=2), 1, "x", 5.0)) == ("n0", "n1")
    assert growth.given_up(grown(0, 0, 1, min_count=3), 1, "x", 5.0).ending is not None
    segments = grown(0, 0, 1, 2, min_count=2, segment_size=2)
    assert growth.without(segments, 2) is not None
    assert places(growth.given_up(segments, 2, "x", 5.0)) == ("n0", "n1")


def test_a_part_is_never_given_back_in_pieces():
    moved_one = grown(0, 1, 0, min_count=1)
    assert growth.without(moved_one, 1) is None
    assert growth.given_up(moved_one, 1, "x", 5.0).ending is not None


def test_a_part_that_nobody_is_in_any_more_changes_nothing():
    job = grown(0, 0, min_count=1)
    assert growth.given_up(job, 1, "x", 5.0) is job
    ending = jobs.requeue(job, "first", 4.0)
    assert growth.given_up(ending, 0, "x", 5.0) is ending


def test_a_refused_gang_that_has_not_started_fails():
    assert growth.refused(grown(0, state="PLACED"), 0, "never", 5.0).ending.state == "FAILED"
