"""Drives one placed job: asks for its room, has its members started or stopped, gives the room back."""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from redis.exceptions import RedisError

from reflux_scheduler import jobs
from reflux_scheduler.backends.base import BackendAway, GrantRefused
from reflux_scheduler.book import Book
from reflux_scheduler.crew import AgentAway, Crew, StartRefused
from reflux_scheduler.errors import NotLeading, UnknownJob
from reflux_scheduler.fleet import Fleet
from reflux_scheduler.grants import Grants
from reflux_scheduler.job import Job, Part, Seat
from reflux_scheduler.ledger import Ledger

log = logging.getLogger(__name__)

_RETRY_SECONDS = 0.5
_LOOK_SECONDS = 4.0
_PARALLEL_CALLS = 64
MAX_SLOW_STARTS = 3


@dataclass(frozen=True, slots=True)
class Tools:
    """What every driver works with."""

    book: Book
    ledger: Ledger
    fleet: Fleet
    crew: Crew
    grants: Grants
    start_seconds: float
    """A gang whose room was given runs within this time, or it is tried again elsewhere."""

    grant_seconds: float
    """Room that the cluster does not give within this time is given up: the policy looks anew."""

    blame: Callable[[Sequence[str]], None]
    """Told of nodes on which no agent came in time."""


