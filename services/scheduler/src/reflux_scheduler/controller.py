"""Owns the reign of one leader: takes over what is stored, hears agents and cluster, lets the policy decide, drives."""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Mapping
from dataclasses import replace

from redis.exceptions import RedisError

from reflux_placement.policy.view import Queue
from reflux_placement.topology import Topology
from reflux_scheduler import jobs, sightings
from reflux_scheduler.book import Book
from reflux_scheduler.claims import Claims
from reflux_scheduler.crew import Crew
from reflux_scheduler.driver import Tools
from reflux_scheduler.drivers import Drivers
from reflux_scheduler.errors import NotLeading
from reflux_scheduler.fleet import Fleet, Post
from reflux_scheduler.grants import Grants
from reflux_scheduler.job import Heard, Job
from reflux_scheduler.ledger import Ledger
from reflux_scheduler.metrics import Metrics
from reflux_scheduler.nodes import Nodes
from reflux_scheduler.planner import Planner, Rules
from reflux_scheduler.shapes import Shapes
from reflux_scheduler.spec import JobSpec
from reflux_scheduler.store import Store
from reflux_scheduler.watch import Watch

log = logging.getLogger(__name__)

_TICK_SECONDS = 1.0
_OBSERVE_SECONDS = 2.0
_MANY_NODES = 500
"""Of more nodes than this not every agent that comes makes a look at all of them; the next tick does."""

_CYCLE_SECONDS = 2.0
"""How often the policy looks anew when only time has passed (reservations, minimum run times, damping)."""


