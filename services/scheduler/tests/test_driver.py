"""Drivers in trouble: errors that nobody has thought of, agents that speak of the past, gangs that leave slowly."""

import time
from itertools import pairwise

import pytest
from fake_cluster import until
from scheduler_in_memory import InMemory, MemoryStore

from reflux_placement.topology import Node, Resources, build_topology
from reflux_scheduler import driver, jobs
from reflux_scheduler.backends.local import LocalBackend
from reflux_scheduler.crew import AgentAway
from reflux_scheduler.job import Heard, Report
from reflux_scheduler.spec import JobSpec, RoleTemplate


def spec(count: int) -> JobSpec:
    return JobSpec("t", (RoleTemplate("w", count, Resources(millicpus=10), ("x",)),))


@pytest.fixture
async def world():
    topology = build_topology("c", [Node(f"n{n}", Resources(0, 4000), {"rack": "r"}) for n in range(2)])
    memory = InMemory(topology, LocalBackend(), MemoryStore())
    async with memory.running():
        for node in topology.nodes:
            memory.machines.up((node.name, ""))
            memory.controller.registered((node.name, ""))
        yield memory


async def test_a_step_that_fails_is_tried_again_after_longer_and_longer_pauses_and_the_job_says_why(world, monkeypatch):
    monkeypatch.setattr(driver, "_RETRY_SECONDS", 0.01)
    start, tried_at = world.machines.start, []

    async def fails_at_first(job, seat):
        tried_at.append(time.monotonic())
        if len(tried_at) <= 4:
            raise KeyError("job_id")
        return await start(job, seat)

    world.machines.start = fails_at_first
    job = await world.controller.create(spec(1), "one")
    await until(lambda: len(tried_at) == 4)
    assert world.jobs[job.id].message == "held up: KeyError: 'job_id'"
    await until(lambda: world.jobs[job.id].state == "RUNNING")
    pauses = [after - before for before, after in pairwise(tried_at)]
    assert all(pause >= 0.01 * 2**count for count, pause in enumerate(pauses)), pauses


async def test_a_member_of_an_earlier_attempt_does_not_keep_a_job_from_ending(world):
    async def does_not_answer(job, seat):
        raise AgentAway("not now")

    async def knows_the_attempt_before(job, seat, *, wait=True):
        report = Report(job.role_id(seat), "stopped", revision=99, attempt=job.attempt - 1)
        return Heard("i", {report.role_id: report})

    job = await world.controller.create(spec(1), "one")
    await until(lambda: world.jobs[job.id].state == "RUNNING")
    world.machines.start = does_not_answer
    await world.controller.book.change(job.id, lambda job: jobs.requeue(job, "for the test", time.time()))
    await until(lambda: (world.jobs[job.id].state, world.jobs[job.id].attempt) == ("STARTING", 2))
    world.machines.stop = knows_the_attempt_before
    await world.controller.cancel(job.id)
    await until(lambda: world.jobs[job.id].state == "CANCELLED")


async def test_all_members_of_a_large_gang_are_told_to_stop_before_the_end_of_any_is_waited_for(world):
    job = await world.controller.create(spec(130), "one")
    await until(lambda: world.jobs[job.id].state == "RUNNING")
    world.machines.slow = True
    await world.controller.cancel(job.id)
    everyone = {f"no wait {job.id}/w/{rank}" for rank in range(130)}
    await until(lambda: everyone <= set(world.machines.told))
    assert len(world.machines.running) == 130
    world.machines.slow = False
    for key in list(world.machines.leaving):
        world.machines.leave(key)
    await until(lambda: world.jobs[job.id].final)
    assert world.machines.running == {}
