"""The conformance suite on backend `local`: six agents of this machine are the nodes."""

import pytest
from conformance import *  # noqa: F403
from conformance import World
from scheduler_stack import alive


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
