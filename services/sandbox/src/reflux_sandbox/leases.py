"""Jobs of ours in work: their leases, and how they end in the store whatever happens to Redis meanwhile."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import redis

from reflux_sandbox import metrics
from reflux_sandbox.jobs import Claimed, Grade, JobEnd, Outcome
from reflux_sandbox.store import Claim, VerificationStore

log = logging.getLogger(__name__)

_RETRY_SECONDS = 0.2
_MOST_BEAT_SECONDS = 1.0

T = TypeVar("T")


@dataclass
class Leased:
    """A job of ours in work."""

    job: Claimed
    deadline: float
    """Loop time."""
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the job was cancelled or taken over."""
    started: float = 0.0
    """Loop time at which its session began with it; 0.0 before."""
    progress: Callable[[], float] = lambda: 0.0
    """How far its work has come, 0 to 1."""
    ending: bool = False
    """Its result is being stored."""


class Leases:
    """Use as a context manager: keeps the leases of what was claimed through it, and gives back what is left."""

    def __init__(self, store: VerificationStore) -> None:
        self._store = store
        self._leased: dict[str, Leased] = {}
        self._finishing: set[asyncio.Task[None]] = set()
        self._keeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Leases":
        await self._store.sweep()
        self._keeper = asyncio.create_task(self._keep())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._keeper is not None, "entered first"
        await stop_tasks({self._keeper, *self._finishing})
        for leased in list(self._leased.values()):
            with contextlib.suppress(redis.RedisError):
                await self._store.release(leased.job, "the sandbox service stopped", counted=False)

    async def claim(self, queue: str, verifier: str, most: int) -> tuple[list[Leased], str]:
        """Takes jobs, and tells which verifier is at the head of the queue now."""
        claim: Claim = await self._retried(lambda: self._store.claim(queue, verifier, most))
        now = asyncio.get_running_loop().time()
        leases = [Leased(job, now + job.seconds_left) for job in claim.jobs]
        self._leased.update({leased.job.job_id: leased for leased in leases})
        return leases, claim.head

    def abandon(self, job_id: str) -> None:
        """A job was cancelled or taken over: whoever works on it stops."""
        if (leased := self._leased.get(job_id)) is not None:
            leased.lost.set()

    def is_open(self, leased: Leased) -> bool:
        """Whether the job still has no result of ours."""
        return leased.job.job_id in self._leased and not leased.ending

    def forget(self, leased: Leased) -> None:
        """The job is not ours any more."""
        self._leased.pop(leased.job.job_id, None)

    def end(self, leased: Leased, grades: tuple[Grade, ...], cpu_seconds: float) -> None:
        """Stores the grades beside the next job's work; the lease is kept until they are stored."""
        self._store_beside(leased, JobEnd(job=leased.job, grades=grades, cpu_seconds=cpu_seconds))

    def end_unknown(self, leased: Leased, outcome: Outcome, message: str) -> None:
        """Ends the job without a verdict; the processor time of work that was stopped counts as its wall-clock time."""
        used = asyncio.get_running_loop().time() - leased.started if leased.started else 0.0
        self._store_beside(leased, JobEnd(job=leased.job, outcome=outcome, message=message, cpu_seconds=used))

    def _store_beside(self, leased: Leased, end: JobEnd) -> None:
        leased.ending = True
        task = asyncio.create_task(self._store_end(leased, end))
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)

    async def _store_end(self, leased: Leased, end: JobEnd) -> None:
        stored = await self._retried(lambda: self._store.finish(end))
        self.forget(leased)
        if not stored:
            log.info("the result of %s came too late: the job was cancelled or taken over", end.job.job_id)
            return
        for outcome in _outcomes(end):
            metrics.GRADES.labels(end.job.verifier, outcome).inc()

    async def release(self, leased: Leased, error: str, *, counted: bool) -> None:
        """Gives a job back; `counted` as an attempt when it was at work."""
        job = leased.job
        used = asyncio.get_running_loop().time() - leased.started if leased.started else 0.0
        state = await self._retried(
            lambda: self._store.release(job, error, counted=counted, cpu_seconds=used if counted else 0.0)
        )
        self.forget(leased)
        if counted:
            metrics.RELEASES.labels("lost").inc()
            log.warning("attempt %d of %s (%s) failed: %s; now %s", job.attempt, job.job_id, job.verifier, error, state)

    async def _keep(self) -> None:
        """Extends our leases first, then sweeps: after an outage of Redis our own jobs are not taken from us."""
        while True:
            await asyncio.sleep(min(_MOST_BEAT_SECONDS, self._store.lease_seconds / 3))
            try:
                begun = {job_id: leased.progress() for job_id, leased in self._leased.items() if leased.started}
                for job_id in await self._store.heartbeat(list(self._leased), begun):
                    self.abandon(job_id)
                taken, late = await self._store.sweep()
                await metrics.observe_store(self._store)
            except redis.RedisError as error:
                log.warning("leases not extended: Redis does not answer (%s)", type(error).__name__)
                continue
            if taken or late:
                log.warning("took back %d jobs of dead workers, ended %d at their deadline", taken, late)

    async def _retried(self, action: Callable[[], Awaitable[T]]) -> T:
        """Repeats an idempotent store call until Redis is back: a result is never dropped while this process lives."""
        while True:
            try:
                return await action()
            except redis.RedisError as error:
                log.warning("Redis does not answer (%s); trying again", type(error).__name__)
                await asyncio.sleep(_RETRY_SECONDS)


def _outcomes(end: JobEnd) -> Iterator[str]:
    if end.outcome:
        yield from (end.outcome for _ in end.job.answers)
    else:
        yield from (grade.outcome for grade in end.grades)


async def stop_tasks(tasks: set[asyncio.Task[None]]) -> None:
    """Cancels tasks until all have ended: redis-py may swallow a cancellation that comes while it reads an answer."""
    while tasks:
        for task in tasks:
            task.cancel()
        tasks = (await asyncio.wait(tasks, timeout=_RETRY_SECONDS))[1]