class JobDriver:
    """One task per placed job, so that a slow or absent agent holds up nobody else."""

    def __init__(self, job_id: str, tools: Tools, done: Callable[[str], None]) -> None:
        self._job_id = job_id
        self._tools = tools
        self._book = tools.book
        self._done = done
        self._nudged = asyncio.Event()
        self._complaint = ""
        self.is_blocked = False
        """Whether a job that has to leave still stands in its room."""

        self._task = asyncio.create_task(self._run(), name=f"drive {job_id}")

    def nudge(self) -> None:
        """The job, an agent or a grant may have changed."""
        self._nudged.set()

    async def close(self) -> None:
        """Ends the task; members keep running."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _run(self) -> None:
        try:
            while (job := self._book.get(self._job_id)).placement is not None and not job.final:
                self._nudged.clear()
                try:
                    again = await self._advance(job)
                except (AgentAway, BackendAway) as error:
                    again = True
                    await self._complain(str(error))
                    await asyncio.sleep(_RETRY_SECONDS)
                except RedisError as error:
                    again = True
                    log.warning("jobs/%s: Redis does not answer (%s)", self._job_id, type(error).__name__)
                    await asyncio.sleep(_RETRY_SECONDS)
                if not again:
                    await self._rest()
        except (UnknownJob, NotLeading):
            log.info("jobs/%s is not driven by this scheduler any more", self._job_id)
        except Exception:  # task boundary: the controller makes a new driver at its next round
            log.exception("jobs/%s: the driver failed", self._job_id)
        finally:
            self._done(self._job_id)

    async def _rest(self) -> None:
        """Until somebody nudges; deadlines need no more than a look now and then."""
        with contextlib.suppress(TimeoutError):
            seconds = min(_LOOK_SECONDS, self._tools.start_seconds, self._tools.grant_seconds)
            async with asyncio.timeout(seconds * (0.5 + random.random())):
                await self._nudged.wait()

    async def _complain(self, text: str) -> None:
        """Says once, in the log and in the job, what the job is held up by."""
        if text != self._complaint:
            self._complaint = text
            log.warning("jobs/%s: %s; trying again", self._job_id, text)
            with contextlib.suppress(RedisError):
                await self._say(f"held up: {text}")

    async def _say(self, text: str) -> None:
        await self._book.change(self._job_id, lambda job: job if job.ending else jobs.waiting(job, text))

    async def _advance(self, job: Job) -> bool:
        """One step; whether the next one can be taken at once."""
        if job.ending is not None:
            return await self._wind_down(job)
        if job.state == "PLACED":
            return await self._make_ready(job)
        return await self._tend(job)

    async def _make_ready(self, job: Job) -> bool:
        """From a place in the plan to room that is really there, with an agent on every node: all of it or nothing."""
        blocker = self._tools.ledger.in_the_way(job)
        self.is_blocked = bool(blocker)
        if blocker:
            await self._say(f"its room is kept; {blocker} still has to leave it")
            return False
        for part in job.parts:
            if not await self._granted(job, part):
                return await self._not_given(job, part)
        job = self._book.get(job.id)
        if job.state != "PLACED" or job.ending is not None or not self._agents_there(job):
            return await self._expired(job, "PLACED")
        # Written before the first start: whoever reads STARTING must expect members to exist.
        await self._book.change(job.id, _starting)
        return True

    async def _granted(self, job: Job, part: Part) -> bool:
        """Whether a part is granted; asks for it, and says what the cluster says of it."""
        if part.state == "granted":
            return True
        grants = self._tools.grants
        try:
            await grants.request(job, part.number)
        except GrantRefused as error:
            cause = f"the cluster refuses its room: {error}"
            await self._book.change(job.id, lambda job: jobs.end(job, "FAILED", cause, time.time()))
            return False
        status = grants.status(f"{job.id}-{part.number}")
        if status is None:
            return False
        if status.state == "ended":
            await self._requeue(f"grant {status.id} ended: {status.reason or 'no reason given'}")
            return False
        told = replace(part, native=status.native, reason=status.reason)
        if status.state == "granted":
            told = replace(told, state="granted", granted_at=time.time())
        if told != part:
            await self._book.change(job.id, lambda job: _with_part(job, told))
        if status.state != "granted" and (status.native or status.reason):
            name = status.native or f"grant {status.id}"
            await self._say(f"waits for {name}" + (f": {status.reason}" if status.reason else ""))
        return status.state == "granted"

    async def _not_given(self, job: Job, part: Part) -> bool:
        """Gives room up that the cluster does not give, with the reason; always False."""
        job, grant_id, seconds = self._book.get(job.id), f"{job.id}-{part.number}", self._tools.grant_seconds
        if self._tools.grants.asked_seconds(grant_id) >= seconds:
            status = self._tools.grants.status(grant_id)
            reason = status.reason if status is not None else ""
            await self._requeue(
                f"the cluster did not give its room within {seconds:g} s: {reason or 'no reason given'}"
            )
        return False

    def _agents_there(self, job: Job) -> bool:
        assert job.placement is not None
        now = time.monotonic()
        posts = {(seat.node, job.grant_id(seat.part)) for seat in job.placement.seats()}
        return all(self._tools.fleet.is_available(post, now) for post in posts)

    async def _expired(self, job: Job, state: str) -> bool:
        """Gives a start up that takes too long, with the reason; always False."""
        since = max((part.granted_at for part in job.parts), default=0.0)
        since = max(since, job.placed_at if state == "PLACED" and not job.parts else job.started_at)
        seconds = self._tools.start_seconds
        if job.state != state or job.ending is not None or not since or time.time() - since < seconds:
            return False
        assert job.placement is not None
        late = [seat for seat in job.placement.seats() if job.status(seat).state not in ("running", "succeeded")]
        nodes = sorted({seat.node for seat in late})
        named = ", ".join(nodes[:5]) + (", ..." if len(nodes) > 5 else "")
        now, fleet = time.monotonic(), self._tools.fleet
        silent = sorted(
            {seat.node for seat in late if not fleet.is_available((seat.node, job.grant_id(seat.part)), now)}
        )
        if silent:
            self._tools.blame(silent)
        what = f"no agent on {len(silent)} of them" if silent else "their members do not run"
        cause = f"it did not start within {seconds:g} s: {len(nodes)} node(s) are not ready ({named}): {what}"
        if job.slow_starts + 1 >= MAX_SLOW_STARTS:
            cause = f"{cause}; given up after {MAX_SLOW_STARTS} attempts"
            await self._book.change(job.id, lambda job: jobs.end(job, "FAILED", cause, time.time()))
        else:
            await self._book.change(
                job.id, lambda job: jobs.requeue(replace(job, slow_starts=job.slow_starts + 1), cause, time.time())
            )
        return False

    async def _tend(self, job: Job) -> bool:
        """Members of a job that was started: new ones are started, left places are emptied, empty parts given back."""
        assert job.placement is not None
        ready = True
        for part in job.parts:
            if part.state == "granted":
                status = self._tools.grants.status(f"{job.id}-{part.number}")
                # A part that nobody is in has lost all of its nodes, or was given back already.
                if status is not None and status.state == "ended" and part.number in _used_parts(job):
                    await self._requeue(f"grant {status.id} ended: {status.reason or 'no reason given'}")
                    return True
            else:
                ready = await self._granted(job, part) and ready
        job = self._book.get(job.id)
        if job.ending is not None or job.placement is None:
            return True
        try:
            await _all(
                [self._start(job, seat) for seat in jobs.to_start(job) if self._reachable(job, seat)]
                + [self._stop(job, seat) for seat in jobs.to_stop(job)]
            )
        except AgentAway:
            await self._expired(self._book.get(job.id), "STARTING")
            raise
        await self._drop_empty_parts(self._book.get(job.id))
        job = self._book.get(job.id)
        if job.state == "STARTING":
            await self._expired(job, "STARTING")
        waiting = [seat for seat in jobs.to_start(job) if self._reachable(job, seat)]
        return job.ending is not None or bool(waiting)

    def _reachable(self, job: Job, seat: Seat) -> bool:
        """Whether a member may be started: its part is granted and its agent has registered."""
        if not job.parts:
            return True
        granted = any(part.number == seat.part and part.state == "granted" for part in job.parts)
        return granted and self._tools.fleet.agent((seat.node, job.grant_id(seat.part))) is not None

    async def _drop_empty_parts(self, job: Job) -> None:
        if job.placement is None or job.ending is not None or len(job.parts) < 2:
            return
        for part in job.parts:
            if part.number not in _used_parts(job) and await self._tools.grants.release(job, part.number):
                await self._released(job, part.number)

    async def _released(self, job: Job, part: int) -> None:
        """After the cluster took a part back: nobody calls its agents any more."""
        await self._book.change(job.id, lambda job: jobs.released(job, part, time.time()))
        for post in self._tools.fleet.of_grant(f"{job.id}-{part}"):
            self._tools.fleet.forget(post)
            await self._tools.crew.forget(post)

    async def _wind_down(self, job: Job) -> bool:
        """Stops every member, then gives the room back; where the room's end is the agents' end, absent ones count as
        stopped."""
        calls: list[Coroutine[Any, Any, None]] = []
        for seat in jobs.to_stop(job):
            post = (seat.node, job.grant_id(seat.part))
            if job.parts and not self._tools.fleet.is_available(post, time.monotonic()):
                calls.append(self._count_stopped(job, seat))
            else:
                calls.append(self._stop(job, seat))
        await _all(calls)
        job = self._book.get(job.id)
        if jobs.to_stop(job):
            return True
        for part in job.parts:
            if await self._tools.grants.release(job, part.number):
                await self._released(job, part.number)
        job = await self._book.change(job.id, lambda job: jobs.settled(job, time.time()))
        return False

    async def _start(self, job: Job, seat: Seat) -> None:
        try:
            heard = await self._tools.crew.start(job, seat)
        except StartRefused as error:
            cause = f"{seat.label} cannot be started on {seat.node}: {error}"
            await self._book.change(job.id, lambda job: jobs.end(job, "FAILED", cause, time.time()))
            return
        await self._heard(job, seat, heard)

    async def _stop(self, job: Job, seat: Seat) -> None:
        heard = await self._tools.crew.stop(job, seat)
        if seat in job.retiring:
            await self._book.change(job.id, lambda job: jobs.retired(job, seat))
        elif heard is None:
            await self._count_stopped(job, seat)
        else:
            await self._heard(job, seat, heard)

    async def _count_stopped(self, job: Job, seat: Seat) -> None:
        if seat in job.retiring:
            await self._book.change(job.id, lambda job: jobs.retired(job, seat))
        else:
            await self._book.change(job.id, lambda job: jobs.stopped_member(job, seat, time.time()))

    async def _heard(self, job: Job, seat: Seat, heard: Any) -> None:
        post = (seat.node, job.grant_id(seat.part))
        await self._book.change(job.id, lambda job: jobs.observe_one(job, seat, post, heard, time.time()))

    async def _requeue(self, cause: str) -> None:
        await self._book.change(self._job_id, lambda job: jobs.requeue(job, cause, time.time()))


def _used_parts(job: Job) -> frozenset[int]:
    """Parts with a member in them, one that is about to leave included."""
    placed = () if job.placement is None else job.placement.seats()
    return frozenset(seat.part for seat in (*placed, *job.retiring))


def _starting(job: Job) -> Job:
    return jobs.starting(job, time.time()) if job.state == "PLACED" and job.ending is None else job


def _with_part(job: Job, part: Part) -> Job:
    parts = tuple(part if each.number == part.number else each for each in job.parts)
    text = f"grant {job.id}-{part.number} is {part.state}" + (f" as {part.native}" if part.native else "")
    before = next((each for each in job.parts if each.number == part.number), part)
    changed = replace(job, parts=parts)
    return jobs.note(changed, "grant", text, time.time()) if before.state != part.state else changed


async def _all(calls: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Runs calls, a bounded number at a time, and raises the first error once all have ended."""
    gate = asyncio.Semaphore(_PARALLEL_CALLS)

    async def gated(call: Coroutine[Any, Any, None]) -> None:
        async with gate:
            await call

    for result in await asyncio.gather(*(gated(call) for call in calls), return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
