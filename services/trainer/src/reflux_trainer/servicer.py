"""The trainer's gRPC face: translates messages, delegates, holds no policy."""

import re
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

from reflux.trainer.v1 import trainer_service_pb2 as pb
from reflux.trainer.v1.trainer_service_pb2_grpc import TrainerServiceServicer
from reflux_kit.errors import InvalidRequest, NotFound
from reflux_runs.errors import ConfigError
from reflux_runs.translate import changes_of, from_message
from reflux_trainer.learners import HEARTBEAT_SECONDS, LearnerEntry, LearnerRegistry
from reflux_trainer.messages import parse_name, parse_run_id, refused, render_run, render_watched
from reflux_trainer.records import RunRecord
from reflux_trainer.store import RunStore
from reflux_trainer.supervisor import Supervisor
from reflux_trainer.tenancy import Tenancy

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["TrainerService"].full_name
_MAX_PAGE = 500
_TOKEN = re.compile(r"\d{1,20}-\d{1,20}")
_ADDRESS = re.compile(r"[\w.\-\[\]:]{1,255}:\d{1,5}")


class TrainerServicer(TrainerServiceServicer):
    """Runs for people, announcements for learners."""

    def __init__(self, supervisor: Supervisor, store: RunStore, learners: LearnerRegistry, tenancy: Tenancy) -> None:
        self._tenancy = tenancy
        self._supervisor = supervisor
        self._store = store
        self._learners = learners

    async def CreateRun(self, request: pb.CreateRunRequest, context: Any) -> pb.CreateRunResponse:
        """Starts a run, or continues one from its newest checkpoint."""
        try:
            config = from_message(request.config) if request.HasField("config") else None
            if request.resume_run:
                run = parse_run_id(request.resume_run.removeprefix("runs/"), "resume_run")
                record = await self._supervisor.resume(await self._owned(run), config)
            elif config is None:
                raise InvalidRequest("config is missing: send a RunConfig (an empty one is the recipe)", field="config")
            else:
                record = await self._supervisor.create(config, _parse_request_id(request.request_id))
        except ConfigError as error:
            raise refused(error) from None
        return pb.CreateRunResponse(run=await self._render(record))

    async def GetRun(self, request: pb.GetRunRequest, context: Any) -> pb.GetRunResponse:
        """One run."""
        run = await self._owned(parse_name(request.name))
        return pb.GetRunResponse(run=await self._render(await self._store.get(run)))

    async def ListRuns(self, request: pb.ListRunsRequest, context: Any) -> pb.ListRunsResponse:
        """One page, newest first; the token is the offset."""
        if request.page_token and not re.fullmatch(r"\d{1,9}", request.page_token):
            raise InvalidRequest(f"page_token {request.page_token[:40]!r} is not one of ours", field="page_token")
        size = min(request.page_size or 100, _MAX_PAGE)
        records, following = await self._store.page(size, int(request.page_token or 0), self._tenancy.caller)
        runs = [await self._render(record) for record in records]
        return pb.ListRunsResponse(runs=runs, next_page_token=str(following) if following else "")

    async def WatchRun(self, request: pb.WatchRunRequest, context: Any) -> AsyncIterator[pb.WatchRunResponse]:
        """Events until the run has ended."""
        run = await self._owned(parse_name(request.name))
        if request.resume_token and not _TOKEN.fullmatch(request.resume_token):
            raise InvalidRequest(f"resume_token {request.resume_token[:40]!r} is not one of ours", field="resume_token")
        async for watched in self._store.watch(run, request.resume_token):
            yield render_watched(watched)

    async def PauseRun(self, request: pb.PauseRunRequest, context: Any) -> pb.PauseRunResponse:
        """Closes the gate before the next step."""
        record = await self._supervisor.pause(await self._owned(parse_name(request.name)))
        return pb.PauseRunResponse(run=await self._render(record))

    async def ResumeRun(self, request: pb.ResumeRunRequest, context: Any) -> pb.ResumeRunResponse:
        """Opens the gate, or starts another attempt of a run that failed."""
        try:
            record = await self._supervisor.resume(await self._owned(parse_name(request.name)))
        except ConfigError as error:
            raise refused(error) from None
        return pb.ResumeRunResponse(run=await self._render(record))

    async def ForkRun(self, request: pb.ForkRunRequest, context: Any) -> pb.ForkRunResponse:
        """Starts a run from a checkpoint of another one."""
        run, request_id = await self._owned(parse_name(request.name)), _parse_request_id(request.request_id)
        try:
            record = await self._supervisor.fork(run, request.checkpoint, changes_of(request.changes), request_id)
        except ConfigError as error:
            raise refused(error) from None
        return pb.ForkRunResponse(run=await self._render(record))

    async def CancelRun(self, request: pb.CancelRunRequest, context: Any) -> pb.CancelRunResponse:
        """Ends a run."""
        record = await self._supervisor.cancel(await self._owned(parse_name(request.name)))
        return pb.CancelRunResponse(run=await self._render(record))

    async def RegisterLearner(self, request: pb.RegisterLearnerRequest, context: Any) -> pb.RegisterLearnerResponse:
        """Takes a learner's announcement."""
        run = parse_run_id(request.run, "run")
        if not _ADDRESS.fullmatch(request.address):
            raise InvalidRequest(f"address {request.address[:80]!r} is not host:port", field="address")
        if not request.incarnation or len(request.incarnation) > 64:
            raise InvalidRequest("incarnation must be a random id of up to 64 characters", field="incarnation")
        if run not in self._learners.expected and (await self._store.get(run)).ended:
            raise NotFound(f"run {run} has ended: its learner is not needed any more")
        self._learners.announce(run, LearnerEntry(request.address, request.incarnation))
        return pb.RegisterLearnerResponse(heartbeat_seconds=HEARTBEAT_SECONDS)

    async def _owned(self, run: str) -> str:
        """The run, if the caller may see it; operators also name runs that only checkpoints remember."""
        if self._tenancy.caller:
            self._tenancy.check_owner(await self._store.get(run))
        return run

    async def _render(self, record: RunRecord) -> Any:
        return render_run(record, await self._store.step(record.run))


def _parse_request_id(text: str) -> str:
    try:
        return str(UUID(text))
    except ValueError:
        raise InvalidRequest(f"request_id {text[:40]!r} is not a UUID", field="request_id") from None
