"""Owns the cycle: shows the policy the world, and turns what it decides into changes of jobs."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from reflux_placement.errors import Occupied
from reflux_placement.gang import Assignment
from reflux_placement.policy.config import PolicyConfig
from reflux_placement.policy.cycle import DEFAULT_CONFIG, decide
from reflux_placement.policy.view import (
    Action,
    Decision,
    Live,
    Migrate,
    Preempt,
    Queue,
    Replace,
    Requeue,
    Resize,
    Start,
    View,
    Wait,
)
from reflux_placement.room import Room
from reflux_scheduler import jobs
from reflux_scheduler.book import Book
from reflux_scheduler.claims import Claims
from reflux_scheduler.job import Job, Part, Placement
from reflux_scheduler.ledger import Ledger, planned_placement, renumbered
from reflux_scheduler.metrics import Metrics
from reflux_scheduler.nodes import Nodes
from reflux_scheduler.view import ask_of, live_of, takes_long

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How the cycle decides: the queues and the policy's knobs."""

    queues: Mapping[str, Queue]
    config: PolicyConfig = DEFAULT_CONFIG
    move_loss_seconds: float = 600.0
    """A job may be moved (migration, leaving a draining node) for this long after its checkpoint: it loses at most that
    much work. A job with rarer checkpoints moves right after one."""

    node_drain_seconds: float = 3600.0
    """What has not left a draining node after this long leaves it all the same; 0 is at once."""

    grant_seconds: float = 3600.0
    """Room that the cluster does not give within this time is given up, and the job placed anew."""

    shared_agents: bool = True
    """Rooms need no asking (backend `local`); elsewhere a gang gives back whole grants, and never its first one."""


