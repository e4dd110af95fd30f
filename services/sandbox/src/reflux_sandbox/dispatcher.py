"""Takes jobs from the queues, grades them in children, ends them once. One runner per slot of each fidelity."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import redis

from reflux_kit import telemetry
from reflux_sandbox import metrics
from reflux_sandbox.execution import GradeSession, SessionLost
from reflux_sandbox.isolation.base import Isolation, VerifierInfo
from reflux_sandbox.jobs import FIDELITIES, Claimed, Fidelity, Grade, Outcome, parse_child_grades, unknown
from reflux_sandbox.store import Claim, VerificationStore
from reflux_sandbox.waiters import Waiters

log = logging.getLogger(__name__)

_POLL_SECONDS = 1.0
"""How soon jobs show that another process queued or gave back; our own wake the runners at once."""
_RETRY_SECONDS = 0.2
_MOST_CPU_SECONDS = 7200

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class DispatchLimits:
    """How much runs at one time."""

    concurrency: dict[Fidelity, int]
    batch_jobs: int
    batch_seconds: float
    memory_bytes: int


@dataclass
class _Leased:
    """A job of ours in work."""

    job: Claimed
    deadline: float
    """Loop time."""
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the job was cancelled or taken over."""
    started: bool = False
    ending: bool = False
    """Its result is being stored."""


class _BatchOver(Exception):
    """The child of this batch cannot go on: it hangs in a job, or died."""


