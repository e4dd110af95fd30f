"""Ladders at work: what ends is taken in, what follows is stored, and only then is it done."""

import asyncio
import logging
import time
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, Self

from redis.exceptions import RedisError

from reflux_kit.errors import CapacityExhausted, InvalidRequest, NotFound, WrongState
from reflux_sandbox.creation import default_deadline
from reflux_sandbox.jobs import Grade, Job
from reflux_sandbox.ladder import metrics
from reflux_sandbox.ladder.advance import News, RunView, Step, advance
from reflux_sandbox.ladder.calibration import is_trusted
from reflux_sandbox.ladder.door import JobDoor, Key, ladder_job_id
from reflux_sandbox.ladder.messages import to_event
from reflux_sandbox.ladder.release import Rung
from reflux_sandbox.ladder.runs import Runs
from reflux_sandbox.ladder.settlement import is_over, settle
from reflux_sandbox.ladder.state import FULL, Event, FullEnd, LadderSpec, LadderState
from reflux_sandbox.ladder.store import Commit, LadderStore, Stored
from reflux_sandbox.leases import stop_tasks
from reflux_sandbox.reader import JobReader

log = logging.getLogger(__name__)

_WORKERS = 4
_SWEEP_SECONDS = 2.0
"""How soon what no stream told is seen: jobs that ended before a restart, versions that made a group stale."""
_QUIET_SECONDS = 30.0
_RETRY_SECONDS = 0.3
_WAIT_MS = 1000
_PRIORITY_STEP = 0.2
"""Relative change of a priority that is worth moving a job for."""
_REFUSALS = (CapacityExhausted, InvalidRequest, NotFound, WrongState)
"""A job cannot be created now: no room, or another set of verifiers after a restart."""


