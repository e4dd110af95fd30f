"""What agents call: leases, and reports of their members."""

import time
from typing import Any

from reflux.scheduler.v1 import scheduler_service_pb2 as pb
from reflux.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceServicer
from reflux_kit.errors import InvalidRequest, WrongState
from reflux_scheduler.candidate import Candidate
from reflux_scheduler.errors import SupersededAgent, UnknownAgent
from reflux_scheduler.parse import parse_grant, parse_node, parse_report


class AgentsPart(SchedulerServiceServicer):
    """Registration and heartbeats; they need nothing but memory, so that members outlive an absent Redis."""

    def __init__(self, candidate: Candidate) -> None:
        self._candidate = candidate

    async def RegisterAgent(self, request: pb.RegisterAgentRequest, context: Any) -> pb.RegisterAgentResponse:
        """Gives an agent its lease and takes over the members that run under it."""
        if not request.address or not request.incarnation:
            raise InvalidRequest("address and incarnation are required")
        topology = self._candidate.topology
        post = (parse_node(topology, request.node), parse_grant(request.grant))
        reports = [parse_report(status) for status in request.roles]
        controller = await self._candidate.leading()
        controller.fleet.register(post, request.address, request.incarnation, reports, time.monotonic())
        terms = controller.fleet.terms
        return pb.RegisterAgentResponse(
            node=topology.path(topology.index_of(post[0])),
            lease_seconds=terms.lease_seconds,
            heartbeat_seconds=terms.heartbeat_seconds,
            stop_roles=controller.registered(post),
            term=self._candidate.term,
            margin_seconds=terms.margin_seconds,
        )

    async def AgentHeartbeat(self, request: pb.AgentHeartbeatRequest, context: Any) -> pb.AgentHeartbeatResponse:
        """Renews a lease."""
        post = (parse_node(self._candidate.topology, request.node), parse_grant(request.grant))
        reports = [parse_report(status) for status in request.roles]
        controller = await self._candidate.leading()
        try:
            controller.fleet.heartbeat(post, request.incarnation, reports, time.monotonic())
        except UnknownAgent:
            return pb.AgentHeartbeatResponse(register_again=True, term=self._candidate.term)
        except SupersededAgent as error:
            raise WrongState(str(error)) from None
        if request.leaving:
            controller.fleet.leave(post)
        return pb.AgentHeartbeatResponse(stop_roles=controller.heard(post), term=self._candidate.term)
