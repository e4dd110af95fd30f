"""The conformance suite on backend `ray`: a real Ray cluster whose actors hold real agents.

Every actor and every agent is a new Python here (1 s of CPU each): all tests but one run in `make soak` only.
"""

import contextlib
import os
import signal
from pathlib import Path

import pytest
from conformance import suite
from conformance_world import World
from ray_cluster import RayCluster

from reflux_scheduler.backends.base import AgentLaunch
from reflux_scheduler.backends.ray.backend import RayBackend
from reflux_scheduler.backends.ray.settings import RaySettings

QUICK = ("test_the_life_of_a_gang",)


globals().update(suite(QUICK))


class RayWorld(World):
    """Two racks of two nodes, beside a head without room."""

    racks = (("r0n0", "r0n1"), ("r1n0", "r1n1"))
    cluster: RayCluster

    def begin(self, cluster: RayCluster) -> None:
        self.cluster = cluster
        self.away: set[str] = set()
        self.occupied: set[str] = set()

    @property
    def options(self) -> RaySettings:
        return RaySettings(address=self.cluster.address, namespace=self.stack.folder.name, stop_grace_seconds=2)

    def settings(self) -> dict[str, str]:
        path = self.stack.folder / "ray.toml"
        path.write_text(
            f'address = "{self.cluster.address}"\nnamespace = "{self.stack.folder.name}"\nstop_grace_seconds = 2\n'
        )
        return {
            **self.cluster.environment,
            "REFLUX_SCHEDULER_BACKEND": "ray",
            "REFLUX_SCHEDULER_BACKEND_OPTIONS": str(path),
            "REFLUX_STATE_DIR": str(self.stack.folder / "state"),
        }

    async def kill_node(self, node: str) -> None:
        self.cluster.kill(node)
        self.away.add(node)

    async def revive_node(self, node: str) -> None:
        self.cluster.add(node)
        self.away.discard(node)

    async def occupy(self, node: str) -> None:
        self.cluster.occupy(node)
        self.occupied.add(node)

    async def vacate(self, node: str) -> None:
        self.cluster.vacate(node)
        self.occupied.discard(node)

    def agents(self) -> list[int]:
        """Agents of this scheduler below actors, by their environment."""
        ours = f"REFLUX_SCHEDULER_ADDRESS={self.stack.address}".encode()
        found: list[int] = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                if (
                    b"reflux_scheduler.agent.main" in (entry / "cmdline").read_bytes()
                    and ours in (entry / "environ").read_bytes().split(b"\0")
                ):  # fmt: skip
                    found.append(int(entry.name))
        return found

    async def clear(self) -> None:
        """What a failed test has left."""
        if self.agents():
            async with RayBackend(self.options, AgentLaunch(("true",), {})) as backend:
                for grant_id in await backend.grants():
                    await backend.release(grant_id)
        for pid in self.agents():
            os.kill(pid, signal.SIGKILL)
        for node in list(self.occupied):
            await self.vacate(node)
        for node in list(self.away):
            await self.revive_node(node)


@pytest.fixture
async def world(own_stack, client, ray_nodes, monkeypatch):
    for name, value in ray_nodes.environment.items():
        monkeypatch.setenv(name, value)
    world = RayWorld(own_stack, client)
    world.begin(ray_nodes)
    yield world
    own_stack.close()
    await world.clear()
