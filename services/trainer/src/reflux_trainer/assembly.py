"""Puts one attempt's parts together: folder, task, queue, learner, fleet, and where the loop goes on."""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from reflux_runs.preflight import preflight
from reflux_tasks.task import Task
from reflux_trainer import folder
from reflux_trainer.backlog import Backlog, closing_of, closing_without_groups
from reflux_trainer.checkpointing import Checkpoints, from_message
from reflux_trainer.clients.generation import Generator
from reflux_trainer.clients.verification import Verifications, open_verifications
from reflux_trainer.codec import Codec
from reflux_trainer.consume import BatchFormer
from reflux_trainer.control import Control
from reflux_trainer.curriculum import PassRates
from reflux_trainer.evaluate import Evaluator
from reflux_trainer.figures import known_rates
from reflux_trainer.in_flight import InFlight
from reflux_trainer.issue import Issuer, Questions
from reflux_trainer.journal import Journal
from reflux_trainer.late.opening import check_rungs, open_late_rewards
from reflux_trainer.learner_client import LearnerClient
from reflux_trainer.milestones import Milestones
from reflux_trainer.model_source import ModelSource
from reflux_trainer.parts import Parts
from reflux_trainer.peers import Peers
from reflux_trainer.problems import catalog, chosen_problem, evaluation_tasks, fingerprint, question
from reflux_trainer.prompt_length import with_prompt
from reflux_trainer.publish import Probe, Publisher
from reflux_trainer.queue.groups import GroupQueue
from reflux_trainer.queue.ledger import Cursor, Ledger
from reflux_trainer.records import RunRecord
from reflux_trainer.shared import served_model
from reflux_trainer.staleness.registry import POLICIES
from reflux_trainer.watchdog import Waits
from reflux_trainer.window import Window

log = logging.getLogger(__name__)


