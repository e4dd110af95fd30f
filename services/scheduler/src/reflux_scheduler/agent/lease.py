"""Owns the agent's lease: registers, sends heartbeats, and stops every member when the scheduler stays away."""

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING

import grpc

from reflux.scheduler.v1 import scheduler_service_pb2 as pb
from reflux_kit.errors import StartupError
from reflux_scheduler.agent import metrics
from reflux_scheduler.agent.members import MemberTable
from reflux_scheduler.agent.messages import render_report
from reflux_scheduler.agent.orders import RoleReport
from reflux_scheduler.agent.supervisor import RoleSupervisor

if TYPE_CHECKING:
    from reflux_scheduler.agent.schedulers import Schedulers

log = logging.getLogger(__name__)

_CALL_SECONDS = 5.0
_RETRY_SECONDS = 0.5
_GOODBYE_SECONDS = 1.0
_LOOK_SECONDS = 0.5
"""The end of a lease is awaited in steps of this length, because a registration may bring it forward."""

_GRACE_SHARE = 0.8
"""Share of the margin that members get for their stop at the end of the lease; the rest is for the kill itself."""

_REFUSED = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAUTHENTICATED)


class Superseded(RuntimeError):
    """Another agent has taken over the node; this one must leave."""


class OutOfDate(ConnectionError):
    """A scheduler of an earlier term answered: it does not know yet that another one leads, so its word is no word."""


class TermGuard:
    """The highest term of a scheduler that this agent has seen: what an earlier leader still says is refused."""

    def __init__(self) -> None:
        self.highest = 0

    def check(self, term: int) -> None:
        """Raises OutOfDate for an answer of a scheduler that does not lead any more."""
        if not self.admit(term):
            raise OutOfDate(f"it leads with term {term}, but one with term {self.highest} has led since")

    def admit(self, term: int) -> bool:
        """Whether a caller of this term may be obeyed; 0 is a caller that has none."""
        if term and term < self.highest:
            return False
        self.highest = max(self.highest, term)
        return True


class Lease:
    """The agent's side of the contract with the scheduler.

    The lease is counted from the moment a renewal was *sent*, the scheduler counts from its arrival. At its end the
    members are stopped within the margin that the scheduler waits on top: once it takes the node for lost, all is gone.
    """

    def __init__(
        self,
        schedulers: "Schedulers",
        members: MemberTable,
        node: str,
        lease_seconds: float,
        grant: str = "",
        terms: TermGuard | None = None,
    ) -> None:
        self._schedulers = schedulers
        self._members = members
        self._node = node
        self._grant = grant
        self._terms = terms or TermGuard()
        self._lease_seconds = lease_seconds
        self._heartbeat_seconds = 2.0
        self._margin_seconds = 15.0
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
        except OutOfDate as error:
            self._note_away(error)

    async def keep(self, address: str) -> None:
        """Renews until cancelled, and stops the members whenever the lease is over. Raises Superseded when another
        agent serves this node now."""
        tasks = asyncio.create_task(self._renew(address)), asyncio.create_task(self._expire())
        try:
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _renew(self, address: str) -> None:
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
                await asyncio.sleep(_RETRY_SECONDS)
            except OutOfDate as error:
                self._note_away(error)
                await asyncio.sleep(_RETRY_SECONDS)

    async def _register(self, address: str) -> None:
        sent, members = time.monotonic(), self._members
        request = pb.RegisterAgentRequest(
            node=self._node, address=address, incarnation=self.incarnation, grant=self._grant
        )
        reports = await members.measured()
        sent_members = members.named(report.role_id for report in reports)
        request.roles.extend(render_report(report, self._node) for report in reports)
        response = await self._schedulers.stub.RegisterAgent(request, timeout=_CALL_SECONDS)
        self._terms.check(response.term)
        self._renewed, self._registered, self._away = sent, True, False
        self._lease_seconds = response.lease_seconds or self._lease_seconds
        self._heartbeat_seconds = response.heartbeat_seconds or self._heartbeat_seconds
        self._margin_seconds = response.margin_seconds
        log.info("registered node %s; lease of %g s", response.node, self._lease_seconds)
        self._discard(response.stop_roles, sent_members)

    async def leave(self) -> None:
        """Says goodbye once all members have ended, so that the scheduler takes the end for no failure. The end of a
        grant's agent says nothing about its node."""
        if self._grant or not self._registered or self._away:
            return
        request = self._heartbeat(await self._members.measured())
        request.leaving = True
        try:
            await self._schedulers.stub.AgentHeartbeat(request, timeout=_GOODBYE_SECONDS)
        except grpc.aio.AioRpcError as error:
            log.info("the scheduler did not hear the goodbye (%s)", error.code().name)

    def _heartbeat(self, reports: Sequence[RoleReport]) -> pb.AgentHeartbeatRequest:
        request = pb.AgentHeartbeatRequest(node=self._node, incarnation=self.incarnation, grant=self._grant)
        request.roles.extend(render_report(report, self._node) for report in reports)
        return request

    async def _beat(self) -> None:
        sent, members = time.monotonic(), self._members
        members.changed.clear()
        reports = await members.measured()
        metrics.observe(reports)
        sent_members = members.named(report.role_id for report in reports)
        request = self._heartbeat(reports)
        response = await self._schedulers.stub.AgentHeartbeat(request, timeout=_CALL_SECONDS)
        self._terms.check(response.term)
        self._renewed, self._away = sent, False
        self._registered = not response.register_again
        self._discard(response.stop_roles, sent_members)

    async def _next_beat(self) -> None:
        """Waits for the next beat; a change of a member brings it forward."""
        try:
            async with asyncio.timeout(self._heartbeat_seconds):
                await self._members.changed.wait()
        except TimeoutError:
            return

    async def _expire(self) -> None:
        """Stops every member whenever the lease is over, however long a call to the scheduler takes meanwhile."""
        while True:
            silent = time.monotonic() - self._renewed
            left = self._lease_seconds - silent
            if left <= 0:
                if any(report.state in ("running", "restarting") for report in self._members.reports()):
                    log.error("no scheduler for %.0f s: the lease is over, stopping every member", silent)
                grace = _GRACE_SHARE * self._margin_seconds
                await self._members.stop_all(f"the agent's lease ended: no scheduler for {silent:.0f} s", grace)
                left = _LOOK_SECONDS
            await asyncio.sleep(min(left, _LOOK_SECONDS))

    def _discard(self, role_ids: Sequence[str], sent: list[RoleSupervisor]) -> None:
        """Stops members that the scheduler does not want; one that was started after the report is another."""
        unwanted = [member for member in sent if member.order.role_id in set(role_ids)]
        if unwanted:
            # A stop may take as long as its grace; the lease must not wait for it.
            task = asyncio.create_task(self._members.discard(unwanted))
            self._discarding.add(task)
            task.add_done_callback(self._discarding.discard)

    def _note_away(self, error: grpc.aio.AioRpcError | OutOfDate) -> None:
        if isinstance(error, OutOfDate):
            why, turned = str(error), self._schedulers.turn()
        else:
            why, turned = f"{error.code().name}: {error.details()}", self._schedulers.turn_after(error)
        if not self._away:
            log.warning("no word of a leader from %s (%s)", self._schedulers.address, why)
        self._away = True
        # Whoever comes next has to be told who we are, and so has one that leads again after it had lost the lead.
        if turned or isinstance(error, OutOfDate):
            self._registered = False
