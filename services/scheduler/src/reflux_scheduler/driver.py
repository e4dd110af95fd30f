"""Drives one placed job from its place in the plan to its end: room first, then members; at the end the other way."""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from redis.exceptions import RedisError

from reflux_scheduler import jobs
from reflux_scheduler.backends.base import BackendAway
from reflux_scheduler.book import Book
from reflux_scheduler.crew import AgentAway, Crew
from reflux_scheduler.errors import NotLeading, UnknownJob
from reflux_scheduler.fleet import Fleet
from reflux_scheduler.gang import Gang
from reflux_scheduler.grants import Grants
from reflux_scheduler.job import Job, Part, Seat
from reflux_scheduler.ledger import Ledger
from reflux_scheduler.parts import Parts, placed_parts

log = logging.getLogger(__name__)

_RETRY_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 16.0
"""Between steps that fail, again and again, in a way that nobody has thought of."""

_LOOK_SECONDS = 4.0
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
        self._gang = Gang(tools.book, tools.crew)
        self._parts = Parts(tools.book, tools.fleet, tools.crew, tools.grants, tools.grant_seconds, self._say)
        self._done = done
        self._nudged = asyncio.Event()
        self._complaint = ""
        self._failure_seconds = 0.0
        """Pause after the last failure; twice as long after the next one."""

        self.is_blocked = False
        """Whether somebody who has to leave still stands in its room, or in that of a member."""

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
                if not await self._step(job):
                    await self._rest()
        except (UnknownJob, NotLeading):
            log.info("jobs/%s is not driven by this scheduler any more", self._job_id)
        finally:
            self._done(self._job_id)

    async def _step(self, job: Job) -> bool:
        """One step, after trouble with a pause; whether the next one can be taken at once."""
        pause_seconds = _RETRY_SECONDS
        try:
            again = await self._advance(job)
        except (UnknownJob, NotLeading):
            raise
        except (AgentAway, BackendAway) as error:
            await self._complain(str(error))
        except RedisError as error:
            log.warning("jobs/%s: Redis does not answer (%s)", self._job_id, type(error).__name__)
        except Exception as error:  # task boundary: one bad answer must not leave a job without a driver
            log.exception("jobs/%s: a step of its driver failed", self._job_id)
            pause_seconds = min(_LONGEST_PAUSE_SECONDS, 2 * self._failure_seconds or _RETRY_SECONDS)
            self._failure_seconds = pause_seconds
            await self._complain(f"{type(error).__name__}: {error}")
        else:
            self._failure_seconds = 0.0
            return again
        await asyncio.sleep(pause_seconds)
        return True

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
            if not await self._parts.granted(job, part):
                await self._parts.not_given(self._book.get(job.id), part)
                return False
        job = self._book.get(job.id)
        if job.state == "PLACED" and job.ending is None and await self._parts.lost_before_start(job):
            return False
        if job.state != "PLACED" or job.ending is not None or not self._agents_there(job):
            return await self._expired(job, "PLACED")
        # Written before the first start: whoever reads STARTING must expect members to exist.
        await self._book.change(job.id, _starting)
        return True

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
        if await self._parts.lost_one(job):
            return True
        await self._ask_for_more(job)
        job = self._book.get(job.id)
        if job.ending is not None or job.placement is None:
            return True
        start = self._ready(job)
        try:
            await self._gang.update(job, start, *self._parts.departures(job))
        except AgentAway:
            await self._expired(self._book.get(job.id), "STARTING")
            raise
        await self._parts.drop_empty(self._book.get(job.id))
        job = self._book.get(job.id)
        if job.state == "STARTING":
            await self._expired(job, "STARTING")
        left = self._ready(job)
        if left and left == start:
            await asyncio.sleep(_RETRY_SECONDS)
        return job.ending is not None or bool(left)

    async def _ask_for_more(self, job: Job) -> None:
        """Asks for the parts of members that were added or moved, once nobody stands there; gives up what does not
        come, or has no agents in time."""
        blocked = {seat.part for seat in self._tools.ledger.blockers(job, jobs.to_start(job))}
        used = placed_parts(job)
        for part in job.parts:
            if part.state == "granted":
                silent = self._silent(job, part)
                if silent:
                    self._tools.blame(silent)
                    cause = f"no agent came to {', '.join(silent[:5])} within {self._tools.start_seconds:g} s"
                    await self._parts.give_up(job, part, cause)
            elif part.number in used - blocked and not await self._parts.granted(job, part):
                await self._parts.not_given(job, part)

    def _silent(self, job: Job, part: Part) -> list[str]:
        """Nodes of a part that no agent came to in time, under a job that runs; one that starts is given up as such."""
        if job.state != "RUNNING" or time.time() - part.granted_at < self._tools.start_seconds:
            return []
        fleet = self._tools.fleet
        new = [seat for seat in jobs.to_start(job) if seat.part == part.number and not job.status(seat).incarnation]
        return sorted({seat.node for seat in new if fleet.agent((seat.node, job.grant_id(part.number))) is None})

    def _ready(self, job: Job) -> list[Seat]:
        """Members that can be started now: nobody stands in their room, and their agents are there."""
        new = jobs.to_start(job)
        blocked = self._tools.ledger.blockers(job, new)
        self.is_blocked = bool(blocked)
        return [seat for seat in new if seat not in blocked and self._reachable(job, seat)]

    def _reachable(self, job: Job, seat: Seat) -> bool:
        """Whether a member may be started: its part is granted and its agent has registered."""
        if not job.parts:
            return True
        granted = any(part.number == seat.part and part.state == "granted" for part in job.parts)
        return granted and self._tools.fleet.agent((seat.node, job.grant_id(seat.part))) is not None

    async def _wind_down(self, job: Job) -> bool:
        """Stops every member, then gives the room back."""
        await self._gang.update(job, (), *self._parts.departures(job))
        job = self._book.get(job.id)
        if jobs.to_stop(job):
            await asyncio.sleep(_RETRY_SECONDS)
            return True
        for part in job.parts:
            await self._parts.release(job, part)
        await self._book.change(job.id, lambda job: jobs.settled(job, time.time()))
        return False


def _starting(job: Job) -> Job:
    return jobs.starting(job, time.time()) if job.state == "PLACED" and job.ending is None else job
