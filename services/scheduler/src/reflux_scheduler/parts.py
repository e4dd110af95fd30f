"""Owns the rooms of one job at the cluster: asks for its parts, gives up what is not given, gives back what is left."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from reflux_scheduler import growth, jobs
from reflux_scheduler.backends.base import GrantRefused
from reflux_scheduler.book import Book
from reflux_scheduler.crew import Crew
from reflux_scheduler.fleet import Fleet
from reflux_scheduler.grants import Grants
from reflux_scheduler.job import Job, Part, Seat


class Parts:
    """The grants of a job. Methods may raise BackendAway.

    Args:
        book, fleet, crew, grants: of the scheduler.
        grant_seconds: room that the cluster does not give within this time is given up: the policy looks anew.
        say: tells people what the job waits for.
    """

    def __init__(
        self,
        book: Book,
        fleet: Fleet,
        crew: Crew,
        grants: Grants,
        grant_seconds: float,
        say: Callable[[str], Awaitable[None]],
    ) -> None:
        self._book = book
        self._fleet = fleet
        self._crew = crew
        self._grants = grants
        self._grant_seconds = grant_seconds
        self._say = say

    async def granted(self, job: Job, part: Part) -> bool:
        """Whether a part is granted; asks for it, and says what the cluster says of it."""
        if part.state == "granted":
            return True
        try:
            await self._grants.request(job, part.number)
        except GrantRefused as error:
            cause = f"the cluster refuses its room: {error}"
            await self._book.change(job.id, lambda job: growth.refused(job, part.number, cause, time.time()))
            return False
        status = self._grants.status(f"{job.id}-{part.number}")
        if status is None:
            return False
        if status.state == "ended":
            await self.give_up(job, part, f"grant {status.id} ended: {status.reason or 'no reason given'}")
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

    async def not_given(self, job: Job, part: Part) -> None:
        """Gives room up that the cluster does not give in time, with the reason."""
        grant_id, seconds = f"{job.id}-{part.number}", self._grant_seconds
        if self._grants.asked_seconds(grant_id) >= seconds:
            status = self._grants.status(grant_id)
            reason = status.reason if status is not None else ""
            cause = f"the cluster did not give its room within {seconds:g} s: {reason or 'no reason given'}"
            await self.give_up(job, part, cause)

    async def lost_one(self, job: Job) -> bool:
        """Whether a part ended that has members in it; the job does without it then, or goes back to the queue."""
        for part in job.parts:
            status = self._grants.status(f"{job.id}-{part.number}") if part.state == "granted" else None
            # A part that nobody is in has lost all of its nodes, or was given back already.
            if status is not None and status.state == "ended" and part.number in placed_parts(job):
                await self.give_up(job, part, f"grant {status.id} ended: {status.reason or 'no reason given'}")
                return True
        return False

    async def lost_before_start(self, job: Job) -> bool:
        """Whether the cluster took a node of a granted part away before the job started there: the part is given up,
        since no agent will come. Of jobs that were started the controller counts lost nodes."""
        lost = self._grants.lost_posts()
        for seat in job.placement.seats() if job.placement is not None else ():
            if (why := lost.get((seat.node, job.grant_id(seat.part)))) is not None:
                part = next(part for part in job.parts if part.number == seat.part)
                await self.give_up(job, part, why)
                return True
        return False

    async def drop_empty(self, job: Job) -> None:
        """Gives back parts that no member is in."""
        if job.placement is None or job.ending is not None or len(job.parts) < 2:
            return
        used = placed_parts(job) | {seat.part for seat in job.retiring}
        for part in job.parts:
            if part.number not in used:
                await self.release(job, part)

    async def release(self, job: Job, part: Part) -> None:
        """Gives a part back; once the cluster took it nobody calls its agents any more."""
        if not await self._grants.release(job, part.number):
            return
        await self._book.change(job.id, lambda job: jobs.released(job, part.number, time.time()))
        for post in self._fleet.of_grant(f"{job.id}-{part.number}"):
            self._fleet.forget(post)
            await self._crew.forget(post)

    async def give_up(self, job: Job, part: Part, cause: str) -> None:
        """Does without a part: the gang stays smaller, or goes back into the queue."""
        await self._book.change(job.id, lambda job: growth.given_up(job, part.number, cause, time.time()))

    def departures(self, job: Job) -> tuple[list[Seat], list[Seat]]:
        """Members that have to be told to stop, and those that count as stopped: where a part is about to be given
        back, its end is the end of agents that do not answer."""
        stop: list[Seat] = []
        gone: list[Seat] = []
        kept = placed_parts(job) if job.ending is None else frozenset[int]()
        now = time.monotonic()
        for seat in jobs.to_stop(job):
            over = job.parts and seat.part not in kept
            absent = over and not self._fleet.is_available((seat.node, job.grant_id(seat.part)), now)
            (gone if absent else stop).append(seat)
        return stop, gone


def placed_parts(job: Job) -> frozenset[int]:
    """Parts with a member that is to stay there."""
    return frozenset(part for places in job.placement.roles for part in places.parts) if job.placement else frozenset()


def _with_part(job: Job, part: Part) -> Job:
    parts = tuple(part if each.number == part.number else each for each in job.parts)
    text = f"grant {job.id}-{part.number} is {part.state}" + (f" as {part.native}" if part.native else "")
    before = next((each for each in job.parts if each.number == part.number), part)
    changed = replace(job, parts=parts)
    return jobs.note(changed, "grant", text, time.time()) if before.state != part.state else changed
