"""Owns the calls to the agents of one job's members: a bounded number at a time, each answer noted in the job."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from reflux_scheduler import jobs, sightings
from reflux_scheduler.book import Book
from reflux_scheduler.crew import AgentAway, Crew, StartRefused
from reflux_scheduler.job import DONE, Heard, Job, Seat

_PARALLEL_CALLS = 64


class Gang:
    """The members of a job. Methods raise AgentAway once all calls have ended, when one of them did."""

    def __init__(self, book: Book, crew: Crew) -> None:
        self._book = book
        self._crew = crew

    async def update(self, job: Job, start: Sequence[Seat], stop: Sequence[Seat], gone: Sequence[Seat] = ()) -> None:
        """Has members started and others stopped; those of `gone` are known to have stopped.

        The members of a large gang are all told to stop before the end of any is waited for: else the last ones would
        be told many graces after the first.
        """
        if len(stop) > _PARALLEL_CALLS:
            await _all([partial(self._tell_to_stop, job, seat) for seat in stop])
        await _all(
            [partial(self._start, job, seat) for seat in start]
            + [partial(self._count_stopped, job, seat) for seat in gone]
            + [partial(self._stop, job, seat) for seat in stop]
        )

    async def _start(self, job: Job, seat: Seat) -> None:
        try:
            heard = await self._crew.start(job, seat)
        except StartRefused as error:
            cause = f"{seat.label} cannot be started on {seat.node}: {error}"
            await self._book.change(job.id, lambda job: jobs.end(job, "FAILED", cause, time.time()))
            return
        await self._heard(job, seat, heard)

    async def _tell_to_stop(self, job: Job, seat: Seat) -> None:
        with contextlib.suppress(AgentAway):  # The call that waits for its end says so.
            await self._crew.stop(job, seat, wait=False)

    async def _stop(self, job: Job, seat: Seat) -> None:
        heard = await self._crew.stop(job, seat)
        report = heard.reports.get(job.role_id(seat)) if heard is not None else None
        # A member of another attempt is the only one of its id that the agent has: this attempt's was never started.
        other = report is not None and report.state in DONE and report.attempt not in (0, job.attempt)
        if heard is None or other or seat in job.retiring:
            await self._count_stopped(job, seat)
        else:
            await self._heard(job, seat, heard)

    async def _count_stopped(self, job: Job, seat: Seat) -> None:
        if seat in job.retiring:
            await self._book.change(job.id, lambda job: jobs.retired(job, seat))
        else:
            await self._book.change(job.id, lambda job: sightings.stopped_member(job, seat, time.time()))

    async def _heard(self, job: Job, seat: Seat, heard: Heard) -> None:
        post = (seat.node, job.grant_id(seat.part))
        await self._book.change(job.id, lambda job: sightings.observe_one(job, seat, post, heard, time.time()))


async def _all(calls: Sequence[Callable[[], Awaitable[None]]]) -> None:
    """Runs calls, a bounded number at a time, and raises the first error once all have ended."""
    gate = asyncio.Semaphore(_PARALLEL_CALLS)

    async def gated(call: Callable[[], Awaitable[None]]) -> None:
        async with gate:
            await call()

    for result in await asyncio.gather(*(gated(call) for call in calls), return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
