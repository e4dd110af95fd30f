"""Durable verification jobs as awaitable results: one watch stream for all, polls where it cannot be trusted."""

import asyncio
import hashlib
import json
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from uuid import NAMESPACE_OID, uuid5

import grpc

from reflux.sandbox.v1 import sandbox_service_pb2 as pb
from reflux.sandbox.v1 import verification_pb2
from reflux_kit.telemetry import traceparent
from reflux_trainer.clients.announced import Announced
from reflux_trainer.clients.retry import patiently
from reflux_trainer.queue.records import Grade

if TYPE_CHECKING:
    from reflux.sandbox.v1.sandbox_service_pb2_grpc import SandboxServiceAsyncStub

log = logging.getLogger(__name__)
Job = verification_pb2.Verification
_POLL_SECONDS = 3.0
_RECONNECT_SECONDS = 0.3


class Verifications:
    """Grades answers of one run in the sandbox. Use it inside `open_verifications`."""

    def __init__(self, stub: "SandboxServiceAsyncStub", run: str) -> None:
        self._stub = stub
        self._run = run
        self._jobs = Announced[Job]()

    async def grade(
        self,
        key: str,
        verifier: str,
        truth: dict[str, Any],
        answers: Sequence[str],
        *,
        seconds: float,
        version: int = 0,
        sample_ids: Sequence[str] = (),
    ) -> list[Grade]:
        """Grades of `answers` to one problem, as one job. Raises PeerAway or Refused.

        `key` is also the job's group, `version` that of the oldest policy that wrote an answer: the sandbox can cancel
        by both. `sample_ids` are one per answer, or none.

        `key` and the answers name the job inside the run: asking again, from any process, finds the same job, and
        answers that were drawn anew never get the grades of the old ones.
        """
        drawn = hashlib.blake2b("\0".join(answers).encode(), digest_size=16).hexdigest()
        request = pb.CreateVerificationRequest(
            request_id=str(uuid5(NAMESPACE_OID, f"{self._run}/{key}/{drawn}")),
            verifier=verifier,
            payload=json.dumps(truth, sort_keys=True, separators=(",", ":")).encode(),
            answers=answers,
            deadline_seconds=seconds,
            run=self._run,
            traceparent=traceparent(),
            group=key,
            policy_version=version,
            sample_ids=sample_ids,
        )
        created = await patiently(
            "the sandbox", seconds, lambda left: self._stub.CreateVerification(request, timeout=min(left, 30.0))
        )
        job = created.verification
        if job.state != Job.STATE_ENDED:
            job = await self._ended(job.name, seconds)
        return [grade_of(grade) for grade in job.grades]

    async def _ended(self, name: str, seconds: float) -> Job:
        async def poll() -> Job | None:
            request = pb.GetVerificationRequest(name=name)
            answer = await patiently(
                "the sandbox",
                seconds + 30.0,
                lambda left: self._stub.GetVerification(request, timeout=min(left, 10.0)),
            )
            return answer.verification if answer.verification.state == Job.STATE_ENDED else None

        return await self._jobs.wait(name, _POLL_SECONDS, poll)

    async def watch(self) -> None:
        """Follows the run's jobs until it is cancelled; a broken stream goes on where it broke."""
        token = ""
        while True:
            try:
                request = pb.WatchVerificationsRequest(run=self._run, resume_token=token)
                async for event in self._stub.WatchVerifications(request):
                    token = event.resume_token
                    self._jobs.deliver(event.verification.name, event.verification)
            except grpc.aio.AioRpcError as error:
                log.info("the sandbox's stream broke (%s), opening it again", error.code().name)
            await asyncio.sleep(_RECONNECT_SECONDS)


@asynccontextmanager
async def open_verifications(stub: "SandboxServiceAsyncStub", run: str) -> AsyncIterator[Verifications]:
    """Yields a client whose watch stream runs until the block ends."""
    verifications = Verifications(stub, run)
    watching = asyncio.create_task(verifications.watch(), name="watch verifications")
    try:
        yield verifications
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def grade_of(grade: verification_pb2.Grade) -> Grade:
    """A grade as the queue carries it."""
    outcome = verification_pb2.Grade.Outcome.Name(grade.outcome).removeprefix("OUTCOME_").lower()
    return Grade(outcome, grade.reward, {figure.name: figure.value for figure in grade.figures}, grade.message)
