"""The world of the conformance suite on backend `kubernetes`: an emulated cluster whose pods are real agents."""

from pathlib import Path

import pytest
from conformance_world import World
from kube_api import NAMESPACE
from kube_cluster import Cluster
from scheduler_stack import Zygote, alive


class KubernetesWorld(World):
    """Two racks of two nodes."""

    racks = (("n1", "n2"), ("n3", "n4"))
    cluster: Cluster

    async def begin(self, cluster: Cluster) -> None:
        self.cluster = cluster
        for node in self.nodes:
            await cluster.add_node(node, self.gpus)

    def settings(self) -> dict[str, str]:
        options = self.stack.folder / "kubernetes.toml"
        options.write_text(
            f'url = "{self.cluster.url}"\nnamespace = "{NAMESPACE}"\nagent_port = 0\ngrace_seconds = 5\n'
        )
        return {"REFLUX_SCHEDULER_BACKEND": "kubernetes", "REFLUX_SCHEDULER_BACKEND_OPTIONS": str(options)}

    async def kill_node(self, node: str) -> None:
        await self.cluster.fail_node(node)

    async def revive_node(self, node: str) -> None:
        await self.cluster.revive_node(node)

    async def occupy(self, node: str) -> None:
        container = {"name": "c", "resources": {"limits": {"nvidia.com/gpu": str(self.gpus)}}}
        await self.cluster.add_foreign_pod(f"on-{node}", {"nodeName": node, "containers": [container]})

    async def vacate(self, node: str) -> None:
        await self.cluster.remove_foreign_pod(f"on-{node}")

    def agents(self) -> list[int]:
        return [pid for pid in self.cluster.agents() if alive(pid)]


@pytest.fixture(scope="module")
def zygote():
    """The client takes a second to import: too long for the short leases of these tests."""
    zygote = Zygote("kubernetes.aio.client", "kubernetes.aio.config")
    yield zygote
    zygote.close()


@pytest.fixture
async def world(own_stack, client, zygote):
    """The agents of pods are forked like those of the other tests."""

    def spawn(argv: list[str], environment: dict[str, str], log: Path) -> int:
        return zygote.start(argv[-1], environment, log).pid

    folder = own_stack.folder / "pods"
    folder.mkdir()
    async with Cluster(folder, spawn) as cluster:
        world = KubernetesWorld(own_stack, client)
        await world.begin(cluster)
        yield world
        own_stack.kill("scheduler")
    assert world.agents() == []
