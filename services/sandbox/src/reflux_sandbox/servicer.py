"""The gRPC face: translates messages, delegates, holds no policy."""

from collections.abc import AsyncIterator
from typing import Any

from reflux.sandbox.v1 import sandbox_service_pb2 as pb
from reflux.sandbox.v1.sandbox_service_pb2_grpc import SandboxServiceServicer
from reflux_kit import telemetry
from reflux_kit.errors import CapacityExhausted
from reflux_sandbox import metrics
from reflux_sandbox.code_runner import CodeRunner
from reflux_sandbox.dispatcher import Dispatcher
from reflux_sandbox.isolation.base import Isolation
from reflux_sandbox.keys import AnswerKeys
from reflux_sandbox.messages import (
    parse_code,
    parse_create,
    parse_name,
    parse_run,
    to_code_response,
    to_verification,
)
from reflux_sandbox.settings import SandboxSettings
from reflux_sandbox.store import VerificationStore

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["SandboxService"].full_name
MOST_WATCHERS = 32
"""Each holds a connection to Redis while it waits."""


class SandboxServicer(SandboxServiceServicer):
    """See sandbox_service.proto."""

    def __init__(
        self,
        settings: SandboxSettings,
        store: VerificationStore,
        dispatcher: Dispatcher,
        runner: CodeRunner,
        isolation: Isolation,
        reasons: list[str],
    ) -> None:
        self._settings = settings
        self._store = store
        self._dispatcher = dispatcher
        self._runner = runner
        self._isolation = isolation
        self._reasons = reasons
        self._keys = AnswerKeys(isolation, settings.child_memory_bytes)
        self._watchers = 0

    async def CreateVerification(
        self, request: pb.CreateVerificationRequest, context: Any
    ) -> pb.CreateVerificationResponse:
        if not request.traceparent:
            request.traceparent = telemetry.traceparent()
        command = parse_create(request, self._dispatcher.verifiers)
        spec = await self._keys.filled(command.spec, self._dispatcher.verifiers[command.spec.verifier])
        how, job = await self._store.create(spec, command.request_id)
        metrics.JOBS.labels(how).inc()
        if how == "queued":
            self._dispatcher.wake(command.spec.fidelity, command.spec.verifier)
        return pb.CreateVerificationResponse(verification=to_verification(job))

    async def GetVerification(self, request: pb.GetVerificationRequest, context: Any) -> pb.GetVerificationResponse:
        job = await self._store.get(parse_name(request.name))
        return pb.GetVerificationResponse(verification=to_verification(job))

    async def WatchVerifications(
        self, request: pb.WatchVerificationsRequest, context: Any
    ) -> AsyncIterator[pb.WatchVerificationsResponse]:
        run = parse_run(request.run)
        if self._watchers >= MOST_WATCHERS:
            raise CapacityExhausted(f"{self._watchers} streams are open already; watch a run with one stream")
        self._watchers += 1
        try:
            position = await self._store.position(run, request.resume_token)
            # The headers tell the client that nothing which ends from here on is missed.
            await context.send_initial_metadata((("resume-token", position),))
            async for job, token in self._store.ended_jobs(run, position):
                yield pb.WatchVerificationsResponse(verification=to_verification(job), resume_token=token)
        finally:
            self._watchers -= 1

    async def CancelVerification(
        self, request: pb.CancelVerificationRequest, context: Any
    ) -> pb.CancelVerificationResponse:
        job_id = parse_name(request.name)
        if await self._store.cancel(job_id):
            self._dispatcher.abandon(job_id)
        return pb.CancelVerificationResponse(verification=to_verification(await self._store.get(job_id)))

    async def RunCode(self, request: pb.RunCodeRequest, context: Any) -> pb.RunCodeResponse:
        settings = self._settings
        command = parse_code(request, settings.most_run_seconds, settings.child_memory_bytes)
        with telemetry.span("sandbox.code", run=request.run):
            return to_code_response(await self._runner.run(command))

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:
        depths = await self._store.depths()
        return pb.GetStatusResponse(
            tier=self._isolation.name,
            reasons=self._reasons,
            idle_children=self._isolation.idle_children,
            busy_children=self._isolation.busy_children,
            queues=[pb.QueueDepth(fidelity=fidelity, depth=depth) for fidelity, depth in depths.items()],
            verifiers=sorted(self._dispatcher.verifiers),
        )
