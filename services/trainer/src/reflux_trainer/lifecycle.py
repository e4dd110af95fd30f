"""The life of one attempt of a run, from its folder to its summary; every failure leaves as one exception."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

from reflux_trainer import summary
from reflux_trainer.assembly import Assembly
from reflux_trainer.control import Control
from reflux_trainer.export import export_final
from reflux_trainer.loop import train
from reflux_trainer.memory import MemoryPeak
from reflux_trainer.milestones import Milestones
from reflux_trainer.parts import Parts
from reflux_trainer.peers import Peers
from reflux_trainer.processes import RunProcesses, StartTimedOut
from reflux_trainer.queue.ledger import Audit, Cursor
from reflux_trainer.records import RunRecord, State
from reflux_trainer.warmup import warm_up
from reflux_trainer.watchdog import WORKERS_GONE_SECONDS, Waits, WorkerWatch, watch

log = logging.getLogger(__name__)
QUEUE_KEPT_SECONDS = 7 * 86_400
"""How long the queue of a run that ended well stays in Redis."""


class LedgerBroken(AssertionError):
    """The ledger does not show each prompt trained exactly once: a bug."""


class Attempt:
    """One attempt: owns its processes, its watchers and its summary."""

    def __init__(
        self,
        record: RunRecord,
        peers: Peers,
        control: Control,
        on_state: Callable[[State], Awaitable[None]],
        on_job: Callable[[str], Awaitable[None]],
        on_warning: Callable[[str], Awaitable[None]],
    ) -> None:
        self._record = record
        self._peers = peers
        self._control = control
        self._on_state = on_state
        self._on_job = on_job
        self._waits = Waits()
        self._memory = MemoryPeak(peers.settings.stack_pid)
        self._phases: defaultdict[str, float] = defaultdict(float)
        self._milestones = Milestones()
        self._assembly = Assembly(record, peers, self._waits, control, on_warning, self._milestones)
        self.processes: RunProcesses | None = None
        self._audit: Audit | None = None
        self._failures: Sequence[str] = ()

    async def run(self) -> None:
        """Does everything that is left of the run. Raises what ended it otherwise."""
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks, self._watched(tasks) as helpers:
            with self._phase("start"):
                processes = await self._started()
            helpers.append(tasks.create_task(processes.follow(), name="follow job"))
            helpers.append(tasks.create_task(processes.keep_seats(), name="keep seats"))
            parts = await stack.enter_async_context(self._assembly.assemble(tasks, processes.saved))
            self._failures = parts.checkpoints.failures
            await self._stages(parts, processes)

    async def _started(self) -> RunProcesses:
        with self._waits.on("start", "the task's data, the run's folder and its newest checkpoint"):
            await self._assembly.prepare()
        self._milestones.mark("prepare")
        record = self._record
        processes = RunProcesses(record.run, record.attempt, record.config, self._assembly.model, self._peers)
        self.processes = processes
        with self._waits.on("start", "the scheduler to place the run's job"):
            await self._on_job(await processes.start(record.job))
        self._milestones.mark("place")
        return processes

    async def _stages(self, parts: Parts, processes: RunProcesses) -> None:
        config, cursor = self._record.config, self._assembly.cursor
        with self._phase("start"):
            await self._learner_ready(parts, processes, cursor)
        self._milestones.mark("load")
        if cursor.warmup_step < config.warmup.steps:
            await self._on_state("WARMING_UP")
            with self._phase("warmup"):
                cursor = await warm_up(parts, cursor)
            self._milestones.mark("warmup")
        with self._phase("start"):
            deadline = time.monotonic() + self._peers.settings.start_seconds
            await processes.fleet_ready(self._waits, deadline)
            await self._first_publish(parts)
        self._milestones.mark("fleet")
        if self._record.forked_from and cursor.step == cursor.base_step and parts.publisher.last:
            # Its own from now on: the source's retention may remove the one that it was forked from.
            await parts.checkpoints.start(cursor, parts.learner.version, parts.publisher.last.epoch)
        # Later weights must not pass for those after warm-up.
        if cursor.step == 0 and not self._assembly.evaluated(0):
            with self._phase("evaluation"):
                await parts.evaluator.full(0, parts.issuer.version)
            self._milestones.mark("evaluation")
        await self._on_state("RUNNING")
        with self._phase("rl"):
            cursor = await train(parts, cursor)
        with self._phase("evaluation"):
            await parts.evaluator.full(cursor.step, parts.issuer.version)
            await parts.evaluator.finished()
        await self._export(parts)
        await self._close_ledger(parts)

    async def _export(self, parts: Parts) -> None:
        if not self._record.config.checkpoint.every_steps:
            return
        why = await export_final(parts, self._assembly.model, self._peers.settings.s3_endpoint)
        if why:
            log.warning("the trained model of %s is not exported: %s", parts.run, why)

    async def _learner_ready(self, parts: Parts, processes: RunProcesses, cursor: Cursor) -> None:
        seconds = self._peers.settings.start_seconds
        if self._peers.learners.get(self._record.run) is None:
            with self._waits.on("start", "the learner to announce itself"):
                end = time.monotonic() + seconds
                while self._peers.learners.get(self._record.run) is None:
                    if time.monotonic() > end:
                        raise StartTimedOut(
                            f"the learner did not announce itself within {seconds:.0f} s; {await processes.explain()}"
                        )
                    await self._peers.learners.changed(1.0)
        await parts.learner.restore(cursor.op_id)

    async def _first_publish(self, parts: Parts) -> None:
        async def committed(version: int) -> None:
            parts.issuer.version = version

        parts.publisher.start(committed)
        await parts.publisher.settled()

    async def _close_ledger(self, parts: Parts) -> None:
        self._audit = await parts.ledger.audit(self._record.config.rl.groups_per_step)
        if self._audit.violations:
            raise LedgerBroken("; ".join(self._audit.violations[:5]))
        await parts.ledger.expire(QUEUE_KEPT_SECONDS)

    @asynccontextmanager
    async def _watched(self, tasks: asyncio.TaskGroup) -> AsyncIterator[list[asyncio.Task[None]]]:
        """Watchers of the attempt; any of them may end it with a named cause. Yields the list of what ends with it."""
        limit = self._record.config.rl.no_progress_seconds
        rounds, source = min(WORKERS_GONE_SECONDS, int(limit) + 1), self._assembly
        workers = WorkerWatch(source.worker_beats, source.forget_workers, self._waits, rounds)
        helpers = [
            tasks.create_task(watch(self._waits, limit, workers), name="watchdog"),
            tasks.create_task(self._memory.watch(), name="memory"),
        ]
        yield helpers
        for helper in helpers:
            helper.cancel()

    def write_summary(self, record: RunRecord, steps: int) -> None:
        """summary.json of what is known; `record` is the run in its last state, `steps` what it has done."""
        folder = Path(record.folder)
        if not folder.is_dir():
            return
        self._memory.sample()
        measured = summary.Measured(
            steps=steps,
            wall_seconds=(record.ended_at or time.time()) - record.created_at,
            phase_seconds=dict(self._phases),
            peak_rss_bytes=self._memory.peak_bytes,
            audit=self._audit,
            checkpoint_failures=list(self._failures),
        )
        summary.write(folder, summary.summarize(record, self._assembly.events(), measured))

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self._phases[name] += time.monotonic() - started
