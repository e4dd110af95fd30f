"""The conformance suite on backend `local`, where six agents of this machine are the nodes.

Of its tests of lost nodes `make test` runs one on Kubernetes, and one that needs no spare in `test_crashes`.
"""

import asyncio
import os
import signal

import conformance
import pytest
from conformance_world import World
from redis_gate import RedisGate
from scheduler_stack import HANG_SECONDS, alive

from reflux.scheduler.v1 import job_pb2

LONG = {
    "test_a_lost_node_is_replaced_by_the_spare_of_its_rack_and_the_others_run_on",
    "test_a_lost_node_without_replacement_sends_the_whole_gang_back_until_there_is_room",
}
globals().update(conformance.suite(set(conformance.__all__) - LONG))


class LocalWorld(World):
    """Nodes are agents; a node that somebody else uses is one whose agent is away."""

    racks = (("n1", "n2", "n3"), ("n4", "n5", "n6"))
    own_agents = True

    def settings(self) -> dict[str, str]:
        return {"REFLUX_SCHEDULER_BACKEND": "local"}

    def begin(self) -> None:
        for node in self.nodes:
            self.stack.start_agent(node)

    async def kill_node(self, node: str) -> None:
        self.stack.kill(node)

    async def revive_node(self, node: str) -> None:
        self.stack.start_agent(node)

    async def occupy(self, node: str) -> None:
        self.stack.kill(node)

    async def vacate(self, node: str) -> None:
        self.stack.start_agent(node)

    def agents(self) -> list[int]:
        return [
            process.pid for name, process in self.stack.processes.items() if name != "scheduler" and alive(process.pid)
        ]


@pytest.fixture
def world(own_stack, client) -> LocalWorld:
    world = LocalWorld(own_stack, client)
    world.begin()
    return world


async def test_room_that_was_freed_for_a_job_is_its_own_after_a_kill_of_the_scheduler(world):
    everything = (len(world.nodes), world.gpus)
    async with RedisGate(world.stack.environment["REFLUX_REDIS_URL"]) as gate:
        steady = {"REFLUX_REDIS_URL": gate.url, "REFLUX_SCHEDULER_HEARTBEAT_SECONDS": "2"}
        world.scheduler(**steady)
        low = await world.create(world.role("rollout", *everything))
        await world.client.until_state(low.name, "RUNNING")
        gate.arm(rb'"ending":{', "after")
        high = await world.create(world.role("learner", *everything), priority=10, protected=True)
        async with asyncio.timeout(HANG_SECONDS):
            await gate.hit.wait()
        # Nobody is placed before agents speak to the new scheduler, so that the rival is there in time.
        agents = world.agents()
        for pid in agents:
            os.kill(pid, signal.SIGSTOP)
        try:
            world.stack.kill("scheduler")
            await gate.release()
            world.scheduler(**steady)
            rival = await world.create(world.role("engine", *everything), priority=11)
        finally:
            for pid in agents:
                os.kill(pid, signal.SIGCONT)
        await world.client.until_state(high.name, "RUNNING")
        states = [(await world.client.get(each.name)).state for each in (low, rival)]
        assert states == [job_pb2.Job.STATE_PENDING] * 2
        assert (await world.client.get(low.name)).preemptions == 1
        world.stack.kill("scheduler")  # Without the gate it would look for its Redis for a second.
