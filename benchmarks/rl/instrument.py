"""A simulated instrument: an outside caller that takes verifications, sleeps as long as it was drawn, and grades them.

It goes by the same three calls that a real one uses: ClaimVerifications, (RenewVerification), CompleteVerification. An
evaluation's single answers are graded at once; every other job is one group, whose draw depends on its prompt alone.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from reflux.sandbox.v1 import sandbox_service_pb2 as pb
from reflux.sandbox.v1 import verification_pb2
from reflux.sandbox.v1.sandbox_service_pb2_grpc import SandboxServiceStub
from reflux_client import connection

VERIFIER = "external/instrument"
_LEASE_SECONDS = 300.0
_IDLE_SECONDS = 0.02
_MOST_CLAIMS = 100


class Instrument:
    """Use as an async context manager while runs go on. `seconds_of` maps a job's payload to its seconds."""

    def __init__(
        self, seconds_of: Callable[[bytes], float], rewards: Callable[[Sequence[str]], list[float]] | None = None
    ) -> None:
        """`rewards` grades the answers of one job; without it they alternate, so that no group is filtered."""
        self._seconds_of = seconds_of
        self._rewards = rewards or alternating
        self._tasks: set[asyncio.Task[None]] = set()
        self.graded = 0

    async def __aenter__(self) -> "Instrument":
        self._channel = connection.channel("sandbox")
        self._stub = SandboxServiceStub(await self._channel.__aenter__())
        self._claiming = asyncio.create_task(self._claim())
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in (self._claiming, *self._tasks):
            task.cancel()
        await asyncio.gather(self._claiming, *self._tasks, return_exceptions=True)
        await self._channel.__aexit__(None, None, None)

    async def _claim(self) -> None:
        request = pb.ClaimVerificationsRequest(verifier=VERIFIER, max_jobs=_MOST_CLAIMS, lease_seconds=_LEASE_SECONDS)
        while True:
            claims = (await self._stub.ClaimVerifications(request, timeout=30)).claims
            for claim in claims:
                task = asyncio.create_task(self._work(claim))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            if not claims:
                await asyncio.sleep(_IDLE_SECONDS)

    async def _work(self, claim: pb.ClaimedVerification) -> None:
        if len(claim.answers) > 1:
            await asyncio.sleep(self._seconds_of(claim.payload))
        grades = [
            verification_pb2.Grade(outcome=verification_pb2.Grade.OUTCOME_SCORED, reward=reward)
            for reward in self._rewards(claim.answers)
        ]
        request = pb.CompleteVerificationRequest(name=claim.verification.name, token=claim.token, grades=grades)
        with contextlib.suppress(asyncio.CancelledError):
            await self._stub.CompleteVerification(request, timeout=30)
            self.graded += 1


def alternating(answers: Sequence[str]) -> list[float]:
    """Rewards that differ inside a group: the work is the same in every run."""
    return [float(index % 2) for index in range(len(answers))] if len(answers) > 1 else [0.5]
