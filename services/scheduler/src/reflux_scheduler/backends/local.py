"""Backend `local`: members are processes under the `reflux-agent` of their node."""

import asyncio
from types import TracebackType
from typing import TYPE_CHECKING, Self, cast

import grpc

from reflux.scheduler.v1 import agent_service_pb2 as pb
from reflux.scheduler.v1.agent_service_pb2_grpc import AgentServiceStub
from reflux_kit.channel import open_channel
from reflux_kit.settings import ServiceSettings
from reflux_scheduler.backends.base import Backend, BackendAway, StartRefused
from reflux_scheduler.fleet import Fleet
from reflux_scheduler.gang import Member
from reflux_scheduler.job import Job, Report
from reflux_scheduler.messages import parse_report, render_role

if TYPE_CHECKING:
    from reflux.scheduler.v1.agent_service_pb2_grpc import AgentServiceAsyncStub

_START_SECONDS = 15.0
_STOP_MARGIN_SECONDS = 5.0


class LocalBackend(Backend):
    """One channel per node, opened on first use and anew when the node's agent has moved; closed with the backend."""

    def __init__(self, fleet: Fleet, settings: ServiceSettings) -> None:
        self._fleet = fleet
        self._settings = settings
        self._channels: dict[str, tuple[str, grpc.aio.Channel]] = {}
        self._retiring: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _, channel in self._channels.values():
            await channel.close()

    async def start(self, job: Job, member: Member) -> tuple[str, Report]:
        incarnation, stub = self._stub(member.node)
        request = pb.StartRoleRequest(
            role_id=job.role_id(member),
            spec=render_role(job.spec.role(member.role)),
            job=job.name,
            rank=member.rank,
            gpu_indices=member.gpu_indices,
        )
        try:
            response = await stub.StartRole(request, timeout=_START_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                raise StartRefused(error.details() or "") from None
            raise self._away(member.node, error) from None
        return incarnation, parse_report(response.role)

    async def stop(self, job: Job, member: Member) -> tuple[str, Report] | None:
        incarnation, stub = self._stub(member.node)
        grace = job.spec.role(member.role).stop_grace_seconds
        request = pb.StopRoleRequest(role_id=job.role_id(member), grace_seconds=grace)
        try:
            response = await stub.StopRole(request, timeout=grace + _STOP_MARGIN_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return None
            raise self._away(member.node, error) from None
        return incarnation, parse_report(response.role)

    def _retire(self, channel: grpc.aio.Channel) -> None:
        """Closes a channel to an address that is no longer used, once its calls are over."""
        task = asyncio.create_task(channel.close(grace=_START_SECONDS))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    def _stub(self, node: str) -> tuple[str, "AgentServiceAsyncStub"]:
        agent = self._fleet.agent(node)
        if agent is None:
            raise BackendAway(f"node {node} has no registered agent")
        address, channel = self._channels.get(node, ("", None))
        if channel is None or address != agent.address:
            if channel is not None:
                self._retire(channel)
            channel = open_channel(agent.address, self._settings, subject="scheduler")
            self._channels[node] = (agent.address, channel)
        return agent.incarnation, cast("AgentServiceAsyncStub", AgentServiceStub(channel))

    @staticmethod
    def _away(node: str, error: grpc.aio.AioRpcError) -> BackendAway:
        return BackendAway(f"the agent of node {node} answered {error.code().name}: {error.details()}")
