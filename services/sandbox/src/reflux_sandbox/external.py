"""Jobs that an outside caller does: an instrument, a person, another cluster. Tokens say who may complete what."""

import uuid

from reflux_kit.errors import InvalidRequest, WrongState
from reflux_sandbox.jobs import Claimed, Grade, Job, JobEnd
from reflux_sandbox.store import VerificationStore


class OutsideCallers:
    """Leases jobs of external verifiers and takes their verdicts.

    The creator of a job is given its own token, which is good until the end; a claim gives another one that is good as
    long as its lease. Each call is safe to repeat.
    """

    def __init__(self, store: VerificationStore) -> None:
        self._store = store

    async def claim(self, verifier: str, most: int, lease_seconds: float) -> tuple[Claimed, ...]:
        """Takes up to `most` jobs; `Claimed.owner` is the token that they are renewed and completed with."""
        return (await self._store.claim_for(verifier, verifier, most, uuid.uuid4().hex, lease_seconds)).jobs

    async def renew(self, job_id: str, token: str, lease_seconds: float, progress: float) -> Job:
        """Extends a lease. Raises NotFound, and WrongState when it has ended."""
        job = await self._store.get(job_id)
        lease_ms = round(lease_seconds * 1000)
        lost = await self._store.script(
            "heartbeat", owner=token, lease_ms=lease_ms, jobs=[job_id], begun={job_id: progress}
        )
        if lost:
            raise WrongState(f"no lease on {job_id} has this token: the lease ended, or the job did", state=job.state)
        return await self._store.get(job_id)

    async def complete(self, job_id: str, token: str, grades: tuple[Grade, ...], cpu_seconds: float) -> Job:
        """Ends a job with `grades`: one per answer of the claim, or per answer of the job with the job's own token.

        Raises NotFound, WrongState for a token that is not, or no longer, good, and InvalidRequest for a wrong number
        of grades.
        """
        job = await self._store.get(job_id)
        lease_ms = round(self._store.lease_seconds * 1000)
        arguments = {"id": job_id, "token": token, "count": len(grades), "lease_ms": lease_ms}
        state, numbers = await self._store.script("take", **arguments)
        if state == b"count":
            raise InvalidRequest(f"{len(numbers)} grades are needed, got {len(grades)}")
        if state == b"refused":
            raise WrongState(f"this token cannot complete {job_id}, or not any more", state=job.state)
        if state == b"running":
            verdicts = dict(zip(reversed(numbers), reversed(grades), strict=True))  # of equal answers the first counts
            end = JobEnd(
                job=_held(job, token, tuple(verdicts)), grades=tuple(verdicts.values()), cpu_seconds=cpu_seconds
            )
            if not await self._store.finish(end):
                raise WrongState(f"the lease on {job_id} ended just now", state=job.state)
        return await self._store.get(job_id)


def _held(job: Job, token: str, numbers: tuple[int, ...]) -> Claimed:
    return Claimed(
        job_id=job.job_id,
        owner=token,
        verifier=job.verifier,
        payload="",
        answers=("",) * len(numbers),
        numbers=numbers,
        run=job.run,
        traceparent="",
        attempt=job.attempts,
        seconds_left=0.0,
    )
