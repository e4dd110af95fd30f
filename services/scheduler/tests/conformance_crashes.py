"""`kill -9` of the scheduler at every moment that matters, by holding the write before or behind it (`redis_gate`)."""

import asyncio
import contextlib

import grpc
import pytest
from conformance_world import World, all_run, nodes_of, pids_of
from redis_gate import RedisGate, Side

from reflux.scheduler.v1 import job_pb2

STARTS: dict[str, tuple[bytes, Side]] = {
    "a place was decided, nothing is stored": (rb'"state":"PLACED"', "before"),
    "the place is stored, nothing was asked for": (rb'"state":"PLACED"', "after"),
    "room was granted, nothing is recorded": (rb'"state":"granted"', "before"),
    "the room is recorded, no member was told to start": (rb'"state":"granted"', "after"),
    "all is ready, no start is stored": (rb'"state":"STARTING"', "before"),
    "the start is stored, no member was told": (rb'"state":"STARTING"', "after"),
    "a member was started, nothing is recorded": (rb'"state":"running"', "before"),
    "a member's start is recorded, others may not be": (rb'"state":"running"', "after"),
}
ENDS: dict[str, tuple[bytes, Side]] = {
    "the end is stored, no member was told": (rb'"ending":{', "after"),
    "all members have ended, nothing is recorded": (rb'"ended_at":[1-9]', "before"),
}


async def crash(world: World, gate: RedisGate) -> None:
    """Waits for the held write, kills the scheduler there and starts another one."""
    async with asyncio.timeout(60):
        await gate.hit.wait()
    world.stack.kill("scheduler")
    await gate.release()
    world.scheduler(REFLUX_REDIS_URL=gate.url)


async def test_a_scheduler_killed_at_each_moment_of_a_start_starts_every_member_once(world):
    async with RedisGate(world.stack.environment["REFLUX_REDIS_URL"]) as gate:
        world.scheduler(REFLUX_REDIS_URL=gate.url)
        await world.until_up()
        for moment, (pattern, side) in STARTS.items():
            if world.own_agents and "room" in moment:
                continue  # Nothing is asked of anybody: the agents are there.
            for path in world.out.iterdir():
                path.unlink()
            gate.arm(pattern, side)
            job = await world.create(world.role("learner", 2, world.gpus))
            await crash(world, gate)
            job = await world.client.until(job.name, all_run)
            assert job.state == job_pb2.Job.STATE_RUNNING, moment
            pids = pids_of(job)
            assert len(set(nodes_of(job).values())) == len(pids) == 2, moment
            await world.until(lambda: len(world.starts()) == 2, "every member's start")
            nodes = await world.topology()
            taken = {name for name, node in nodes.items() if node.free.gpus < world.gpus}
            assert taken == set(nodes_of(job).values()), moment
            await world.end(job)
            # Only now: whoever was started twice would have told so by now.
            assert world.starts() == {member: [pid] for member, pid in pids.items()}, moment
        world.stack.kill("scheduler")  # Without the gate it would look for its Redis for a second.


@pytest.mark.slow
async def test_a_scheduler_killed_at_each_moment_of_an_end_leaves_nothing(world):
    async with RedisGate(world.stack.environment["REFLUX_REDIS_URL"]) as gate:
        world.scheduler(REFLUX_REDIS_URL=gate.url)
        for pattern, side in ENDS.values():
            job = await world.create(world.role("learner", 2, world.gpus))
            job = await world.client.until_state(job.name, "RUNNING")
            gate.arm(pattern, side)
            cancelled = asyncio.create_task(world.client.cancel(job.name))
            await crash(world, gate)
            with contextlib.suppress(grpc.aio.AioRpcError):
                await cancelled
            await world.client.until_state(job.name, "CANCELLED")
            await world.until_clean(*pids_of(job).values())


__all__ = [name for name in dir() if name.startswith("test_")]