class Controller:
    """One per reign: what it knows comes from the store, and ends with the lease."""

    def __init__(
        self,
        store: Store,
        ledger: Ledger,
        nodes: Nodes,
        fleet: Fleet,
        crew: Crew,
        grants: Grants,
        rules: Rules,
        metrics: Metrics,
        start_seconds: float,
    ) -> None:
        self.topology: Topology = ledger.topology
        self.ledger = ledger
        self.nodes = nodes
        self.fleet = fleet
        self.grants = grants
        self.rules = rules
        self._store = store
        self._metrics = metrics
        self._wake = asyncio.Event()
        self._due = True
        self._cycled_at = 0.0
        self._began = time.monotonic()
        self._ticked_at = 0.0
        self._observed_at = 0.0
        self._registrations = -1
        self.book = Book(store, ledger, metrics, self._job_changed)
        self._claims = Claims(store, ledger.topology)
        self.planner = Planner(self.book, ledger, nodes, rules, self._claims, metrics)
        self.watch = Watch(self.book, nodes, fleet, grants)
        self.shapes = Shapes(ledger.topology)
        self._drivers = Drivers(
            Tools(self.book, ledger, fleet, crew, grants, start_seconds, rules.grant_seconds, self.watch.blame),
            self.wake_policy,
        )

    async def load(self) -> None:
        """Reads what the last scheduler knew; writes nothing. The lease is renewed meanwhile."""
        self.nodes.restore(await self._store.drains(), await self._store.health())
        await self.book.load()
        await self._claims.load()
        self._drivers.add(self.book.jobs)
        for job in list(self.book.jobs.values()):
            await asyncio.sleep(0)
            self.planner.changed(job.id)
            if any(status.state == "lost" for status in job.members.values()):
                self.planner.broken.add(job.id)
            if job.state == "PENDING":
                misfit = await self.shapes.misfit(job.spec.demand())
                if misfit is not None:
                    self.book.homeless[job.id] = f"the topology has changed: {misfit.sentence}"

    async def run(self) -> None:
        """Drives all jobs until it is cancelled or the lease is lost (NotLeading); members keep running."""
        polling = None
        if not self.grants.shared_agents:
            polling = asyncio.create_task(self.grants.poll(self._wanted_grants), name="poll cluster")
        try:
            while True:
                if polling is not None and polling.done():
                    await polling  # Raises NotLeading.
                await self._round()
                # Watchers first: a round that finds the flag set does not give way by itself.
                await asyncio.sleep(0)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_TICK_SECONDS):
                        await self._wake.wait()
        finally:
            if polling is not None:
                polling.cancel()
                await asyncio.gather(polling, return_exceptions=True)
            await self._drivers.close()
            await self.book.close()

    async def create(self, spec: JobSpec, request_id: str) -> Job:
        """Accepts a job; one that can never fit is FAILED at once. A request id that was seen gets its job again.

        Raises InvalidGang when the description contradicts itself, UnknownLevel for a level that does not exist.
        """
        demand = spec.demand()
        demand.check_levels(self.topology)
        misfit = await self.shapes.misfit(demand)

        def make(number: int) -> Job:
            now = time.time()
            job = Job(uuid.uuid4().hex[:12], number, spec, now, message="queued", queued_at=now)
            return jobs.end(job, "FAILED", misfit.sentence, now) if misfit is not None else job

        job = await self.book.create(request_id, make)
        log.info("accepted %s (%s): %s", job.name, spec.display_name, job.message)
        self.wake_policy()
        return job

    async def cancel(self, job_id: str) -> Job:
        """Begins the end of a job; a finished one stays as it is. Raises UnknownJob."""
        return await self.book.change(
            job_id, lambda job: jobs.end(job, "CANCELLED", "cancelled on request", time.time())
        )

    async def saved(self, job_id: str) -> Job:
        """Notes that a job has a checkpoint at hand. Raises UnknownJob."""
        now = time.time()
        return await self.book.change(
            job_id, lambda job: job if job.final else replace(job, saved_at=max(now, job.saved_at))
        )

    async def drain(self, node: str, why: str | None) -> None:
        """Drains a node, or opens it again (None)."""
        await self.book.units.run(self._drain(node, why))

    async def _drain(self, node: str, why: str | None) -> None:
        await self._store.set_drain(node, why)
        if why is None:
            self.nodes.drains.pop(node, None)
        else:
            self.nodes.drains[node] = why
        self.watch.look()
        self.wake_policy()

    @property
    def queues(self) -> Mapping[str, Queue]:
        """Queues by name, as configured."""
        return self.rules.queues

    def wake(self) -> None:
        """Something was heard."""
        self._wake.set()

    def wake_policy(self) -> None:
        """Something changed that the policy looks at."""
        self._due = True
        self._wake.set()

    def _job_changed(self, before: Job, after: Job) -> None:
        """A job changed: its driver looks at it, others where it has left room of theirs, and the policy when room was
        given back or asked for."""
        self.planner.changed(after.id)
        self._drivers.changed(before, after)
        back = after.state != before.state and (after.final or after.state == "PENDING")
        if back or after.saved_at != before.saved_at:
            self.wake_policy()

    def heard_grants(self, grant_ids: frozenset[str]) -> None:
        """The cluster said something new of these grants, or of its nodes."""
        self._drivers.nudge(grant_id.rpartition("-")[0] for grant_id in grant_ids)
        self.wake()

    def registered(self, post: Post) -> list[str]:
        """After an agent came: its members that nobody wants."""
        self._drivers.nudge([post[1].rpartition("-")[0]] if post[1] else None)
        return self.heard(post)

    def heard(self, post: Post) -> list[str]:
        """After an agent spoke: the ids of its members that nobody wants. The reports are applied soon after."""
        self.wake()
        agent = self.fleet.agent(post)
        return [role_id for role_id in agent.reports if not self.book.wants(post, role_id)] if agent else []

    def _wanted_grants(self) -> frozenset[str]:
        return frozenset(f"{job.id}-{part.number}" for job in self.book.jobs.values() for part in job.parts)

    async def _round(self) -> None:
        try:
            self._wake.clear()
            await self._step()
        except RedisError as error:
            self._due = True
            log.warning("Redis does not answer (%s); trying again", type(error).__name__)
        except NotLeading:
            raise
        except Exception:  # task boundary: one bad job must not stop the scheduler
            self._due = True
            log.exception("a step of the scheduler failed")
            await asyncio.sleep(_TICK_SECONDS)

    async def _step(self) -> None:
        """One round: hear the agents, place what fits, drive what is placed, forget what is old."""
        while self.book.homeless:
            job_id, why = next(iter(self.book.homeless.items()))
            await self.book.change(job_id, lambda job, why=why: _abandon(job, why))
            del self.book.homeless[job_id]
        now = time.monotonic()
        ticked = now - self._ticked_at >= _TICK_SECONDS / 2
        await self._hear()
        came = self.fleet.registrations != self._registrations
        if ticked or (came and self.topology.num_nodes <= _MANY_NODES):
            self._registrations = self.fleet.registrations
            await self._count_lost(now)
            self._due = self.watch.look() or self._due
            await self._store.set_health(self.nodes.unsaved())
        if (self._due or now - self._cycled_at > _CYCLE_SECONDS) and not self._awaits_agents(now):
            self._due = False
            self._cycled_at = now
            self._due = await self.planner.cycle() or self._due
            if self._due:
                self._wake.set()
            await asyncio.sleep(0)  # Who watches a job hears that it has its room before the cluster is asked for it.
            self._drivers.drive()
        if ticked:
            self._ticked_at = now
        if now - self._observed_at >= _OBSERVE_SECONDS:
            self._observed_at = now
            await self.book.settle()
            await self.book.forget_old()
            self.fleet.keep(self._wanted_grants())
            self._metrics.observe(self)

    def _awaits_agents(self, now: float) -> bool:
        """Whether room is promised where agents have not come back yet: on closed nodes the policy keeps no promise."""
        if now - self._began > self.fleet.terms.doubt_seconds or not self._claims.current(self.topology):
            return False
        return any(post not in self.fleet.agents() for post in self.book.posts)

    async def _hear(self) -> None:
        """Applies what agents said since the last round."""
        by_job: dict[str, dict[Post, Heard]] = {}
        for post, heard in self.fleet.fresh().items():
            for job_id in self.book.at(post):
                by_job.setdefault(job_id, {})[post] = heard
        for job_id, words in by_job.items():
            await self.book.change(job_id, lambda job, words=words: sightings.observe(job, words, time.time()))

    async def _count_lost(self, now: float) -> None:
        """Applies what the silence of agents says."""
        for post, why in self.watch.lost_posts(now).items():
            for job_id in self.book.at(post):
                job = self.book.get(job_id)
                if (
                    await self.book.change(job_id, lambda job, post=post, why=why: self._lose(job, post, why))
                    is not job
                ):
                    self.planner.broken.add(job_id)
                    self._due = True

    def _lose(self, job: Job, post: Post, why: str) -> Job:
        job = sightings.node_lost(job, *post, why, time.time())
        if self.topology.num_nodes == 1:
            # There is no other place, and nobody knows whether this one comes back: a person has to decide.
            return jobs.end(job, "FAILED", why, time.time())
        return job


def _abandon(job: Job, why: str) -> Job:
    """A job whose nodes no longer exist: nobody can stop its members, their agents do it when the lease ends."""
    now = time.time()
    job = jobs.end(job, "FAILED", why, now)
    for post in {(seat.node, job.grant_id(seat.part)) for seat in job.placement.seats()} if job.placement else ():
        job = sightings.node_lost(job, *post, why, now)
    return job