class Assembly:
    """What `prepare` finds is used by `assemble`; both belong to one attempt."""

    def __init__(
        self,
        record: RunRecord,
        peers: Peers,
        waits: Waits,
        control: Control,
        warn: Callable[[str], Awaitable[None]],
        milestones: Milestones,
    ) -> None:
        self._record = record
        self._milestones = milestones
        self._peers = peers
        self._waits = waits
        self._control = control
        self._warn = warn
        self._folder = Path(record.folder)
        self._journal = Journal(peers.redis, record.run, self._folder)
        self._ledger = Ledger(peers.redis, record.run, record.attempt)
        self._queue = GroupQueue(peers.redis, record.run, record.attempt)
        self._tasks: dict[str, Task[Any]] = {}
        self._fingerprint = ""
        self.model = self._folder
        self.cursor = Cursor()

    async def prepare(self) -> None:
        """Run folder, task, cursor. Raises ConfigError, DatasetChanged, CheckpointsAway or Fenced."""
        await asyncio.to_thread(self._prepare_files)
        first = Cursor()
        known = self._record.forked_from or self._record.config.checkpoint.every_steps
        if await self._ledger.cursor() == Cursor() and known:
            latest = await self._checkpoints().latest_readable()
            if latest is not None:
                log.info("%s goes on from %s", self._record.run, latest.name)
                first = from_message(latest.cursor)
        self.cursor = await self._ledger.begin(first)

    def _prepare_files(self) -> None:
        config = self._record.config
        self._tasks = evaluation_tasks(config, self._peers.settings.cache_folder)
        task = next(iter(self._tasks.values()))
        preflight(config, with_prompt(catalog(config, self._peers.settings.cache_folder), config, task))
        check_rungs(config, task)
        self.model = folder.prepare(config, self._folder, task)
        self._fingerprint = fingerprint(config, task)

    def _checkpoints(self) -> Checkpoints:
        return Checkpoints(
            self._peers.checkpoint,
            self._ledger,
            self._waits,
            run=self._record.run,
            attempt=self._record.attempt,
            fingerprint=self._fingerprint,
            warn=self._warn,
            origin=self._record.forked_from,
        )

    @asynccontextmanager
    async def assemble(
        self, tasks: asyncio.TaskGroup, on_commit: Callable[[], Coroutine[Any, Any, None]]
    ) -> AsyncIterator[Parts]:
        """Yields the parts; background work runs in `tasks`, `on_commit` after every checkpoint."""
        record, rl = self._record, self._record.config.rl
        async with AsyncExitStack() as stack:
            codec, checkpoints = Codec.of_run(record.config, self.model), self._checkpoints()
            learner = self._learner(checkpoints)
            stack.push_async_callback(learner.close)
            checkpoints.attach(learner, tasks, self.cursor.trimmed_op_id, on_commit)
            window, backlog = await self._window_and_backlog()
            adaptive = rl.in_flight == "adaptive"
            in_flight = InFlight(groups_per_step=rl.groups_per_step, most=window.capacity) if adaptive else None
            pass_rates = PassRates(known_rates(self.events())) if rl.curriculum == "pass_rate" else None
            choose = partial(chosen_problem, self._task, pass_rates, record.config.seed)
            questions = Questions(self._task, codec, ahead=2 * rl.groups_per_step, choose=choose)
            issuer = Issuer(record.run, self._queue, window, backlog, questions, self.cursor.next_prompt_index)
            late = open_late_rewards(record.config, self._peers.redis, self._peers.ladders, record.run)
            verifications = await stack.enter_async_context(open_verifications(self._peers.sandbox, record.run))
            yield Parts(
                run=record.run,
                config=record.config,
                folder=self._folder,
                task=self._task,
                codec=codec,
                ledger=self._ledger,
                queue=self._queue,
                learner=learner,
                publisher=self._publisher(learner, codec, tasks),
                checkpoints=checkpoints,
                evaluator=self._evaluator(codec, verifications, tasks),
                journal=self._journal,
                waits=self._waits,
                control=self._control,
                window=window,
                in_flight=in_flight,
                pass_rates=pass_rates,
                issuer=issuer,
                batches=BatchFormer(self._queue, backlog, window, issuer, self._waits, rl.groups_per_step),
                milestones=self._milestones,
                late=await stack.enter_async_context(late),
            )

    @property
    def _task(self) -> Task[Any]:
        return next(iter(self._tasks.values()))

    def _learner(self, checkpoints: Checkpoints) -> LearnerClient:
        record, config, peers = self._record, self._record.config, self._peers
        fleet = config.fleet
        source = ModelSource(
            model_id=record.run,
            folder=str(self.model.resolve()),
            seed=config.seed,
            transport=fleet.transport,
            weight_dtype=fleet.weight_dtype,
            weight_delta=fleet.weight_delta,
            compute_dtype=config.model.compute_dtype,
            gradient_checkpointing=config.model.gradient_checkpointing,
            deterministic=config.deterministic,
            factors=bool(fleet.shared),
            lora_rank=config.model.lora_rank,
            lora_targets=frozenset(config.model.lora_targets.split("+")),
        )
        return LearnerClient(
            source,
            peers.settings,
            peers.learners,
            self._ledger,
            self._waits,
            checkpoints.latest,
            checkpoints.scrub,
        )

    def _publisher(self, learner: LearnerClient, codec: Codec, tasks: asyncio.TaskGroup) -> Publisher:
        fleet, probe = self._record.config.fleet, Probe()
        if fleet.probe_every:
            probe = Probe(fleet.probe_every, tuple(codec.prompt_ids(question(self._task, "train", 0))))
        served, timeout = served_model(self._record.run, self._record.config), fleet.sync_timeout_seconds
        return Publisher(learner, self._peers.broker, tasks, self._waits, served, timeout, probe)

    def _evaluator(self, codec: Codec, verifications: Verifications, tasks: asyncio.TaskGroup) -> Evaluator:
        run, config = self._record.run, self._record.config
        stops = [] if codec.end_id is None else [codec.end_id]
        served = served_model(run, config)
        generator = Generator(self._peers.gateway, served, max_tokens=config.rl.max_tokens, stop_token_ids=stops)
        return Evaluator(run, config, self._tasks, codec, generator, verifications, self._journal, self._waits, tasks)

    async def _window_and_backlog(self) -> tuple[Window, Backlog]:
        """Window and backlog as the queue says: what earlier attempts left open stays open."""
        rl, cursor = self._record.config.rl, self.cursor
        policy = POLICIES[rl.staleness](groups_per_step=rl.groups_per_step, max_lag=rl.max_lag)
        window = Window(
            capacity=math.ceil(policy.max_open * rl.oversampling),
            groups_per_step=rl.groups_per_step,
            steps_left=rl.steps - cursor.step,
            oversampling=rl.oversampling,
        )
        opened = await self._queue.opened()
        window.issued(len(opened))
        closing = closing_without_groups if rl.algorithm in ("reinforce_pp", "gae") else closing_of
        return window, Backlog(policy, next_index=cursor.next_prompt_index, opened=opened, closing=closing)

    async def worker_beats(self) -> dict[str, int]:
        """Heartbeats of the rollout workers."""
        return await self._queue.worker_beats()

    async def forget_workers(self, names: Sequence[str]) -> None:
        """Drops the heartbeats of workers that are gone for long."""
        await self._queue.forget_workers(names)

    def evaluated(self, step: int) -> bool:
        """True when the evaluation behind `step` was written by an earlier attempt."""
        return any(event["stage"] == "evaluation" and event["step"] == step for event in self._journal.events())

    def events(self) -> list[dict[str, Any]]:
        """All events of the run so far."""
        return self._journal.events()
