"""The scheduler's gRPC face: translates messages, delegates, holds no policy."""

import time
from collections.abc import AsyncIterator
from typing import Any

from reflux.scheduler.v1 import scheduler_service_pb2 as pb
from reflux.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceServicer
from reflux_kit.errors import InvalidRequest, NotFound, WrongState
from reflux_scheduler.controller import Controller
from reflux_scheduler.errors import InvalidJob, SupersededAgent, UnknownAgent, UnknownJob
from reflux_scheduler.fleet import Fleet
from reflux_scheduler.inventory import Inventory
from reflux_scheduler.job import Job
from reflux_scheduler.messages import (
    parse_job,
    parse_job_name,
    parse_node,
    parse_report,
    render_events,
    render_job,
    render_resources,
    render_shortage,
)

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["SchedulerService"].full_name
_DEFAULT_PAGE = 100
_MAX_PAGE = 500
_MAX_TOKEN_DIGITS = 18


class SchedulerServicer(SchedulerServiceServicer):
    """Jobs for clients, leases for agents."""

    def __init__(self, controller: Controller, inventory: Inventory, fleet: Fleet) -> None:
        self._controller = controller
        self._inventory = inventory
        self._topology = inventory.topology
        self._fleet = fleet

    async def CreateJob(self, request: pb.CreateJobRequest, context: Any) -> pb.CreateJobResponse:
        """Accepts a job, or fails it at once when it can never fit."""
        spec = parse_job(request)
        try:
            job = await self._controller.create(spec, request.request_id)
        except InvalidJob as error:
            raise InvalidRequest(str(error)) from None
        return pb.CreateJobResponse(job=render_job(job, self._topology))

    async def GetJob(self, request: pb.GetJobRequest, context: Any) -> pb.GetJobResponse:
        """One job."""
        return pb.GetJobResponse(job=render_job(self._get(request.name), self._topology))

    async def ListJobs(self, request: pb.ListJobsRequest, context: Any) -> pb.ListJobsResponse:
        """A page of jobs, newest first; the token is the number of the last job shown."""
        size = min(request.page_size or _DEFAULT_PAGE, _MAX_PAGE)
        before = _parse_token("page_token", request.page_token)
        jobs = [job for job in self._controller.newest_first() if before is None or job.number < before]
        page = jobs[:size]
        token = str(page[-1].number) if len(jobs) > size else ""
        return pb.ListJobsResponse(jobs=[render_job(job, self._topology) for job in page], next_page_token=token)

    async def CancelJob(self, request: pb.CancelJobRequest, context: Any) -> pb.CancelJobResponse:
        """Begins the end of a job; WatchJob tells when its members are gone."""
        job = await self._controller.cancel(self._get(request.name).id)
        return pb.CancelJobResponse(job=render_job(job, self._topology))

    async def WatchJob(self, request: pb.WatchJobRequest, context: Any) -> AsyncIterator[pb.WatchJobResponse]:
        """The job after each change; the token is the sequence of the last change seen."""
        job_id = self._get(request.name).id
        seen = _parse_token("resume_token", request.resume_token)
        after = -1 if seen is None else seen
        try:
            async for job in self._controller.watch(job_id, after):
                news = [event for event in job.events if event.sequence > after]
                after = job.sequence
                yield pb.WatchJobResponse(
                    job=render_job(job, self._topology), resume_token=str(after), events=render_events(news)
                )
        except UnknownJob as error:
            raise NotFound(str(error)) from None

    async def ExplainJob(self, request: pb.ExplainJobRequest, context: Any) -> pb.ExplainJobResponse:
        """Why a job waits, failed, or went where it is."""
        sentence, short = self._controller.explain(self._get(request.name).id)
        return pb.ExplainJobResponse(sentence=sentence, shortages=[render_shortage(short)] if short else [])

    async def GetTopology(self, request: pb.GetTopologyRequest, context: Any) -> pb.GetTopologyResponse:
        """All nodes with what is free and who is there."""
        agents = self._fleet.agents()
        jobs: dict[str, list[str]] = {}
        for job_id, placement in self._inventory.placements.items():
            for node in {member.node for member in placement.members}:
                jobs.setdefault(node, []).append(f"jobs/{job_id}")
        nodes = [
            pb.TopologyNode(
                path=domain.label,
                capacity=render_resources(node.resources),
                free=render_resources(self._inventory.unallocated(node.name)),
                agent_address=agents[node.name].address if node.name in agents else "",
                jobs=sorted(jobs.get(node.name, ())),
            )
            for domain, node in zip(self._topology.domains("node"), self._topology.nodes, strict=True)
        ]
        return pb.GetTopologyResponse(nodes=nodes, cluster=self._topology.cluster.label)

    async def RegisterAgent(self, request: pb.RegisterAgentRequest, context: Any) -> pb.RegisterAgentResponse:
        """Gives an agent its lease and takes over the members that run under it."""
        if not request.address or not request.incarnation:
            raise InvalidRequest("address and incarnation are required")
        node = parse_node(self._topology, request.node)
        reports = [parse_report(status) for status in request.roles]
        self._fleet.register(node, request.address, request.incarnation, reports, time.monotonic())
        terms = self._fleet.terms
        return pb.RegisterAgentResponse(
            node=self._topology.domains("node")[self._topology.index_of(node)].label,
            lease_seconds=terms.lease_seconds,
            heartbeat_seconds=terms.heartbeat_seconds,
            stop_roles=self._controller.heard(node),
        )

    async def AgentHeartbeat(self, request: pb.AgentHeartbeatRequest, context: Any) -> pb.AgentHeartbeatResponse:
        """Renews a lease; needs nothing but memory, so that members outlive an absent Redis."""
        node = parse_node(self._topology, request.node)
        reports = [parse_report(status) for status in request.roles]
        try:
            self._fleet.heartbeat(node, request.incarnation, reports, time.monotonic())
        except UnknownAgent:
            return pb.AgentHeartbeatResponse(register_again=True)
        except SupersededAgent as error:
            raise WrongState(str(error)) from None
        return pb.AgentHeartbeatResponse(stop_roles=self._controller.heard(node))

    def _get(self, name: str) -> Job:
        try:
            return self._controller.get(parse_job_name(name))
        except UnknownJob as error:
            raise NotFound(str(error)) from None


def _parse_token(field: str, token: str) -> int | None:
    if not token:
        return None
    if len(token) > _MAX_TOKEN_DIGITS or not (token.isascii() and token.isdigit()):
        raise InvalidRequest(f"{field} = {token[:64]!r}: pass on a token of an answer before, or leave it empty")
    return int(token)
