"""Backend `local`: every node has an agent of its own that serves all jobs, so room is never asked for."""

from collections.abc import Mapping

from reflux_placement.topology import Topology
from reflux_scheduler.backends.base import Backend, Grant, GrantStatus, NodeCondition


class LocalBackend(Backend):
    """Whether a node is there is told by its agent alone; jobs have no grants."""

    shared_agents = True

    async def discover(self) -> Topology | None:
        return None

    async def conditions(self) -> Mapping[str, NodeCondition]:
        return {}

    async def request(self, grant: Grant) -> None:
        raise AssertionError("the agents of the nodes serve every job")

    async def release(self, grant_id: str) -> None:
        raise AssertionError("the agents of the nodes serve every job")

    async def grants(self) -> Mapping[str, GrantStatus]:
        return {}
