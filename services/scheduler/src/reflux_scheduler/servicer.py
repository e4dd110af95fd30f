"""The scheduler's gRPC face: translates messages, delegates, holds no policy."""

from collections.abc import AsyncIterator
from typing import Any

from redis.exceptions import RedisError

from reflux.scheduler.v1 import scheduler_service_pb2 as pb
from reflux_kit.errors import InvalidRequest, NotFound, Unavailable
from reflux_placement.errors import InvalidGang
from reflux_scheduler.controller import Controller
from reflux_scheduler.errors import NotLeading, UnknownJob
from reflux_scheduler.explain import explain
from reflux_scheduler.job import Job
from reflux_scheduler.parse import parse_job_name, parse_request_id, parse_spec, parse_token
from reflux_scheduler.render import render_cost, render_events, render_job, render_shortage
from reflux_scheduler.servicer_agents import AgentsPart
from reflux_scheduler.servicer_cluster import ClusterPart

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["SchedulerService"].full_name
_DEFAULT_PAGE = 100
_MAX_PAGE = 500


class SchedulerServicer(ClusterPart, AgentsPart):
    """Jobs for clients; nodes and queues for operators, leases for agents (the two parts)."""

    async def CreateJob(self, request: pb.CreateJobRequest, context: Any) -> pb.CreateJobResponse:
        """Accepts a job, or fails it at once when it can never fit."""
        request_id = parse_request_id(request.request_id)
        controller = await self._candidate.leading()
        spec = parse_spec(request, controller.topology, frozenset(controller.queues))
        try:
            job = await _written(controller.create(spec, request_id))
        except InvalidGang as error:
            raise InvalidRequest(str(error)) from None
        return pb.CreateJobResponse(job=render_job(job, controller.topology))

    async def GetJob(self, request: pb.GetJobRequest, context: Any) -> pb.GetJobResponse:
        """One job."""
        controller = await self._candidate.leading()
        job = _job(controller, request.name)
        return pb.GetJobResponse(job=render_job(job, controller.topology, brief=request.brief))

    async def ListJobs(self, request: pb.ListJobsRequest, context: Any) -> pb.ListJobsResponse:
        """A page of jobs, newest first; the token is the number of the last job shown."""
        controller = await self._candidate.leading()
        size = min(request.page_size or _DEFAULT_PAGE, _MAX_PAGE)
        before = parse_token("page_token", request.page_token)
        jobs = sorted(controller.book.jobs.values(), key=lambda job: -job.number)
        jobs = [job for job in jobs if before is None or job.number < before]
        page = jobs[:size]
        token = str(page[-1].number) if len(jobs) > size else ""
        shown = [render_job(job, controller.topology, brief=request.brief) for job in page]
        return pb.ListJobsResponse(jobs=shown, next_page_token=token)

    async def CancelJob(self, request: pb.CancelJobRequest, context: Any) -> pb.CancelJobResponse:
        """Begins the end of a job; WatchJob tells when its members are gone."""
        controller = await self._candidate.leading()
        job = await _written(controller.cancel(_job(controller, request.name).id))
        return pb.CancelJobResponse(job=render_job(job, controller.topology))

    async def MarkJobSaved(self, request: pb.MarkJobSavedRequest, context: Any) -> pb.MarkJobSavedResponse:
        """Notes that a job has a checkpoint at hand."""
        controller = await self._candidate.leading()
        job = await _written(controller.saved(_job(controller, request.name).id))
        return pb.MarkJobSavedResponse(job=render_job(job, controller.topology))

    async def WatchJob(self, request: pb.WatchJobRequest, context: Any) -> AsyncIterator[pb.WatchJobResponse]:
        """The job after each change; the token is the sequence of the last change seen."""
        controller = await self._candidate.leading()
        job_id = _job(controller, request.name).id
        seen = parse_token("resume_token", request.resume_token)
        after = -1 if seen is None else seen
        try:
            async for job in controller.book.watch(job_id, after):
                news = [event for event in job.events if event.sequence > after]
                after = job.sequence
                yield pb.WatchJobResponse(
                    job=render_job(job, controller.topology, brief=request.brief),
                    resume_token=str(after),
                    events=render_events(news),
                )
        except UnknownJob as error:
            # All jobs are forgotten when the lease ends: the stream goes on at the next leader.
            await self._candidate.leading()
            raise NotFound(str(error)) from None

    async def ExplainJob(self, request: pb.ExplainJobRequest, context: Any) -> pb.ExplainJobResponse:
        """Why a job waits, failed, or went where it is."""
        controller = await self._candidate.leading()
        found = await explain(controller, _job(controller, request.name))
        return pb.ExplainJobResponse(
            sentence=found.sentence,
            shortages=[render_shortage(found.misfit)] if found.misfit is not None else [],
            cause=found.cause,
            domain=found.domain,
            cost=render_cost(found.cost) if found.cost is not None else None,
            preempted_by=found.preempted_by,
        )


async def _written(call: Any) -> Job:
    """The outcome of a write; a lost lease is the caller's reason to try again at the next leader."""
    try:
        return await call
    except NotLeading as error:
        raise Unavailable(str(error), leader=error.leader) from None
    except RedisError as error:
        raise Unavailable(f"Redis does not answer ({type(error).__name__}); nothing was changed") from None
    except UnknownJob as error:
        raise NotFound(str(error)) from None


def _job(controller: Controller, name: str) -> Job:
    try:
        return controller.book.get(parse_job_name(name))
    except UnknownJob as error:
        raise NotFound(str(error)) from None
