"""Backend `local`: members are processes under the `reflux-agent` of their node."""

from contextlib import AsyncExitStack
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
    """One channel per agent address; opened on first use, closed with the backend."""

    def __init__(self, fleet: Fleet, settings: ServiceSettings) -> None:
        self._fleet = fleet
        self._settings = settings
        self._stack = AsyncExitStack()
        self._stubs: dict[str, AgentServiceAsyncStub] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def start(self, job: Job, member: Member) -> tuple[str, Report]:
        incarnation, stub = await self._stub(member.node)
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
        incarnation, stub = await self._stub(member.node)
        grace = job.spec.role(member.role).stop_grace_seconds
        request = pb.StopRoleRequest(role_id=job.role_id(member), grace_seconds=grace)
        try:
            response = await stub.StopRole(request, timeout=grace + _STOP_MARGIN_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return None
            raise self._away(member.node, error) from None
        return incarnation, parse_report(response.role)

    async def _stub(self, node: str) -> tuple[str, "AgentServiceAsyncStub"]:
        agent = self._fleet.agent(node)
        if agent is None:
            raise BackendAway(f"node {node} has no registered agent")
        stub = self._stubs.get(agent.address)
        if stub is None:
            channel = await self._stack.enter_async_context(
                open_channel(agent.address, self._settings, subject="scheduler")
            )
            stub = self._stubs[agent.address] = cast("AgentServiceAsyncStub", AgentServiceStub(channel))
        return agent.incarnation, stub

    @staticmethod
    def _away(node: str, error: grpc.aio.AioRpcError) -> BackendAway:
        return BackendAway(f"the agent of node {node} answered {error.code().name}: {error.details()}")
