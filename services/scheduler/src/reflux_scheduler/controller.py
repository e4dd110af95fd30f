"""Owns all jobs and the inventory: the queue, the way of each job through its states, what a restart takes over.

Every change is written to Redis before anybody sees or acts on it. So after `kill -9` the next scheduler knows at least
what this one did, and repeats at most calls that are idempotent.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace

from redis.exceptions import RedisError

from reflux_scheduler import jobs
from reflux_scheduler.backends.base import Backend
from reflux_scheduler.driver import JobDriver
from reflux_scheduler.errors import UnknownJob
from reflux_scheduler.explain import Shortage, impossible, shortage, waiting, waiting_sentence
from reflux_scheduler.fleet import Fleet
from reflux_scheduler.gang import Placement
from reflux_scheduler.inventory import Inventory
from reflux_scheduler.job import Job, JobSpec, Report
from reflux_scheduler.job_store import JobStore
from reflux_scheduler.metrics import Metrics

log = logging.getLogger(__name__)

_TICK_SECONDS = 1.0
_KEPT_FINAL_JOBS = 500


class Controller:
    """The scheduler's only writer. Methods may raise RedisError: then nothing has changed."""

    def __init__(self, store: JobStore, inventory: Inventory, fleet: Fleet, backend: Backend, metrics: Metrics) -> None:
        self._store = store
        self._inventory = inventory
        self._fleet = fleet
        self._backend = backend
        self._metrics = metrics
        self._jobs: dict[str, Job] = {}
        self._writing = asyncio.Lock()
        self._wake = asyncio.Event()
        self._pulses: dict[str, asyncio.Event] = {}
        self._drivers: dict[str, JobDriver] = {}
        self._homeless: dict[str, str] = {}

    async def load(self) -> None:
        """Reads what the last scheduler knew; writes nothing, because the address may turn out to be in use."""
        for job in await self._store.load():
            self._jobs[job.id] = job
            if not job.final:
                self._take_over(job)
        log.info("took over %d jobs, %d of them placed", len(self._jobs), len(self._inventory.placements))

    def _take_over(self, job: Job) -> None:
        """The topology may have changed since the job was accepted or placed."""
        if job.placement is None:
            reason = impossible(self._inventory.topology, job.spec.demand())
            if reason is not None:
                self._homeless[job.id] = reason
            return
        try:
            self._inventory.take(job.id, job.placement)
        except (LookupError, ValueError) as error:
            self._homeless[job.id] = f"the topology has changed: {error}"

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Drives all jobs until the block ends; members keep running."""
        task = asyncio.create_task(self._run(), name="controller")
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            for driver in list(self._drivers.values()):
                await driver.close()

    async def create(self, spec: JobSpec, request_id: str) -> Job:
        """Accepts a job; one that can never fit is FAILED at once. A request id that was seen gets its job again.

        Raises InvalidJob when the description contradicts itself.
        """
        demand = spec.demand()
        async with self._writing:
            known = await self._store.by_request(request_id)
            if known is not None and known in self._jobs:
                return self._jobs[known]
            number = max((job.number for job in self._jobs.values()), default=0) + 1
            job = Job(uuid.uuid4().hex[:12], number, spec, time.time(), message="queued")
            reason = await asyncio.to_thread(impossible, self._inventory.topology, demand)
            if reason is not None:
                job = jobs.end(job, "FAILED", reason, time.time())
            await self._store.create(job, request_id)
            self._jobs[job.id] = job
        log.info("accepted %s (%s): %s", job.name, spec.display_name, job.message)
        self._wake.set()
        return job

    def get(self, job_id: str) -> Job:
        """One job. Raises UnknownJob."""
        try:
            return self._jobs[job_id]
        except KeyError:
            raise UnknownJob(f"there is no job 'jobs/{job_id[:64]}'") from None

    def newest_first(self) -> list[Job]:
        """All jobs."""
        return sorted(self._jobs.values(), key=lambda job: -job.number)

    async def cancel(self, job_id: str) -> Job:
        """Begins the end of a job; a finished one stays as it is. Raises UnknownJob."""
        self.get(job_id)
        job = await self._change(job_id, lambda job: jobs.end(job, "CANCELLED", "cancelled on request", time.time()))
        self._wake.set()
        return job

    async def watch(self, job_id: str, after: int) -> AsyncIterator[Job]:
        """The job whenever it is newer than sequence `after`, until it is final. Raises UnknownJob."""
        while True:
            job = self.get(job_id)
            pulse = self._pulses.setdefault(job_id, asyncio.Event())
            if job.sequence > after or job.final:
                yield job
                after = job.sequence
                if job.final:
                    return
            if self._jobs.get(job_id) is job:
                await pulse.wait()

    def explain(self, job_id: str) -> tuple[str, Shortage | None]:
        """Why a job waits or where it went, in a sentence and as data. Raises UnknownJob."""
        job = self.get(job_id)
        if job.state != "PENDING":
            return f"{job.name} is {job.state}: {job.message}", self._never_fits(job)
        head = min((other for other in self._jobs.values() if other.state == "PENDING"), key=lambda other: other.number)
        short = self._shortage(head)
        sentence = self._sentence(short) if short else "is about to be placed"
        if head is job:
            return f"{job.name} {sentence}", short
        return f"{job.name} is behind {head.name} in the queue, which {sentence}", self._shortage(job)

    def heard(self, node: str) -> list[str]:
        """After an agent spoke: the ids of its members that nobody wants. The reports are applied soon after."""
        self._wake.set()
        agent = self._fleet.agent(node)
        return [role_id for role_id in agent.reports if not self._wanted(node, role_id)] if agent else []

    async def report(self, job_id: str, node: str, incarnation: str, reports: Iterable[Report]) -> None:
        """Applies what an agent said about members of one job."""
        by_id = {report.role_id: report for report in reports}
        await self._change(job_id, lambda job: jobs.observe(job, node, incarnation, by_id, time.time()))

    async def change(self, job_id: str, transition: Callable[[Job], Job]) -> Job:
        """Applies a transition of `jobs` and stores the result."""
        return await self._change(job_id, transition)

    def _wanted(self, node: str, role_id: str) -> bool:
        job = self._jobs.get(role_id.partition("/")[0])
        if job is None or job.final:
            return False
        return any(member.node == node and job.role_id(member) == role_id for member in job.members)

    async def _run(self) -> None:
        while True:
            try:
                self._wake.clear()
                await self._step()
            except RedisError as error:
                log.warning("Redis does not answer (%s); trying again", type(error).__name__)
            except Exception:  # task boundary: one bad job must not stop the scheduler
                log.exception("a step of the scheduler failed")
                await asyncio.sleep(_TICK_SECONDS)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_SECONDS):
                    await self._wake.wait()

    async def _step(self) -> None:
        """One round: hear the agents, place what fits, drive what is placed, forget what is old."""
        now = time.monotonic()
        while self._homeless:
            job_id, why = next(iter(self._homeless.items()))
            await self._change(job_id, lambda job, why=why: _abandon(job, why))
            del self._homeless[job_id]
        self._inventory.set_available(self._fleet.available(now))
        for job in [job for job in self._jobs.values() if job.placement is not None and not job.final]:
            await self._reconcile(job, now)
        await self._place_pending()
        for job in list(self._jobs.values()):
            if job.placement is not None and not job.final and job.id not in self._drivers:
                self._drivers[job.id] = JobDriver(job.id, self, self._backend, self._driver_done)
        for driver in list(self._drivers.values()):
            driver.nudge()
        await self._forget_old()
        self._metrics.observe(self._jobs.values(), self._inventory, self._fleet, now)

    async def _reconcile(self, job: Job, now: float) -> None:
        for node in sorted({member.node for member in job.members}):
            agent = self._fleet.agent(node)
            if self._fleet.is_lost(node, now):
                cause = f"node {node} is lost: its agent was silent for {self._fleet.silent_seconds(node, now):.0f} s"
                await self._change(job.id, lambda job, n=node, c=cause: jobs.node_lost(job, n, c, time.time()))
            elif agent is not None:
                await self.report(job.id, node, agent.incarnation, agent.reports.values())

    async def _place_pending(self) -> None:
        """First come, first served: the first job that does not fit holds back those behind it."""
        pending = sorted((job for job in self._jobs.values() if job.state == "PENDING"), key=lambda job: job.number)
        for position, job in enumerate(pending):
            placement = self._inventory.place(job.id, job.spec.demand())
            if placement is None:
                await self._wait(pending[position:])
                return
            try:
                await self._change(job.id, lambda job, p=placement: _placed(job, p))
            finally:
                # A job that was cancelled meanwhile, or could not be stored, holds nothing.
                if self._jobs[job.id].placement is None or self._jobs[job.id].final:
                    self._inventory.release(job.id)
            self._metrics.placed(self._jobs[job.id])

    async def _wait(self, queue: list[Job]) -> None:
        short = self._shortage(queue[0])
        assert short is not None, "it did not fit a moment ago"
        await self._change(queue[0].id, lambda job: jobs.waiting(job, self._sentence(short)))
        for job in queue[1:]:
            await self._change(job.id, lambda job: jobs.waiting(job, f"is behind {queue[0].name} in the queue"))

    def _shortage(self, job: Job) -> Shortage | None:
        """What a pending job lacks now; None when it would fit."""
        demand, free = job.spec.demand(), self._inventory.free()
        if self._inventory.fits(demand):
            return None
        return waiting(self._inventory.topology, free, demand, self._inventory.placements)

    def _never_fits(self, job: Job) -> Shortage | None:
        """What a job lacks that was failed because it fits nowhere."""
        topology, demand = self._inventory.topology, job.spec.demand()
        if job.state != "FAILED" or job.placement is not None or impossible(topology, demand) is None:
            return None
        short = shortage(topology, topology.totals, demand)
        return replace(short, capacity=short.available)

    def _sentence(self, short: Shortage) -> str:
        holders = tuple(replace(holder, job=f"jobs/{holder.job}") for holder in short.holders)
        return waiting_sentence(replace(short, holders=holders), self._inventory.absent_nodes)

    async def _change(self, job_id: str, transition: Callable[[Job], Job]) -> Job:
        async with self._writing:
            before = self.get(job_id)
            after = transition(before)
            if after is before or after == before:
                return before
            if _lasting(after) != _lasting(before):
                await self._store.save(after)
            self._jobs[job_id] = after
        if after.sequence != before.sequence:
            for event in after.events:
                if event.sequence > before.sequence:
                    log.info("%s %s", after.name, event.text)
            self._pulses.pop(job_id, asyncio.Event()).set()
            self._metrics.changed(before, after)
        if after.final:
            self._inventory.release(job_id)
            self._wake.set()
        return after

    def _driver_done(self, job_id: str) -> None:
        self._drivers.pop(job_id, None)

    async def _forget_old(self) -> None:
        final = sorted((job for job in self._jobs.values() if job.final), key=lambda job: job.number)
        for job in final[:-_KEPT_FINAL_JOBS]:
            await self._store.forget(job)
            del self._jobs[job.id]


def _lasting(job: Job) -> Job:
    """The job without figures that change at every heartbeat and are not worth a write."""
    return replace(job, members=tuple(replace(member, rss_bytes=0) for member in job.members))


def _placed(job: Job, placement: Placement) -> Job:
    """It may have been cancelled while its place was looked for."""
    return jobs.placed(job, placement, time.time()) if job.state == "PENDING" else job


def _abandon(job: Job, why: str) -> Job:
    """A job whose nodes no longer exist: nobody can stop its members, their agents do it when the lease ends."""
    now = time.time()
    job = jobs.end(job, "FAILED", why, now)
    for member in job.members:
        job = jobs.node_lost(job, member.node, why, now)
    return job
