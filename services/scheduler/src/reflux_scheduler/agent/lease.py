"""Owns the agent's lease: registers, sends heartbeats, and stops every member when the scheduler stays away."""

import asyncio
import logging
import time
import uuid
from collections.abc import Iterable
from typing import TYPE_CHECKING

import grpc

from reflux.scheduler.v1 import scheduler_service_pb2 as pb
from reflux_kit.errors import StartupError
from reflux_scheduler.agent import metrics
from reflux_scheduler.agent.members import MemberTable
from reflux_scheduler.agent.messages import render_report

if TYPE_CHECKING:
    from reflux.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceAsyncStub

log = logging.getLogger(__name__)

_CALL_SECONDS = 5.0
_RETRY_SECONDS = 0.5
_REFUSED = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAUTHENTICATED)


class Superseded(RuntimeError):
    """Another agent has taken over the node; this one must leave."""


class Lease:
    """The agent's side of the contract with the scheduler.

    The lease is counted from the moment a renewal was *sent*, the scheduler counts from its arrival: when the scheduler
    takes the node for lost, the members here have been told to stop.
    """

    def __init__(
        self, stub: "SchedulerServiceAsyncStub", members: MemberTable, node: str, lease_seconds: float
    ) -> None:
        self._stub = stub
        self._members = members
        self._node = node
        self._lease_seconds = lease_seconds
        self._heartbeat_seconds = 2.0
        self._renewed = time.monotonic()
        self._registered = False
        self._away = False
        self._discarding: set[asyncio.Task[None]] = set()
        self.incarnation = uuid.uuid4().hex

    async def begin(self, address: str) -> None:
        """Registers once. A scheduler that is away is no error, one that refuses this node is a StartupError."""
        try:
            await self._register(address)
        except grpc.aio.AioRpcError as error:
            if error.code() in _REFUSED:
                raise StartupError(f"the scheduler refuses node {self._node!r}: {error.details()}") from None
            self._note_away(error)

    async def keep(self, address: str) -> None:
        """Renews until cancelled. Raises Superseded when another agent serves this node now."""
        while True:
            try:
                if not self._registered:
                    await self._register(address)
                await self._next_beat()
                await self._beat()
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                    raise Superseded(error.details()) from None
                self._note_away(error)
                await self._expire_if_due()
                await asyncio.sleep(_RETRY_SECONDS)

    async def _register(self, address: str) -> None:
        sent = time.monotonic()
        request = pb.RegisterAgentRequest(node=self._node, address=address, incarnation=self.incarnation)
        request.roles.extend(render_report(report, self._node) for report in await self._members.measured())
        response = await self._stub.RegisterAgent(request, timeout=_CALL_SECONDS)
        self._renewed, self._registered, self._away = sent, True, False
        self._lease_seconds = response.lease_seconds or self._lease_seconds
        self._heartbeat_seconds = response.heartbeat_seconds or self._heartbeat_seconds
        log.info("registered node %s; lease of %g s", response.node, self._lease_seconds)
        self._discard(response.stop_roles)

    async def _beat(self) -> None:
        sent = time.monotonic()
        self._members.changed.clear()
        request = pb.AgentHeartbeatRequest(node=self._node, incarnation=self.incarnation)
        reports = await self._members.measured()
        metrics.observe(reports)
        request.roles.extend(render_report(report, self._node) for report in reports)
        response = await self._stub.AgentHeartbeat(request, timeout=_CALL_SECONDS)
        self._renewed, self._away = sent, False
        self._registered = not response.register_again
        self._discard(response.stop_roles)

    async def _next_beat(self) -> None:
        """Waits for the next beat; a change of a member brings it forward."""
        try:
            async with asyncio.timeout(self._heartbeat_seconds):
                await self._members.changed.wait()
        except TimeoutError:
            return

    async def _expire_if_due(self) -> None:
        silent = time.monotonic() - self._renewed
        if silent < self._lease_seconds:
            return
        if any(report.state in ("running", "restarting") for report in self._members.reports()):
            log.error("no scheduler for %.0f s: the lease is over, stopping every member", silent)
        await self._members.stop_all(f"the agent's lease ended: no scheduler for {silent:.0f} s")

    def _discard(self, role_ids: Iterable[str]) -> None:
        unwanted = list(role_ids)
        if unwanted:
            # A stop may take as long as its grace; the lease must not wait for it.
            task = asyncio.create_task(self._members.discard(unwanted))
            self._discarding.add(task)
            task.add_done_callback(self._discarding.discard)

    def _note_away(self, error: grpc.aio.AioRpcError) -> None:
        if not self._away:
            log.warning("the scheduler does not answer (%s: %s)", error.code().name, error.details())
        self._away = True
