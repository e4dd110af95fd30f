"""A cluster takes back whole grants: what becomes of the room of members that leave, and who may come there."""

from collections.abc import AsyncIterator

import pytest
from fake_cluster import until
from scheduler_in_memory import Exact, InMemory, MemoryStore

from reflux_placement.topology import Resources
from reflux_scheduler.job import Job, Part, Placement, RolePlaces
from reflux_scheduler.spec import JobSpec, RoleTemplate
from reflux_scheduler.view import smaller_sizes


@pytest.fixture
async def world() -> AsyncIterator[InMemory]:
    """Four nodes of four GPUs on a cluster that gives none of them twice."""
    cluster = Exact("n0", "n1", "n2", "n3")
    world = cluster.world = InMemory(await cluster.discover(), cluster, MemoryStore())
    async with world.running():
        yield world


def role(name: str, count: int, **fields) -> RoleTemplate:
    return RoleTemplate(name, count, Resources(gpus=4), ("x",), max_restarts=3, **fields)


async def create(world: InMemory, count: int, **fields) -> str:
    job = await world.controller.create(JobSpec("t", (role("w", count, **fields),)), f"request {len(world.jobs)}")
    return job.id


async def until_runs(world: InMemory, job: str, members: int) -> Job:
    """Waits until so many members of a job have a place and run."""

    def runs() -> bool:
        here = [label for _, label in world.machines.running if label.startswith(job)]
        return world.jobs[job].state == "RUNNING" and world.jobs[job].num_members == len(here) == members

    await until(runs)
    return world.jobs[job]


def nodes_of(job: Job) -> list[str]:
    return [seat.node for seat in job.placement.seats()]


async def test_growth_goes_back_as_the_grant_that_it_came_in(world):
    elastic = await create(world, 1, min_count=1, max_count=4)
    await until(lambda: world.jobs[elastic].state == "RUNNING")
    world.controller.wake_policy()
    grown = await until_runs(world, elastic, 4)
    assert [seat.part for seat in grown.placement.seats()] == [0, 1, 1, 1]
    other = await create(world, 1)
    await until_runs(world, other, 1)
    world.controller.wake_policy()
    # What the other one left of it is idle, and grown into anew.
    again = await until_runs(world, elastic, 3)
    assert [seat.part for seat in again.placement.seats()] == [0, 2, 2]
    assert world.machines.faults == []


async def test_nobody_is_placed_where_a_grant_still_holds_room_that_its_member_has_left(world):
    job = await create(world, 2)
    left = nodes_of(await until_runs(world, job, 2))[0]
    await world.controller.drain(left, "a test")
    await world.controller.saved(job)
    await until(lambda: left not in nodes_of(world.jobs[job]))
    await until_runs(world, job, 2)
    await world.controller.drain(left, None)
    await until_runs(world, await create(world, 1), 1)
    late = await create(world, 1)
    await until(lambda: world.jobs[late].message.startswith("waits"))
    assert world.jobs[late].state == "PENDING"
    assert [seat.node for seat in world.jobs[job].stranded] == [left]
    await world.controller.cancel(job)
    await until_runs(world, late, 1)


async def test_a_scheduler_that_starts_knows_which_room_is_still_held(world):
    job = await create(world, 2)
    left = nodes_of(await until_runs(world, job, 2))[0]
    await world.controller.drain(left, "a test")
    await world.controller.saved(job)
    await until(lambda: bool(world.jobs[job].stranded))
    after = InMemory(world.topology, world.backend, world.store)
    await after.controller.load()
    assert after.ledger.room.free_NR[:, 0].tolist() == world.ledger.room.free_NR[:, 0].tolist()
    assert after.ledger.room.free_NR[world.topology.index_of(left), 0] == 0


async def test_a_gang_that_shrinks_over_a_lost_node_goes_on_in_the_room_that_it_has(world):
    job = await create(world, 4, min_count=1)
    before = await until_runs(world, job, 4)
    lost = nodes_of(before)[1]
    world.backend.lose(lost)
    world.fleet.registrations += 1
    world.controller.wake()
    after = await until_runs(world, job, 3)
    first, _, third, last = nodes_of(before)
    assert nodes_of(after) == [first, last, third]
    assert {seat.part for seat in after.placement.seats()} == {0}
    assert after.stranded == ()


def placed(**parts: tuple[int, ...]) -> Job:
    """A job whose elastic roles have members in these grants."""
    roles = tuple(role(name, 2, min_count=0, max_count=99) for name in parts)
    places = tuple(RolePlaces(name, ("n",) * len(each), (0,) * len(each), each) for name, each in parts.items())
    held = tuple(Part(number) for number in sorted({number for each in parts.values() for number in each}))
    return Job("j", 1, JobSpec("t", roles), 0.0, placement=Placement("cluster", "c", places), parts=held)


@pytest.mark.parametrize(
    ("parts", "sizes"),
    [
        ((0, 0, 1, 1, 2), (0, 2, 4)),
        ((0, 3, 0, 1, 1), (0, 3)),  # w/1 moved: its grant lies inside the first
        ((0, 1, 2, 1), (0, 1)),
    ],
)
def test_a_role_shrinks_to_sizes_at_which_no_grant_is_cut(parts, sizes):
    assert smaller_sizes(placed(w=parts)) == {"w": sizes}


def test_a_grant_of_several_roles_is_kept():
    assert smaller_sizes(placed(a=(0, 0, 1), b=(0, 2, 2))) == {"a": (2,), "b": (1,)}


def test_only_whole_segments_down_to_the_least_are_given_back():
    spec = JobSpec("t", (role("w", 4, min_count=2, max_count=8, segment_size=2),))
    place = RolePlaces("w", ("n",) * 8, (0,) * 8, (0, 0, 1, 1, 2, 3, 3, 3))
    job = Job("j", 1, spec, 0.0, placement=Placement("cluster", "c", (place,)))
    assert smaller_sizes(job) == {"w": (2, 4)}
    assert smaller_sizes(Job("j", 1, spec, 0.0)) == {}
