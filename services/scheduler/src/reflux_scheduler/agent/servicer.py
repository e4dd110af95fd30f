"""The agent's gRPC face: translates messages, delegates to the member table."""

from typing import Any

from reflux.scheduler.v1 import agent_service_pb2 as pb
from reflux.scheduler.v1.agent_service_pb2_grpc import AgentServiceServicer
from reflux_kit.errors import InvalidRequest, NotFound, Unavailable, WrongState
from reflux_scheduler.agent.lease import TermGuard
from reflux_scheduler.agent.members import MemberTable
from reflux_scheduler.agent.messages import parse_grace, parse_order, render_report

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["AgentService"].full_name


class AgentServicer(AgentServiceServicer):
    """Starts, stops and lists the members of one node."""

    def __init__(self, members: MemberTable, node: str, terms: TermGuard | None = None) -> None:
        self._members = members
        self._node = node
        self._terms = terms or TermGuard()

    async def StartRole(self, request: pb.StartRoleRequest, context: Any) -> pb.StartRoleResponse:
        """Starts a member; idempotent by role id and attempt."""
        order = parse_order(request)
        self._check_term(request.term)
        try:
            report = await self._members.start(order)
        except RuntimeError as error:
            raise Unavailable(str(error)) from None
        return pb.StartRoleResponse(role=render_report(report, self._node))

    async def StopRole(self, request: pb.StopRoleRequest, context: Any) -> pb.StopRoleResponse:
        """Stops a member and answers when it is gone, or has been told to stop."""
        if not request.role_id:
            raise InvalidRequest("role_id is required: '<job>/<role>/<rank>'")
        self._check_term(request.term)
        grace = parse_grace(request.grace_seconds) if request.grace_seconds else None
        try:
            report = await self._members.stop(request.role_id, grace, "stopped on request", wait=not request.no_wait)
        except KeyError:
            raise NotFound(f"this agent has no role {request.role_id[:64]!r}") from None
        return pb.StopRoleResponse(role=render_report(report, self._node))

    def _check_term(self, term: int) -> None:
        if not self._terms.admit(term):
            raise WrongState(f"term {term} is over: a scheduler with term {self._terms.highest} leads")

    async def ListRoles(self, request: pb.ListRolesRequest, context: Any) -> pb.ListRolesResponse:
        """Lists all members, with the memory of their process trees."""
        reports = await self._members.measured()
        return pb.ListRolesResponse(roles=[render_report(report, self._node) for report in reports])
