"""Owns the Ray backend: grants are detached placement groups on exactly the chosen nodes, with one agent per bundle."""

import sys
from collections.abc import Mapping
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

from reflux_placement.sources.labels import LabelledNode, topology_from_labels
from reflux_placement.topology import Resources, Topology
from reflux_scheduler.backends.base import AgentLaunch, Backend, Grant, GrantStatus, NodeCondition
from reflux_scheduler.backends.ray.helper import DriverProcess
from reflux_scheduler.backends.ray.settings import RaySettings

_FOR_THE_DRIVER = {"address", "namespace", "domain_key", "node_name_key", "start_seconds", "stop_grace_seconds"}


class RayBackend(Backend):
    """An async context manager: inside the block the driver process may run; grants outlive it."""

    def __init__(self, settings: RaySettings, launch: AgentLaunch) -> None:
        program, *arguments = launch.argv
        opening = {
            "options": settings.model_dump(include=_FOR_THE_DRIVER),
            # Nodes have this distribution in Ray's own interpreter, wherever that lies there.
            "argv": ["python" if program == sys.executable else program, *arguments],
            "environment": dict(launch.environment),
        }
        self._settings = settings
        self._driver = DriverProcess(opening, settings.connect_seconds)

    @property
    def driver_pid(self) -> int:
        """Of the process that talks to Ray, 0 for none."""
        return self._driver.pid

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._driver.close()

    async def discover(self) -> Topology | None:
        nodes = [
            LabelledNode(node["name"], Resources(**node["resources"]), node["labels"])
            for node in await self._call("nodes")
            # A head without room for work is no node; a node that is down tells no resources.
            if node["resources"]["gpus"] or node["resources"]["millicpus"]
        ]
        return topology_from_labels(self._settings.cluster, nodes, self._settings.level_keys) if nodes else None

    async def conditions(self) -> Mapping[str, NodeCondition]:
        return {
            node["name"]: NodeCondition(node["state"], node["reason"], Resources(**node["foreign"]))
            for node in await self._call("nodes")
        }

    async def request(self, grant: Grant) -> None:
        shares = [{"node": share.node, "resources": asdict(share.resources)} for share in grant.shares]
        await self._call("request", grant_id=grant.id, shares=shares)

    async def release(self, grant_id: str) -> None:
        await self._call("release", self._settings.stop_grace_seconds, grant_id=grant_id)

    async def grants(self) -> Mapping[str, GrantStatus]:
        return {
            fields["id"]: GrantStatus(**{**fields, "lost_nodes": tuple(fields.get("lost_nodes", ()))})
            for fields in await self._call("grants")
        }

    async def _call(self, method: str, extra_seconds: float = 0.0, **arguments: Any) -> Any:
        return await self._driver.call(method, self._settings.call_seconds + extra_seconds, **arguments)
