"""The conformance suite on backend `local`, where six agents of this machine are the nodes; and what moves members."""

import pytest
from conformance import *  # noqa: F403
from conformance_world import World
from scheduler_stack import alive

from reflux.scheduler.v1 import job_pb2


class LocalWorld(World):
    """Nodes are agents; a node that somebody else uses is one whose agent is away."""

    racks = (("n1", "n2", "n3"), ("n4", "n5", "n6"))
    own_agents = True

    def settings(self) -> dict[str, str]:
        return {"REFLUX_SCHEDULER_BACKEND": "local"}

    def begin(self) -> None:
        for node in self.nodes:
            self.stack.start_agent(node, REFLUX_AGENT_LEASE_SECONDS="1.5")

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
    world.scheduler()
    low = await world.create(world.role("rollout", len(world.nodes), world.gpus, stop_grace_seconds=1.0))
    await world.client.until_state(low.name, "RUNNING")
    high = await world.create(world.role("learner", len(world.nodes), world.gpus), priority=10)
    await world.client.until(low.name, lambda job: job.preemptions)
    world.stack.kill("scheduler")
    world.scheduler()
    await world.client.until_state(high.name, "RUNNING")
    low = await world.client.get(low.name)
    assert (low.state, low.preemptions) == (job_pb2.Job.STATE_PENDING, 1)
