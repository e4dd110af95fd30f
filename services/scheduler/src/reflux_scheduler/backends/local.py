"""Backend `local`: every node has an agent of its own that serves all jobs, so room needs no asking."""

from collections.abc import Mapping

from reflux_placement.topology import Topology
from reflux_scheduler.backends.base import Backend, Grant, GrantStatus, NodeCondition


class LocalBackend(Backend):
    """Grants are given at once; whether a node is there is told by its agent alone."""

    shared_agents = True

    def __init__(self) -> None:
        self._grants: dict[str, GrantStatus] = {}

    async def discover(self) -> Topology | None:
        return None

    async def conditions(self) -> Mapping[str, NodeCondition]:
        return {}

    async def request(self, grant: Grant) -> None:
        self._grants[grant.id] = GrantStatus(grant.id, "granted")

    async def release(self, grant_id: str) -> None:
        self._grants.pop(grant_id, None)

    async def grants(self) -> Mapping[str, GrantStatus]:
        return dict(self._grants)
