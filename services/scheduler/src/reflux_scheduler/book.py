"""Owns all jobs in memory and their copies in the store and the ledger: the scheduler's only writer.

Every change is stored before anybody sees or acts on it. So after `kill -9` the next scheduler knows at least what this
one did, and repeats at most calls that are idempotent.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace

from reflux_placement.errors import Occupied
from reflux_scheduler.errors import UnknownJob
from reflux_scheduler.fleet import Post
from reflux_scheduler.job import Job
from reflux_scheduler.jobs import Transition
from reflux_scheduler.ledger import Ledger, planned_placement
from reflux_scheduler.metrics import Metrics
from reflux_scheduler.store import Store
from reflux_scheduler.units import Units

log = logging.getLogger(__name__)

KEPT_FINAL_JOBS = 500


class Book:
    """Methods may raise RedisError or NotLeading: then nothing has changed here, and `settle` sees to it that nothing
    has changed in the store either. A caller that is cancelled tears nothing: the change is made all the same."""

    def __init__(self, store: Store, ledger: Ledger, metrics: Metrics, changed: Callable[[Job, Job], None]) -> None:
        self._store = store
        self._ledger = ledger
        self._metrics = metrics
        self._changed = changed
        self._jobs: dict[str, Job] = {}
        self._posts: dict[Post, set[str]] = {}
        self._posts_of: dict[str, frozenset[Post]] = {}
        self._writing = asyncio.Lock()
        self._pulses: dict[str, asyncio.Event] = {}
        self._numbers = 0
        self._unsettled: set[str] = set()
        """Jobs that Redis may have in another state than this book: the outcome of a write was not heard."""

        self.units = Units()
        self.homeless: dict[str, str] = {}
        """Jobs whose places are not there any more, and why."""

    async def load(self) -> None:
        """Reads what the last scheduler knew; writes nothing."""
        stored, unreadable = await self._store.load()
        for job_id in unreadable:
            log.error("jobs/%s was written by another version and cannot be read; its members are stopped", job_id)
        for job in stored:
            await asyncio.sleep(0)  # The lease has to be renewed meanwhile.
            self._adopt(job)
            try:
                self._ledger.sync(job)
            except (LookupError, Occupied) as error:
                self.homeless[job.id] = f"the topology has changed: {error}"
            self._index(job)
        log.info("took over %d jobs, %d of them placed", len(self._jobs), len(self._ledger.planned))

    @property
    def jobs(self) -> Mapping[str, Job]:
        """All jobs by id."""
        return self._jobs

    def get(self, job_id: str) -> Job:
        """One job. Raises UnknownJob."""
        try:
            return self._jobs[job_id]
        except KeyError:
            raise UnknownJob(f"there is no job 'jobs/{job_id[:64]}'") from None

    def at(self, post: Post) -> frozenset[str]:
        """Jobs that may have members under an agent."""
        return frozenset(self._posts.get(post, ()))

    @property
    def posts(self) -> Mapping[Post, set[str]]:
        """Jobs that were started, by agent."""
        return self._posts

    def wants(self, post: Post, role_id: str) -> bool:
        """Whether some job has a member of this id ("{job}/{role}/{rank}") under an agent, or one that leaves it."""
        job_id, _, rest = role_id.partition("/")
        role, _, rank = rest.partition("/")
        job = self._jobs.get(job_id)
        if job is None or job.final or job.placement is None:
            return False
        seats = [seat for seat in job.retiring if seat.label == rest]
        here = job.placement.seat(role, int(rank)) if rank.isdigit() else None
        seats += [here] if here is not None else []
        return any((seat.node, job.grant_id(seat.part)) == post for seat in seats)

    async def create(self, request_id: str, make: Callable[[int], Job]) -> Job:
        """Stores a new job under the next number; a request id that was seen gets its job again."""
        return await self.units.run(self._create(request_id, make))

    async def _create(self, request_id: str, make: Callable[[int], Job]) -> Job:
        async with self._writing:
            job = make(self._numbers + 1)
            number, self._numbers = self._numbers, job.number  # Taken, whatever becomes of the write.
            self._unsettled.add(job.id)
            known = await self._store.create(job, request_id)
            self._unsettled.discard(job.id)
            if known == job.id:
                self._adopt(job)
            else:
                self._numbers = number
                if known not in self._jobs:
                    await self._find(known)
            # A job that was forgotten since is not made again: the request has had its effect.
            return self.get(known)

    async def change(self, job_id: str, transition: Transition) -> Job:
        """Applies a transition of `jobs` and stores the result. Raises UnknownJob."""
        return (await self.change_all({job_id: transition}))[job_id]

    async def change_all(self, transitions: Mapping[str, Transition]) -> dict[str, Job]:
        """Applies transitions to several jobs; they are stored together or not at all. Raises UnknownJob."""
        return await self.units.run(self._change_all(transitions))

    async def _change_all(self, transitions: Mapping[str, Transition]) -> dict[str, Job]:
        async with self._writing:
            before = {job_id: self.get(job_id) for job_id in transitions}
            after = {job_id: transitions[job_id](job) for job_id, job in before.items()}
            changed = {
                job_id: job for job_id, job in after.items() if job is not before[job_id] and job != before[job_id]
            }
            await self._save({job_id: job for job_id, job in changed.items() if _lasts(before[job_id], job)})
            self._jobs.update(changed)
            for job_id, job in changed.items():
                self._follow(before[job_id], job)
        for job_id, job in changed.items():
            self._tell(before[job_id], job)
        return {job_id: changed.get(job_id, job) for job_id, job in before.items()}

    async def settle(self) -> None:
        """After writes whose outcome nobody heard: makes the store hold what this book holds, and takes over new jobs
        that it holds."""
        if self._unsettled:
            await self.units.run(self._settle())

    async def _settle(self) -> None:
        async with self._writing:
            await self._save({job_id: self._jobs[job_id] for job_id in self._unsettled if job_id in self._jobs})
            for job_id in list(self._unsettled):
                await self._find(job_id)
                self._unsettled.discard(job_id)

    async def _save(self, after: Mapping[str, Job]) -> None:
        """Stores jobs, all or none. What Redis has of an unsettled one is not known: that is written in full."""
        if not after:
            return
        pairs = [(None if job_id in self._unsettled else self._jobs[job_id], job) for job_id, job in after.items()]
        self._unsettled |= after.keys()
        await self._store.save(pairs)
        self._unsettled -= after.keys()

    async def _find(self, job_id: str) -> None:
        """Takes over a job that only the store knows, if it does."""
        job = await self._store.find(job_id)
        if job is not None:
            self._adopt(job)
            log.info("took over %s, whose creation nobody has heard of", job.name)

    def _adopt(self, job: Job) -> None:
        self._jobs[job.id] = job
        self._numbers = max(self._numbers, job.number)

    async def watch(self, job_id: str, after: int) -> AsyncIterator[Job]:
        """The job whenever it is newer than sequence `after`, until it is final. Raises UnknownJob."""
        while True:
            job = self.get(job_id)
            if job.sequence > after or job.final:
                yield job
                after = job.sequence
                if job.final:
                    return
            if self._jobs.get(job_id) is job:
                await self._pulses.setdefault(job_id, asyncio.Event()).wait()

    async def forget_old(self) -> None:
        """Drops the oldest finished jobs beyond a number."""
        final = [job for job in self._jobs.values() if job.final]
        if len(final) > KEPT_FINAL_JOBS:
            final.sort(key=lambda job: job.number)
            for job in final[:-KEPT_FINAL_JOBS]:
                await self._store.forget(job.id)
                del self._jobs[job.id]

    async def close(self) -> None:
        """Wakes every watcher, because this scheduler does not lead any more."""
        await self.units.close()
        self._jobs.clear()
        for pulse in self._pulses.values():
            pulse.set()

    def _follow(self, before: Job, after: Job) -> None:
        """Ledger and index of one stored change."""
        if (
            planned_placement(after) is not planned_placement(before)
            or after.ending is not before.ending
            or (after.retiring is not before.retiring or after.final != before.final)
            or after.stranded is not before.stranded
        ):
            self._ledger.sync(after)
        moved = after.placement is not before.placement or after.retiring is not before.retiring
        if moved or after.parts is not before.parts or after.state != before.state:
            self._index(after)

    def _tell(self, before: Job, after: Job) -> None:
        """Log, watchers and metrics of one stored change."""
        self._changed(before, after)
        if after.sequence != before.sequence:
            for event in after.events:
                if event.sequence > before.sequence:
                    log.info("%s %s", after.name, event.text)
            self._pulses.pop(after.id, asyncio.Event()).set()
            self._metrics.changed(before, after)

    def _index(self, job: Job) -> None:
        posts: frozenset[Post] = frozenset()
        if job.placement is not None and job.state in ("STARTING", "RUNNING"):
            seats = (*job.placement.seats(), *job.retiring)
            posts = frozenset((seat.node, job.grant_id(seat.part)) for seat in seats)
        for post in self._posts_of.pop(job.id, frozenset()) - posts:
            self._posts[post].discard(job.id)
            if not self._posts[post]:
                del self._posts[post]
        for post in posts:
            self._posts.setdefault(post, set()).add(job.id)
        if posts:
            self._posts_of[job.id] = posts


def _lasts(before: Job, after: Job) -> bool:
    """Whether a change is worth a write: figures that move at every heartbeat are not."""
    if before.sequence != after.sequence or before.parts != after.parts or before.retiring != after.retiring:
        return True
    if replace(before, members={}) != replace(after, members={}):
        return True
    if before.members.keys() != after.members.keys():
        return True
    old = before.members
    return any(
        status is not old[label] and replace(status, rss_bytes=0) != replace(old[label], rss_bytes=0)
        for label, status in after.members.items()
    )
