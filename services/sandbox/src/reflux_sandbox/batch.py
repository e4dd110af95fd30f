"""One session of work: a child, or a place elsewhere, that grades a batch of jobs of one verifier."""

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from reflux_kit import telemetry
from reflux_sandbox import metrics
from reflux_sandbox.execution import SessionLost
from reflux_sandbox.isolation.base import VerifierInfo
from reflux_sandbox.jobs import parse_child_grades
from reflux_sandbox.leases import Leased, Leases
from reflux_sandbox.remote.base import GradingSession

log = logging.getLogger(__name__)

_MOST_CORES = 64
_PAUSE_SECONDS = 0.5
"""Before jobs go back after a failure of the place: they must not turn into a loop."""

T = TypeVar("T")

More = Callable[[int], Awaitable[list[Leased]]]
"""Further jobs of the same verifier, at most so many; none when the session should end."""


class _BatchOver(Exception):
    """The session of this batch cannot go on: it hangs in a job, or died."""


class Batch:
    """Jobs of one verifier in one session. Whatever has no result afterwards goes back: the job that failed as a
    counted attempt, its neighbours uncounted."""

    def __init__(self, leases: Leases, info: VerifierInfo, queue: str, most_jobs: int) -> None:
        self._leases = leases
        self._info = info
        self._queue = queue
        self._most_jobs = most_jobs if info.trusted else 1

    async def run(self, first: list[Leased], session: GradingSession, more: More) -> None:
        """Grades `first` and, for a trusted verifier, what `more` gives."""
        batch = list(first)
        try:
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout_at(batch[0].deadline):
                    await stack.enter_async_context(session)
                await self._grade_all(session, batch, more)
        except TimeoutError:
            if self._leases.is_open(batch[0]):
                self._leases.end_unknown(batch[0], "timeout", "no child was ready by the deadline")
            await self._give_back(batch, "no child was ready")
        except _BatchOver as over:
            await self._give_back(batch, str(over))
        except Exception as error:  # task boundary: a runner must survive any job
            log.exception("a batch of %s failed", self._info.name)
            await asyncio.sleep(_PAUSE_SECONDS)
            await self._give_back(batch, f"{type(error).__name__}: {error}")

    async def _give_back(self, batch: list[Leased], error: str) -> None:
        for leased in batch:
            if self._leases.is_open(leased):
                await self._leases.release(leased, error, counted=leased.started > 0)

    async def _grade_all(self, session: GradingSession, batch: list[Leased], more: More) -> None:
        """Grades `batch` in order and appends further jobs to it."""
        for position, leased in enumerate(batch, start=1):  # grows while it is walked
            await self._grade(session, leased)
            metrics.BATCHED.labels(self._queue).inc(position > 1)
            if position == len(batch) and position < self._most_jobs:
                batch += await more(self._most_jobs - position)

    async def _grade(self, session: GradingSession, leased: Leased) -> None:
        job, loop = leased.job, asyncio.get_running_loop()
        if self._is_settled(leased, loop.time()):
            return
        leased.started, leased.progress = loop.time(), lambda: session.progress
        attributes = {"verifier": job.verifier, "job": job.job_id, "attempt": job.attempt, "run": job.run}
        with telemetry.span("sandbox.attempt", parent=job.traceparent, **attributes) as span:
            try:
                async with asyncio.timeout_at(leased.deadline):
                    answer = await _unless(leased.lost, session.grade(job.verifier, job.payload, list(job.answers)))
            except TimeoutError:
                span.set_attribute("outcome", "timeout")
                spent = loop.time() - leased.started
                self._leases.end_unknown(leased, "timeout", f"no verdict by the deadline ({spent:.1f} s of work)")
                raise _BatchOver("a neighbour hung") from None
            except SessionLost as error:
                span.set_attribute("outcome", "lost")
                raise _BatchOver(str(error)) from error
            if answer is None:
                span.set_attribute("outcome", "cancelled")
                self._leases.forget(leased)
                raise _BatchOver("a neighbour was cancelled")
            span.set_attribute("outcome", await self._conclude(leased, answer))
        metrics.DISPATCH.labels(self._queue).observe(loop.time() - leased.started)

    def _is_settled(self, leased: Leased, now: float) -> bool:
        """Whether a job is over before it began; `now` in loop time."""
        job, installed = leased.job, self._info.version
        if leased.lost.is_set():  # cancelled while it waited for its neighbours
            self._leases.forget(leased)
        elif job.version not in ("", installed):  # queued before an upgrade: the grade is kept for the old version
            text = f"{job.verifier} is installed as version {installed}, the job wants {job.version}"
            self._leases.end_unknown(leased, "infra_error", text)
        elif now >= leased.deadline:
            self._leases.end_unknown(leased, "timeout", "the deadline passed before its turn in the child")
        else:
            return False
        return True

    async def _conclude(self, leased: Leased, answer: dict[str, Any]) -> str:
        """Grades end the job; an error that the verifier reports is final, a crash may be repeated. Returns a word."""
        if answer.get("error") == "crash":
            await self._leases.release(leased, str(answer.get("message")), counted=True)
            return "crash"
        if "error" in answer:
            self._leases.end_unknown(leased, "infra_error", str(answer.get("message"))[:500])
            return "infra_error"
        try:
            grades = parse_child_grades(answer.get("grades"), len(leased.job.answers))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self._leases.end_unknown(leased, "infra_error", f"the verifier's answer is malformed: {error}")
            return "infra_error"
        spent = asyncio.get_running_loop().time() - leased.started
        self._leases.end(leased, grades, cpu_seconds_of(answer, spent))
        return "graded"


def cpu_seconds_of(answer: dict[str, Any], spent: float) -> float:
    """Processor seconds as the worker reports them when that can be true; else the wall-clock time `spent`."""
    value = answer.get("cpu_seconds")
    if isinstance(value, int | float) and math.isfinite(value) and 0 <= value <= spent * _MOST_CORES + 0.01:
        return float(value)
    return spent


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