class Planner:
    """One cycle after the other; holds nothing but why jobs wait, and room that is kept for jobs."""

    def __init__(
        self, book: Book, ledger: Ledger, nodes: Nodes, rules: Rules, claims: Claims, metrics: Metrics
    ) -> None:
        self._book = book
        self._ledger = ledger
        self._nodes = nodes
        self._rules = rules
        self._claims = claims
        self._metrics = metrics
        self._lives: dict[str, Live] = {}
        self._unsettled: set[str] = set()
        """Live jobs whose view depends on the time."""

        self._stale: set[str] = set()
        self._thought_seconds = 0.0
        self.broken: set[str] = set()
        """Jobs with lost members, that the policy has to do something about."""

        self.waits: dict[str, Wait] = {}
        """Why pending jobs wait, as of the last cycle."""

    def room(self) -> Room:
        """The plan without what others hold on the nodes: a copy."""
        return self._nodes.without_foreign(self._ledger.room)

    def view(self, now: float) -> View:
        """What the policy looks at, with a room of its own."""
        everything = self._book.jobs.values()
        pending = sorted((job for job in everything if job.state == "PENDING"), key=lambda job: job.number)
        self._refresh_lives(now)
        return View(
            room=self.room(),
            pending=[ask_of(job, job.spec.demand()) for job in pending],
            live=dict(self._lives),
            queues=self._rules.queues,
            nodes=self._nodes.for_policy(now, self._rules.node_drain_seconds),
            spares=self._nodes.spares,
            claims=self._claims.current(self._ledger.topology),
            now=now,
        )

    async def cycle(self) -> bool:
        """Decides and carries out; whether room was taken away, so that another cycle may give it to somebody.

        Raises RedisError or NotLeading; what was carried out until then stays.
        """
        was_open_N = self._ledger.room.open_N
        self._nodes.apply(self._ledger.room)
        if (self._ledger.room.open_N & ~was_open_N).any():
            self._metrics.room_came(time.time())
        view = self.view(time.time())
        places = dict(self._ledger.planned)
        began = time.monotonic()
        if takes_long(view, self._rules.config, self._thought_seconds):
            decision = await asyncio.to_thread(decide, view, self._rules.config)
        else:
            decision = decide(view, self._rules.config)
        self._thought_seconds = time.monotonic() - began
        self._metrics.decided(self._thought_seconds)
        await self._claims.store(decision.claims)
        for action in decision.actions:
            try:
                await self._carry_out(action, places)
            except Occupied as error:
                # Something was given back or taken while the policy was thinking: the next cycle sees it.
                log.info("%s is not carried out: %s", type(action).__name__, error)
        await self._leave_lost()
        await self._say_waits(decision)
        return any(not isinstance(action, Start) for action in decision.actions)

    async def _carry_out(self, action: Action, places: Mapping[str, Placement]) -> None:
        """One action, unless its job has changed since the policy looked."""
        match action:
            case Start():
                await self._start(action)
            case Preempt():
                if all(self._same(job, places) for job in action.victims):
                    await self._preempt(action)
            case Resize() if self._same(action.job, places):
                await self._move(action.job, action.assignment, "resized", action.why)
            case Replace() if self._same(action.job, places):
                await self._move(action.job, action.assignment, "replaced", action.why)
            case Requeue() if self._same(action.job, places):
                await self._requeue(action.job, action.why)
            case Migrate() if all(self._same(job, places) for job, _ in action.moves):
                await self._migrate(action)
            case _:
                log.info("%s came too late: its job has changed", type(action).__name__)

    def _same(self, name: str, places: Mapping[str, Placement]) -> bool:
        job = self._book.jobs.get(_id(name))
        return job is not None and job.ending is None and job.placement is places.get(name)

    async def _start(self, action: Start) -> None:
        job = self._book.jobs.get(_id(action.job))
        if job is None or job.state != "PENDING":
            return

        def place(job: Job, placement: Placement) -> Job:
            if job.state != "PENDING":
                return job
            return jobs.placed(self._with_parts(job, placement), placement, time.time(), action.why)

        job = await self._book_and_change(job, action.assignment, place)
        if job.placement is not None:
            self.waits.pop(job.name, None)
            self._metrics.placed(job, backfilled=action.backfilled)

    async def _preempt(self, action: Preempt) -> None:
        cause, by = f"preempted for {action.beneficiary}: {action.why}", action.beneficiary
        now = time.time()
        await self._book.change_all(
            {_id(victim): lambda job: jobs.requeue(job, cause, now, preempted_by=by) for victim in action.victims}
        )
        self._metrics.preempted(len(action.victims), action.lost_seconds)

    async def _requeue(self, name: str, why: str) -> None:
        await self._book.change(_id(name), lambda job: jobs.requeue(job, why, time.time()))

    async def _move(self, name: str, assignment: Assignment, kind: str, why: str) -> None:
        job = self._book.get(_id(name))
        if job.state == "PLACED":
            # Nothing runs yet; the cluster was asked for other nodes.
            await self._requeue(name, why)
            return

        def move(job: Job, placement: Placement) -> Job:
            if job.final or job.ending is not None:
                return job
            return jobs.moved(self._with_parts(job, placement), placement, kind, why, time.time())

        await self._book_and_change(job, assignment, move)

    async def _migrate(self, action: Migrate) -> None:
        """All movers leave the plan before the first takes its new place: they may swap places."""
        moving = [self._book.get(_id(name)) for name, _ in action.moves]
        cause = f"migrates so that {action.beneficiary} fits: {action.why}"
        now = time.time()

        def counted(job: Job) -> Job:
            return job if self._rules.shared_agents else replace(job, next_part=job.next_part + 1)

        try:
            for job in moving:
                self._ledger.room.release(job.name)
            places = {
                job.id: renumbered(self._ledger.take(job, assignment, job.next_part), job.next_part)
                for job, (_, assignment) in zip(moving, action.moves, strict=True)
            }
            await self._book.change_all(
                {job.id: lambda job: jobs.requeue(counted(job), cause, now, then=places[job.id]) for job in moving}
            )
        finally:
            for job in moving:
                if self._book.get(job.id).next_placement is None:
                    self._ledger.room.release(job.name)
            for job in moving:
                if self._book.get(job.id).next_placement is None:
                    self._ledger.undo(self._book.get(job.id))

    async def _book_and_change(
        self, job: Job, assignment: Assignment, transition: Callable[[Job, Placement], Job]
    ) -> Job:
        """Books first, stores then; a change that is not stored, or not wanted any more, leaves the plan as it was."""
        placement = self._ledger.take(job, assignment, job.next_part)
        try:
            return await self._book.change(job.id, lambda job: transition(job, placement))
        finally:
            if planned_placement(self._book.get(job.id)) is not placement:
                self._ledger.undo(self._book.get(job.id))

    def _with_parts(self, job: Job, placement: Placement) -> Job:
        """The job with the grants that it has to ask for at new places, where rooms have to be asked for."""
        if self._rules.shared_agents:
            return job
        new = sorted({part for places in placement.roles for part in places.parts if part >= job.next_part})
        parts = (*job.parts, *map(Part, new))
        return replace(job, parts=parts, next_part=max(new, default=job.next_part - 1) + 1)

    async def _leave_lost(self) -> None:
        """A gang with lost members that the policy did nothing about goes back into the queue: it holds room and does
        nothing."""
        broken, self.broken = self.broken, set()
        for job_id in broken:
            job = self._book.jobs.get(job_id)
            if job is not None and job.ending is None and job.placement is not None and not job.final:
                lost = [status for status in job.members.values() if status.state == "lost"]
                if lost:
                    self.broken.add(job_id)
                    await self._requeue(job.name, f"{lost[0].label} was lost: {lost[0].message}")

    async def _say_waits(self, decision: Decision) -> None:
        self.waits = dict(decision.waits)
        self._metrics.waiting(self.waits, time.time())
        absent = self._nodes.absent()
        for name, wait in decision.waits.items():
            job = self._book.jobs.get(_id(name))
            text = f"waits: {wait.sentence}{absent}"
            if job is not None and job.state == "PENDING" and wait.sentence and job.message != text:
                await self._book.change(job.id, lambda job, text=text: _waits(job, text))

    def changed(self, job_id: str) -> None:
        """A job has changed: the policy has to see it anew."""
        self._stale.add(job_id)

    def _refresh_lives(self, now: float) -> None:
        """Brings up to date how the policy sees placed jobs: those that changed, and those for which time matters."""
        stale, self._stale = self._stale | self._unsettled, set()
        self._unsettled = set()
        for job_id in stale:
            job = self._book.jobs.get(job_id)
            name = f"jobs/{job_id}"
            if job is None or name not in self._ledger.room.holdings:
                self._lives.pop(name, None)
                continue
            live = self._lives[name] = live_of(
                job, now, in_parts=not self._rules.shared_agents, move_loss_seconds=self._rules.move_loss_seconds
            )
            if live.movable or job.ending is not None or now < job.grow_after:
                self._unsettled.add(job_id)


def _id(name: str) -> str:
    return name.removeprefix("jobs/")


def _waits(job: Job, text: str) -> Job:
    return jobs.waiting(job, text) if job.state == "PENDING" else job
