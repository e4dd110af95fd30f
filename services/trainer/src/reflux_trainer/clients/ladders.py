"""Groups on the sandbox's fidelity ladder: the worker waits for the release only."""

import asyncio
import hashlib
import json
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import NAMESPACE_OID, uuid5

import grpc

from reflux.sandbox.v1 import ladder_service_pb2 as pb
from reflux.sandbox.v1.verification_pb2 import Grade as GradeMessage
from reflux.sandbox.v1.verification_pb2 import Verification
from reflux_kit.telemetry import traceparent
from reflux_runs.config import Algorithm
from reflux_trainer.clients.announced import Announced
from reflux_trainer.clients.retry import patiently
from reflux_trainer.clients.verification import grade_of
from reflux_trainer.queue.records import Grade

if TYPE_CHECKING:
    from reflux.sandbox.v1.ladder_service_pb2_grpc import LadderServiceAsyncStub

log = logging.getLogger(__name__)
_POLL_SECONDS = 3.0
_RECONNECT_SECONDS = 0.3
_CENTRED: tuple[Algorithm, ...] = ("dr_grpo", "rloo")
"""Estimators that do not divide by the deviation."""


@dataclass(frozen=True)
class Release:
    """Grades that a group is trained on; `final` when none of them will be corrected."""

    grades: list[Grade]
    final: bool


@dataclass(frozen=True, kw_only=True)
class Rungs:
    """What the groups of a run climb."""

    surrogate: str
    """Name of the verifier in the sandbox, as of the others."""
    full: str
    rule: str = ""
    """Empty leaves the rung out."""
    algorithm: Algorithm
    correction_lag: int
    audit_share: float
    tolerated_error: float
    full_cpu_seconds: float
    """Of one policy version; 0 bounds nothing."""

    def policy(self) -> pb.LadderPolicy:
        """What the sandbox has to know; 0 would mean that nothing is ever too old."""
        estimator = "ESTIMATOR_CENTRED" if self.algorithm in _CENTRED else "ESTIMATOR_GRPO"
        return pb.LadderPolicy(
            max_lag=max(1, self.correction_lag),
            estimator=pb.LadderPolicy.Estimator.Value(estimator),
            audit_share=self.audit_share,
            tolerated_error=self.tolerated_error,
            budget_cpu_seconds=self.full_cpu_seconds,
        )


class Ladders:
    """Puts groups of one run on the ladder. Use it inside `open_ladders`."""

    def __init__(self, stub: "LadderServiceAsyncStub", run: str, rungs: Rungs) -> None:
        self._stub = stub
        self._run = run
        self._rungs = rungs
        self._releases = Announced[Release]()

    async def release(
        self,
        group: str,
        truth: dict[str, Any],
        answers: Sequence[str],
        *,
        seconds: float,
        version: int,
        sample_ids: Sequence[str],
    ) -> Release:
        """Grades of a group as it is released. Raises PeerAway or Refused.

        Group and answers name the ladder inside the run: asking again, from any process, finds the same one.
        """
        drawn = hashlib.blake2b("\0".join(answers).encode(), digest_size=16).hexdigest()
        request = pb.CreateLadderRequest(
            request_id=str(uuid5(NAMESPACE_OID, f"{self._run}/{group}/{drawn}")),
            run=self._run,
            group=group,
            payload=json.dumps(truth, sort_keys=True, separators=(",", ":")).encode(),
            answers=answers,
            sample_ids=sample_ids,
            policy_version=version,
            rule_verifier=self._rungs.rule,
            surrogate_verifier=self._rungs.surrogate,
            full_verifier=self._rungs.full,
            deadline_seconds=seconds,
            policy=self._rungs.policy(),
            traceparent=traceparent(),
        )
        created = await patiently(
            "the sandbox", seconds, lambda left: self._stub.CreateLadder(request, timeout=min(left, 30.0))
        )
        return _release_of(created.ladder) or await self._released(created.ladder.name, seconds)

    async def _released(self, name: str, seconds: float) -> Release:
        async def poll() -> Release | None:
            request = pb.GetLadderRequest(name=name)
            answer = await patiently(
                "the sandbox", seconds + 30.0, lambda left: self._stub.GetLadder(request, timeout=min(left, 10.0))
            )
            return _release_of(answer.ladder)

        return await self._releases.wait(name, _POLL_SECONDS, poll)

    async def watch(self) -> None:
        """Follows the run's ladders until it is cancelled; a broken stream goes on where it broke."""
        token = ""
        while True:
            try:
                request = pb.WatchLaddersRequest(run=self._run, resume_token=token)
                async for event in self._stub.WatchLadders(request):
                    token = event.resume_token
                    if event.WhichOneof("event") == "release":
                        grades = [grade_of(grade) for grade in event.release.grades]
                        self._releases.deliver(event.ladder, Release(grades, event.release.is_final))
            except grpc.aio.AioRpcError as error:
                log.info("the sandbox's stream of ladders broke (%s), opening it again", error.code().name)
            await asyncio.sleep(_RECONNECT_SECONDS)


def _release_of(ladder: pb.Ladder) -> Release | None:
    """The release that a stored ladder tells of. One that was cancelled before it is final without any reward."""
    if ladder.state == pb.Ladder.STATE_CLIMBING:
        return None
    unknown = GradeMessage(outcome=GradeMessage.OUTCOME_CANCELLED, message="the ladder was cancelled")
    grades = [sample.released if sample.released.outcome else unknown for sample in ladder.samples]
    provisional = ladder.released_on == Verification.FIDELITY_SURROGATE
    return Release([grade_of(grade) for grade in grades], not provisional)


@asynccontextmanager
async def open_ladders(stub: "LadderServiceAsyncStub", run: str, rungs: Rungs) -> AsyncIterator[Ladders]:
    """Yields a client whose watch stream runs until the block ends."""
    ladders = Ladders(stub, run, rungs)
    watching = asyncio.create_task(ladders.watch(), name="watch ladders")
    try:
        yield ladders
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
