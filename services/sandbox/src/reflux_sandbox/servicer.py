"""The gRPC face: translates messages, delegates, holds no policy."""

from collections.abc import AsyncIterator
from typing import Any

from reflux.sandbox.v1 import sandbox_service_pb2 as pb
from reflux.sandbox.v1.sandbox_service_pb2_grpc import SandboxServiceServicer
from reflux.sandbox.v1.verification_pb2 import Verification
from reflux_kit import telemetry
from reflux_kit.errors import CapacityExhausted, InvalidRequest, WrongState
from reflux_sandbox.code_runner import CodeRunner
from reflux_sandbox.creation import default_deadline, parse_batch, parse_deadline, parse_group
from reflux_sandbox.dispatcher import Dispatcher
from reflux_sandbox.external import OutsideCallers
from reflux_sandbox.intake import Intake
from reflux_sandbox.isolation.base import Isolation
from reflux_sandbox.jobs import JobSpec
from reflux_sandbox.messages import parse_code, parse_name, parse_run, parse_uuid, to_code_response
from reflux_sandbox.settings import SandboxSettings
from reflux_sandbox.store import VerificationStore
from reflux_sandbox.verification_messages import (
    page_size,
    parse_claim_size,
    parse_external,
    parse_grade,
    parse_lease,
    parse_selector,
    to_claim,
    to_letter,
    to_report_response,
    to_verification,
)
from reflux_sandbox.watching import watch

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
        intake: Intake,
        reasons: list[str],
    ) -> None:
        self._settings = settings
        self._store = store
        self._dispatcher = dispatcher
        self._runner = runner
        self._isolation = isolation
        self._reasons = reasons
        self._intake = intake
        self._outside = OutsideCallers(store)
        self._watchers = 0

    async def CreateVerification(
        self, request: pb.CreateVerificationRequest, context: Any
    ) -> pb.CreateVerificationResponse:
        if not request.traceparent:
            request.traceparent = telemetry.traceparent()
        (job,) = await self._intake.create([self._intake.parser().parse(request)])
        return pb.CreateVerificationResponse(verification=to_verification(job, with_token=True))

    async def BatchCreateVerifications(
        self, request: pb.BatchCreateVerificationsRequest, context: Any
    ) -> pb.BatchCreateVerificationsResponse:
        jobs = await self._intake.create(parse_batch(request, self._intake.parser()))
        return pb.BatchCreateVerificationsResponse(
            verifications=[to_verification(job, with_token=True) for job in jobs]
        )

    async def GetVerification(self, request: pb.GetVerificationRequest, context: Any) -> pb.GetVerificationResponse:
        job = await self._store.get(parse_name(request.name))
        return pb.GetVerificationResponse(verification=to_verification(job))

    async def ListVerifications(
        self, request: pb.ListVerificationsRequest, context: Any
    ) -> pb.ListVerificationsResponse:
        run, group, state = parse_run(request.run), parse_group(request.group), request.state
        ended = None if state == Verification.STATE_UNSPECIFIED else state == Verification.STATE_ENDED
        size = page_size(request.page_size)
        jobs, following = await self._store.list_jobs(run, request.page_token, size, ended=ended)
        found = [to_verification(job) for job in jobs if group in ("", job.group)]
        wanted = [each for each in found if state in (Verification.STATE_UNSPECIFIED, each.state)]
        return pb.ListVerificationsResponse(verifications=wanted, next_page_token=following)

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
            async for job, token in watch(self._store, run, position, progress=request.progress):
                yield pb.WatchVerificationsResponse(verification=to_verification(job), resume_token=token)
        finally:
            self._watchers -= 1

    async def CancelVerification(
        self, request: pb.CancelVerificationRequest, context: Any
    ) -> pb.CancelVerificationResponse:
        job_id = parse_name(request.name)
        if await self._store.cancel_job(job_id):
            self._dispatcher.abandon(job_id)
        return pb.CancelVerificationResponse(verification=to_verification(await self._store.get(job_id)))

    async def CancelVerifications(
        self, request: pb.CancelVerificationsRequest, context: Any
    ) -> pb.CancelVerificationsResponse:
        cancelled = await self._store.cancel(parse_selector(request))
        for job_id in cancelled:
            self._dispatcher.abandon(job_id)
        return pb.CancelVerificationsResponse(cancelled=len(cancelled))

    async def ClaimVerifications(
        self, request: pb.ClaimVerificationsRequest, context: Any
    ) -> pb.ClaimVerificationsResponse:
        verifier, most = parse_external(request.verifier), parse_claim_size(request.max_jobs)
        claims = await self._outside.claim(verifier, most, parse_lease(request.lease_seconds))
        jobs = await self._store.get_many([claimed.job_id for claimed in claims])
        pairs = zip(claims, jobs, strict=True)
        return pb.ClaimVerificationsResponse(claims=[to_claim(claimed, job) for claimed, job in pairs if job])

    async def RenewVerification(
        self, request: pb.RenewVerificationRequest, context: Any
    ) -> pb.RenewVerificationResponse:
        if not 0 <= request.progress <= 1:
            raise InvalidRequest(f"progress must be 0 to 1, got {request.progress}")
        lease = parse_lease(request.lease_seconds)
        job = await self._outside.renew(parse_name(request.name), request.token, lease, request.progress)
        return pb.RenewVerificationResponse(verification=to_verification(job))

    async def CompleteVerification(
        self, request: pb.CompleteVerificationRequest, context: Any
    ) -> pb.CompleteVerificationResponse:
        grades = tuple(parse_grade(grade) for grade in request.grades)
        if not 0 <= request.cpu_seconds < float("inf"):
            raise InvalidRequest(f"cpu_seconds must be a number from 0 on, got {request.cpu_seconds}")
        job = await self._outside.complete(parse_name(request.name), request.token, grades, request.cpu_seconds)
        return pb.CompleteVerificationResponse(verification=to_verification(job))

    async def ListDeadLetters(self, request: pb.ListDeadLettersRequest, context: Any) -> pb.ListDeadLettersResponse:
        run, token, size = (
            request.run and parse_run(request.run),
            request.page_token or "0",
            page_size(request.page_size),
        )
        if not token.isdecimal() or len(token) > 9:
            raise InvalidRequest(f"page_token {token[:40]!r} is not one that this service gave out")
        jobs, following = await self._store.dead_letters(run, int(token), size)
        letters = [to_letter(job) for job in jobs]
        return pb.ListDeadLettersResponse(letters=letters, next_page_token=str(following) if following >= 0 else "")

    async def RetryDeadLetter(self, request: pb.RetryDeadLetterRequest, context: Any) -> pb.RetryDeadLetterResponse:
        request_id, job = parse_uuid(request.request_id), await self._store.get(parse_name(request.name))
        if not job.reason:
            raise WrongState(f"{request.name} is not a dead letter", state=job.state)
        payload, answers = await self._store.content(job.job_id)
        info = self._intake.parser().installed(job.verifier)
        spec = JobSpec(
            verifier=info.name,
            version=info.version,
            fidelity=info.fidelity,
            queue=self._dispatcher.queue_of(info),
            payload=payload,
            answers=tuple(answers),
            deadline_seconds=parse_deadline(request.deadline_seconds) or default_deadline(info.fidelity),
            run=job.run,
            traceparent=telemetry.traceparent(),
            request_id=request_id,
            group=job.group,
            policy_version=job.policy_version,
            sample_ids=job.sample_ids,
            cost_hint_seconds=job.cost_hint_seconds,
        )
        (created,) = await self._intake.create([spec])
        await self._store.forget_dead_letter(job.job_id)
        return pb.RetryDeadLetterResponse(verification=to_verification(created))

    async def GetVerificationReport(
        self, request: pb.GetVerificationReportRequest, context: Any
    ) -> pb.GetVerificationReportResponse:
        run = parse_run(request.run)
        return to_report_response(run, await self._store.report(run))

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
            queues=[pb.QueueDepth(fidelity=queue, depth=depth) for queue, depth in depths.items()],
            verifiers=sorted(self._dispatcher.verifiers),
            dead_letters=await self._store.dead_letter_count(),
            suspicious_runs=await self._store.suspicious_runs(),
        )