class Ladders:
    """Use as a context manager. Any number of services may share the Redis: each step is stored once."""

    def __init__(self, store: LadderStore, door: JobDoor, ended: JobReader) -> None:
        self._store = store
        self._door = door
        self._ended = ended
        self._runs = Runs(store)
        self._queue: asyncio.Queue[str] = asyncio.Queue()
        self._queued: set[str] = set()
        self._ladder_of: dict[str, str] = {}
        """Job -> ladder, of jobs that have not ended."""
        self._followers: dict[str, asyncio.Task[None]] = {}
        self._wanted: dict[str, float] = {}
        """Run -> loop time at which one of its ladders was open."""
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [self._start(self._work()) for _ in range(_WORKERS)] + [self._start(self._sweep())]
        return self

    async def __aexit__(self, *_: object) -> None:
        await stop_tasks({*self._tasks, *self._followers.values()})

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.create_task(work)

    async def create(self, spec: LadderSpec) -> Stored:
        """Stores a ladder and sets it to work; a known one is returned as it is."""
        await self._follow(spec.run)
        if await self._store.create(spec):
            metrics.CREATED.inc()
        self.touch(spec.ladder_id)
        return await self._store.load(spec.ladder_id)

    async def cancel(self, ladder_id: str) -> bool:
        """Settles a ladder with what is known; False when it was settled before. Raises NotFound."""
        stored = await self._store.load(ladder_id)
        if stored.state.settled:
            return False
        while not stored.state.settled:  # a step that another one overtook has cancelled nothing
            await self._step(stored, cancelled=True)
            stored = await self._store.load(ladder_id)
        self.touch(ladder_id)
        return True

    async def cancel_run(self, run: str, older_than: int) -> int:
        """Settles the ladders of a run, those of versions below `older_than` when it is not 0; returns how many."""
        count = 0
        for ladder_id in await self._store.open_ladders():
            try:
                spec = (await self._store.load(ladder_id)).spec
                if spec.run == run and (not older_than or spec.policy_version < older_than):
                    count += await self.cancel(ladder_id)
            except NotFound:
                continue
        return count

    @property
    def runs(self) -> Runs:
        """Calibration by run."""
        return self._runs

    def touch(self, ladder_id: str) -> None:
        """Something may have happened to a ladder."""
        if ladder_id not in self._queued:
            self._queued.add(ladder_id)
            self._queue.put_nowait(ladder_id)

    async def _work(self) -> None:
        while True:
            ladder_id = await self._queue.get()
            self._queued.discard(ladder_id)
            try:
                await self._advance(ladder_id)
            except RedisError as error:
                log.warning("ladder %s waits for Redis (%s)", ladder_id, type(error).__name__)
                await asyncio.sleep(_RETRY_SECONDS)
                self.touch(ladder_id)
            except Exception:  # task boundary: one ladder must not stop the others; the sweep comes back to it
                log.exception("ladder %s failed", ladder_id)

    async def _advance(self, ladder_id: str) -> None:
        """Steps until nothing more is known."""
        while True:
            try:
                stored = await self._store.load(ladder_id)
            except NotFound:
                return await self._store.close(ladder_id)
            if stored.state.settled:
                await self._cancel_skipped(stored.spec, stored.state)
                return await self._store.close(ladder_id)
            await self._follow(stored.spec.run)
            try:
                goes_on = await self._step(stored, cancelled=False)
            except _REFUSALS as error:
                if time.time() - stored.spec.created <= _patience_seconds(stored.spec):
                    log.info("ladder %s waits for a job that is refused: %s", ladder_id, error)
                    return None
                log.warning("ladder %s is given up, a job of it is refused: %s", ladder_id, error)
                goes_on = await self._step(stored, cancelled=True)
            if not goes_on:
                return None

    async def _step(self, stored: Stored, *, cancelled: bool) -> bool:
        """One step; True when something has changed, so that another one may follow."""
        spec, now = stored.spec, time.time()
        jobs = await self._jobs(spec, stored.state)
        view = await self._view(spec)
        step = advance(spec, stored.state, _news(jobs, cancelled=cancelled), view, now)
        if step.state == stored.state:
            return await self._carry_out(spec, step, jobs)
        commit = await self._commit_of(spec, stored.state, step, view)
        if not await self._store.commit(stored, commit):
            return True
        metrics.tell(step.events, commit.state.settled)
        if commit.state.settled:
            metrics.show(spec.run, await self._runs.get(spec.run))
        await self._carry_out(spec, replace(step, state=commit.state), jobs)
        return True

    async def _view(self, spec: LadderSpec) -> RunView:
        run = await self._runs.get(spec.run)
        declared = self._door.declared_cost_seconds(spec.verifiers["full"])
        return RunView(
            forecaster=run.forecaster,
            trusted=run.row.trusted,
            newest_version=run.row.newest_version,
            cost_seconds=run.row.mean_cost(declared),
            spent_cpu_seconds=run.row.spent(spec.policy_version),
        )

    async def _commit_of(self, spec: LadderSpec, before: LadderState, step: Step, view: RunView) -> Commit:
        """The step with its settlement, when the group is over, and what it changes for the run."""
        state, events, counts = step.state, list[Event](step.events), dict[str, float]()
        if state.released_on is not None and before.released_on is None:
            counts["groups_released"] = 1.0
        spent = sum(state.reserved.values()) - sum(before.reserved.values())
        spent += sum(end.cpu_seconds for kind, end in state.full.items() if kind not in before.full)
        if spec.value.budget_cpu_seconds:
            counts[f"spent:{spec.policy_version}"] = spent
        if not is_over(spec, state):
            return Commit(state=state, events=[to_event(spec, event) for event in events], counts=counts)
        over = settle(spec, state, view)
        if spec.value.budget_cpu_seconds:
            counts[f"spent:{spec.policy_version}"] -= sum(state.reserved.values())
        trusted = None
        if over.records:
            run = await self._runs.with_records(spec.run, over.records)
            trusted = is_trusted(view.trusted, run, spec.trust)
        return Commit(
            state=over.state,
            events=[to_event(spec, event) for event in [*events, over.event]],
            records=over.records,
            counts={**counts, **over.counts},
            trusted=trusted,
        )

    async def _jobs(self, spec: LadderSpec, state: LadderState) -> dict[Key, Job | None]:
        """Jobs that the state waits for; None for one that is not there (yet)."""
        rung = spec.next_rung(state.grades)
        keys: list[Key] = [*sorted(state.open)] if rung is None else [rung]
        found = await self._door.get_many([ladder_job_id(spec, key) for key in keys])
        return dict(zip(keys, found, strict=True))

    async def _carry_out(self, spec: LadderSpec, step: Step, jobs: dict[Key, Job | None]) -> bool:
        """Makes the jobs that are missing, moves those that matter more or less, cancels the skipped ones.

        All of it may be done again. True when a job that was made had ended before: the cache knew its grade.
        """
        wanted: list[tuple[Key, float]] = []
        if step.climb is not None and jobs.get(step.climb) is None:
            wanted.append((step.climb, 0.0))
        for kind in sorted(step.state.open):
            job, priority = jobs.get(kind), step.priorities.get(kind, 0.0)
            if job is None:
                wanted.append((kind, priority))
            elif job.state == "queued" and abs(priority - job.priority) > _PRIORITY_STEP * max(priority, job.priority):
                await self._door.prefer(job.job_id, priority)
        await self._cancel_skipped(spec, step.state)
        if not wanted:
            return False
        created = await self._door.create(spec, wanted)
        self._ladder_of |= {job.job_id: spec.ladder_id for job in created if job.state != "ended"}
        return any(job.state == "ended" for job in created)

    async def _cancel_skipped(self, spec: LadderSpec, state: LadderState) -> None:
        for kind in sorted(state.started & state.skipped.keys()):
            await self._door.cancel(ladder_job_id(spec, kind))

    async def _follow(self, run: str) -> None:
        """Listens to the jobs of a run from now on."""
        self._wanted[run] = asyncio.get_running_loop().time()
        if run not in self._followers:
            position = await self._ended.position(run, "")
            if run not in self._followers:
                self._followers[run] = self._start(self._listen(run, position))

    async def _listen(self, run: str, position: str) -> None:
        # Asked for as well, because redis-py may swallow a cancellation that comes while it reads an answer.
        while self._followers.get(run) is asyncio.current_task():
            try:
                ended, position = await self._ended.ended_since(run, position, _WAIT_MS)
            except RedisError as error:
                log.warning("the jobs of %s are not heard: Redis does not answer (%s)", run, type(error).__name__)
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            for job, _ in ended:
                if (ladder_id := self._ladder_of.pop(job.job_id, None)) is not None:
                    self.touch(ladder_id)

    async def _sweep(self) -> None:
        """Comes back to every open ladder."""
        while True:
            try:
                open_ladders = await self._store.open_ladders()
            except RedisError as error:
                log.warning("ladders are not swept: Redis does not answer (%s)", type(error).__name__)
            else:
                metrics.OPEN.set(len(open_ladders))
                for ladder_id in open_ladders:
                    self.touch(ladder_id)
                self._hush()
            await asyncio.sleep(_SWEEP_SECONDS)

    def _hush(self) -> None:
        """Gives up listening to runs that had no open ladder for a while."""
        now = asyncio.get_running_loop().time()
        for run in [run for run in self._followers if now - self._wanted[run] > _QUIET_SECONDS]:
            self._followers.pop(run).cancel()
            del self._wanted[run]


def _patience_seconds(spec: LadderSpec) -> float:
    """How long after its creation a ladder may wait for a job that is refused: the deadlines of all its rungs."""
    return (spec.deadline_seconds or default_deadline(FULL)) * len(spec.verifiers)


def _news(jobs: dict[Key, Job | None], *, cancelled: bool) -> News:
    rungs: dict[Rung, tuple[Grade, ...]] = {}
    full: dict[int, FullEnd] = {}
    for key, job in jobs.items():
        if job is None or job.state != "ended":
            continue
        if isinstance(key, int):
            full[key] = FullEnd(grade=job.grades[0], cpu_seconds=job.cpu_seconds)
        else:
            rungs[key] = job.grades
    return News(rungs=rungs, full=full, cancelled=cancelled)