class Dispatcher:
    """Use as a context manager. `wake` tells that a job was queued; without it a runner looks once a second."""

    def __init__(self, store: VerificationStore, isolation: Isolation, limits: DispatchLimits) -> None:
        self._store = store
        self._isolation = isolation
        self._limits = limits
        self._waiters = {fidelity: Waiters() for fidelity in FIDELITIES}
        self._leased: dict[str, _Leased] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._finishing: set[asyncio.Task[None]] = set()
        self.sessions = 0
        """Children used so far."""
        self.verifiers: dict[str, VerifierInfo] = {info.name: info for info in isolation.verifiers}

    async def __aenter__(self) -> "Dispatcher":
        await self._store.sweep()
        for fidelity in FIDELITIES:
            for _ in range(self._limits.concurrency[fidelity]):
                self._tasks.append(asyncio.create_task(self._run(fidelity)))
        self._tasks.append(asyncio.create_task(self._keep_leases()))
        return self

    async def __aexit__(self, *_: object) -> None:
        pending = {*self._tasks, *self._finishing}
        while pending:  # redis-py may swallow a cancellation that comes while it reads an answer: ask again
            for task in pending:
                task.cancel()
            pending = (await asyncio.wait(pending, timeout=_RETRY_SECONDS))[1]
        for job_id in list(self._leased):
            with contextlib.suppress(redis.RedisError):
                await self._store.release(job_id, "the sandbox service stopped", counted=False)

    def wake(self, fidelity: Fidelity, verifier: str) -> None:
        """A job of `verifier` was queued."""
        self._waiters[fidelity].wake(verifier)

    def abandon(self, job_id: str) -> None:
        """A job was cancelled: kills the child when it works on it now."""
        if (leased := self._leased.get(job_id)) is not None:
            leased.lost.set()

    async def _run(self, fidelity: Fidelity) -> None:
        """One slot: claim, grade in a child of its own, again."""
        while True:
            claim = await self._claim(fidelity, "", 1)
            if claim.jobs:
                await self._batch(fidelity, claim.jobs[0].verifier, self._lease(claim))
            else:
                await self._waiters[fidelity].wait("", _POLL_SECONDS)

    async def _batch(self, fidelity: Fidelity, verifier: str, batch: list[_Leased]) -> None:
        """Grades `batch` and, for a trusted verifier, what else of it arrives within the window, in one child.

        Whatever has no result afterwards goes back: the job that failed as a counted attempt, its neighbours uncounted.
        """
        try:
            if (info := self.verifiers.get(verifier)) is None:
                self._end_unknown(batch[0], "infra_error", f"no verifier {verifier!r} is installed here any more")
                return
            metrics.SESSIONS.labels(fidelity).inc()
            self.sessions += 1
            session = GradeSession(self._isolation, info.profile, self._limits.memory_bytes, _MOST_CPU_SECONDS)
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout_at(batch[0].deadline):
                    await stack.enter_async_context(session)
                await self._grade_all(session, fidelity, info, batch)
        except TimeoutError:
            self._end_unknown(batch[0], "timeout", "no child was ready by the deadline")
        except _BatchOver as over:
            await self._give_back(batch, str(over))
        except Exception as error:  # task boundary: a runner must survive any job
            log.exception("a batch of %s failed", verifier)
            await self._give_back(batch, f"{type(error).__name__}: {error}")

    async def _give_back(self, batch: list[_Leased], error: str) -> None:
        for leased in reversed(batch):  # each goes to the front of the queue: the first one last
            if leased.job.job_id in self._leased and not leased.ending:
                await self._release(leased, error, counted=leased.started)

    async def _grade_all(
        self, session: GradeSession, fidelity: Fidelity, info: VerifierInfo, batch: list[_Leased]
    ) -> None:
        """Grades `batch` in order and appends further jobs to it."""
        closes = asyncio.get_running_loop().time() + self._limits.batch_seconds
        for position, leased in enumerate(batch, start=1):  # grows while it is walked
            await self._grade(session, fidelity, leased)
            metrics.BATCHED.labels(fidelity).inc(position > 1)
            if position == len(batch) and info.trusted:
                batch += await self._more(fidelity, info.name, self._limits.batch_jobs - position, closes)

    async def _more(self, fidelity: Fidelity, verifier: str, most: int, closes: float) -> list[_Leased]:
        """Further jobs of the verifier; none when the window or the batch is full, or when another verifier waits."""
        while most > 0:
            claim = await self._claim(fidelity, verifier, most)
            left = closes - asyncio.get_running_loop().time()
            if claim.jobs or claim.head or left <= 0:
                return self._lease(claim)
            await self._waiters[fidelity].wait(verifier, left)
        return []

    async def _grade(self, session: GradeSession, fidelity: Fidelity, leased: _Leased) -> None:
        job = leased.job
        leased.started = True
        loop = asyncio.get_running_loop()
        start = loop.time()
        attributes = {"verifier": job.verifier, "job": job.job_id, "attempt": job.attempt, "run": job.run}
        with telemetry.span("sandbox.attempt", parent=job.traceparent, **attributes) as span:
            try:
                async with asyncio.timeout_at(leased.deadline):
                    answer = await _unless(leased.lost, session.grade(job.verifier, job.payload, list(job.answers)))
            except TimeoutError:
                span.set_attribute("outcome", "timeout")
                self._end_unknown(
                    leased, "timeout", f"no verdict by the deadline ({loop.time() - start:.1f} s of work)"
                )
                raise _BatchOver("a neighbour hung") from None
            except SessionLost as error:
                span.set_attribute("outcome", "lost")
                raise _BatchOver(str(error)) from error
            if answer is None:
                span.set_attribute("outcome", "cancelled")
                self._leased.pop(job.job_id, None)
                raise _BatchOver("a neighbour was cancelled")
            span.set_attribute("outcome", await self._conclude(leased, answer))
        metrics.DISPATCH.labels(fidelity).observe(loop.time() - start)

    async def _conclude(self, leased: _Leased, answer: dict[str, Any]) -> str:
        """Grades end the job; an error that the verifier reports is final, a crash may be repeated. Returns a word."""
        if answer.get("error") == "crash":
            await self._release(leased, str(answer.get("message")), counted=True)
            return "crash"
        if "error" in answer:
            self._end_unknown(leased, "infra_error", str(answer.get("message"))[:500])
            return "infra_error"
        try:
            grades = parse_child_grades(answer.get("grades"), len(leased.job.answers))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self._end_unknown(leased, "infra_error", f"the verifier's answer is malformed: {error}")
            return "infra_error"
        self._end(leased, grades, "")
        return "graded"

    def _end_unknown(self, leased: _Leased, outcome: Outcome, message: str) -> None:
        self._end(leased, unknown(outcome, len(leased.job.answers), message), message)

    def _end(self, leased: _Leased, grades: tuple[Grade, ...], error: str) -> None:
        """Stores the result beside the next job's work; the lease is kept until it is stored."""
        leased.ending = True
        task = asyncio.create_task(self._store_end(leased, grades, error))
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)

    async def _store_end(self, leased: _Leased, grades: tuple[Grade, ...], error: str) -> None:
        job = leased.job
        ended = await self._retried(lambda: self._store.finish(job.job_id, grades, error))
        self._leased.pop(job.job_id, None)
        if not ended:
            log.info("the result of %s came too late: the job was cancelled or taken over", job.job_id)
            return
        for grade in grades:
            metrics.GRADES.labels(job.verifier, grade.outcome).inc()

    async def _release(self, leased: _Leased, error: str, *, counted: bool) -> None:
        job = leased.job
        state = await self._retried(lambda: self._store.release(job.job_id, error, counted=counted))
        self._leased.pop(job.job_id, None)
        if counted:
            metrics.RELEASES.labels("lost").inc()
            log.warning("attempt %d of %s (%s) failed: %s; now %s", job.attempt, job.job_id, job.verifier, error, state)

    async def _claim(self, fidelity: Fidelity, verifier: str, most: int) -> Claim:
        return await self._retried(lambda: self._store.claim(fidelity, verifier, most))

    def _lease(self, claim: Claim) -> list[_Leased]:
        now = asyncio.get_running_loop().time()
        leases = [_Leased(job, now + job.seconds_left) for job in claim.jobs]
        self._leased.update({leased.job.job_id: leased for leased in leases})
        return leases

    async def _keep_leases(self) -> None:
        """Extends our leases first, then sweeps: after an outage of Redis our own jobs are not taken from us."""
        while True:
            await asyncio.sleep(min(_POLL_SECONDS, self._store.lease_seconds / 3))
            try:
                for job_id in await self._store.heartbeat(list(self._leased)):
                    self.abandon(job_id)
                taken, late = await self._store.sweep()
                for fidelity, depth in (await self._store.depths()).items():
                    metrics.QUEUED.labels(fidelity).set(depth)
            except redis.RedisError as error:
                log.warning("leases not extended: Redis does not answer (%s)", type(error).__name__)
                continue
            if taken or late:
                log.warning("took back %d jobs of dead owners, ended %d that waited past their deadline", taken, late)

    async def _retried(self, action: Callable[[], Awaitable[T]]) -> T:
        """Repeats an idempotent store call until Redis is back: a result is never dropped while this process lives."""
        while True:
            try:
                return await action()
            except redis.RedisError as error:
                log.warning("Redis does not answer (%s); trying again", type(error).__name__)
                await asyncio.sleep(_RETRY_SECONDS)


async def _unless(lost: asyncio.Event, work: Awaitable[T]) -> T | None:
    """The result of `work`, or None as soon as `lost` is set."""
    worker = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(lost.wait())
    try:
        await asyncio.wait([worker, watcher], return_when=asyncio.FIRST_COMPLETED)
        return await worker if worker.done() else None
    finally:
        worker.cancel()
        watcher.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)
