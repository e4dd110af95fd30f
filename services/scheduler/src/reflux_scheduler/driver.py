"""Drives one placed job: tells the backend to start its members, or to stop them once the job is ending."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from redis.exceptions import RedisError

from reflux_scheduler import jobs
from reflux_scheduler.backends.base import Backend, BackendAway, StartRefused
from reflux_scheduler.errors import UnknownJob
from reflux_scheduler.gang import Member
from reflux_scheduler.job import Job, MemberStatus, Report

log = logging.getLogger(__name__)

_RETRY_SECONDS = 0.5


class JobBook(Protocol):
    """What a driver needs of the controller."""

    def get(self, job_id: str) -> Job:
        """The job as stored."""
        ...

    async def change(self, job_id: str, transition: Callable[[Job], Job]) -> Job:
        """Applies and stores a transition."""
        ...

    async def report(self, job_id: str, node: str, incarnation: str, reports: Iterable[Report]) -> None:
        """Applies what an agent said."""
        ...


class JobDriver:
    """One task per placed job, so that a slow or absent agent holds up nobody else."""

    def __init__(self, job_id: str, book: JobBook, backend: Backend, done: Callable[[str], None]) -> None:
        self._job_id = job_id
        self._book = book
        self._backend = backend
        self._done = done
        self._nudged = asyncio.Event()
        self._complaint = ""
        self._task = asyncio.create_task(self._run(), name=f"drive {job_id}")

    def nudge(self) -> None:
        """The job or an agent may have changed."""
        self._nudged.set()

    async def close(self) -> None:
        """Ends the task; members keep running."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _run(self) -> None:
        try:
            while not self._book.get(self._job_id).final:
                self._nudged.clear()
                try:
                    await self._advance(self._book.get(self._job_id))
                except BackendAway as error:
                    await self._complain(str(error))
                    await asyncio.sleep(_RETRY_SECONDS)
                except RedisError as error:
                    log.warning("jobs/%s: Redis does not answer (%s)", self._job_id, type(error).__name__)
                    await asyncio.sleep(_RETRY_SECONDS)
                job = self._book.get(self._job_id)
                if not (job.final or job.state == "PLACED" or jobs.to_start(job) or jobs.to_stop(job)):
                    await self._nudged.wait()
        except UnknownJob:
            log.warning("jobs/%s was forgotten while it was driven", self._job_id)
        except Exception:  # task boundary: the controller makes a new driver at its next round
            log.exception("jobs/%s: the driver failed", self._job_id)
        finally:
            self._done(self._job_id)

    async def _complain(self, text: str) -> None:
        """Says once, in the log and in the job, what the job is held up by."""
        if text != self._complaint:
            self._complaint = text
            log.warning("jobs/%s: %s; trying again", self._job_id, text)
            with contextlib.suppress(RedisError):
                await self._book.change(
                    self._job_id, lambda job: job if job.ending else jobs.waiting(job, f"held up: {text}")
                )

    async def _advance(self, job: Job) -> None:
        if job.state == "PLACED":
            # Written before the first start: whoever reads STARTING must expect members to exist.
            job = await self._book.change(self._job_id, _starting)
        calls = [self._start(job, member) for member in jobs.to_start(job)]
        calls += [self._stop(job, member) for member in jobs.to_stop(job)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _start(self, job: Job, status: MemberStatus) -> None:
        try:
            incarnation, report = await self._backend.start(job, _member(job, status))
        except StartRefused as error:
            cause = f"{status.label} cannot be started on {status.node}: {error}"
            await self._book.change(job.id, lambda job: jobs.end(job, "FAILED", cause, time.time()))
            return
        await self._book.report(job.id, status.node, incarnation, [report])

    async def _stop(self, job: Job, status: MemberStatus) -> None:
        answer = await self._backend.stop(job, _member(job, status))
        if answer is None:
            role_id = job.role_id(status)
            await self._book.change(job.id, lambda job: jobs.stopped_member(job, role_id, time.time()))
        else:
            await self._book.report(job.id, status.node, answer[0], [answer[1]])


def _starting(job: Job) -> Job:
    return jobs.starting(job, time.time()) if job.state == "PLACED" else job


def _member(job: Job, status: MemberStatus) -> Member:
    assert job.placement is not None
    return next(member for member in job.placement.members if (member.role, member.rank) == (status.role, status.rank))
