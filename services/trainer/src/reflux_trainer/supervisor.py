"""Owns the running attempts: starts new runs, takes up unfinished ones by itself, ends each with its cause."""

import asyncio
import contextvars
import hashlib
import logging
import time
from dataclasses import replace

import grpc

from reflux.checkpoint.v1 import checkpoint_service_pb2 as checkpoint_pb
from reflux_kit.errors import InvalidRequest, NotFound, WrongState
from reflux_runs.config import RunConfig
from reflux_runs.errors import ConfigError
from reflux_runs.load import load_file
from reflux_runs.preflight import preflight
from reflux_tasks.options import InvalidOption
from reflux_trainer.control import Control
from reflux_trainer.lifecycle import Attempt
from reflux_trainer.metrics import RUNS_ENDED
from reflux_trainer.peers import Peers
from reflux_trainer.problems import catalog
from reflux_trainer.records import RunRecord, State
from reflux_trainer.store import RunStore

log = logging.getLogger(__name__)


class Supervisor:
    """All runs of this trainer. Use it inside `async with`: leaving it stops the attempts, not their runs."""

    def __init__(self, peers: Peers, store: RunStore) -> None:
        self._peers = peers
        self._store = store
        self._attempts: dict[str, asyncio.Task[None]] = {}
        self._controls: dict[str, Control] = {}
        self._cancelled: set[str] = set()

    async def __aenter__(self) -> "Supervisor":
        for record in await self._store.unfinished():
            if record.attempt >= self._peers.settings.max_attempts:
                await self._end(record.run, "FAILED", f"gave up after {record.attempt} attempts: {record.message}")
            else:
                log.info("taking up run %s, attempt %d", record.run, record.attempt + 1)
                self._begin(await self._store.update(record.run, _again))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._attempts.values():
            task.cancel()
        await asyncio.gather(*self._attempts.values(), return_exceptions=True)

    async def create(self, config: RunConfig, request_id: str) -> RunRecord:
        """Checks a configuration and starts its run; the same `request_id` gives the same run. Raises ConfigError."""
        await self._check(config)
        run = f"{config.name}-{hashlib.blake2b(request_id.encode(), digest_size=4).hexdigest()}"
        return await self._create(run, config)

    async def resume(self, run: str, config: RunConfig | None = None) -> RunRecord:
        """Continues a paused, failed or cancelled run, or one that only its checkpoints remember.

        Raises NotFound, WrongState or ConfigError.
        """
        try:
            record = await self._store.get(run)
        except NotFound:
            return await self._resume_forgotten(run, config)
        if not record.ended:
            return await self.unpause(run)
        config = config or record.config
        _check_continues(record.config, config)
        await self._check(config)
        if run in self._attempts:
            await asyncio.wait([self._attempts[run]])
        record = await self._store.update(
            run, lambda found: replace(_again(found), config=config, job="", attempt=found.attempt + 1)
        )
        self._begin(record)
        return record

    async def pause(self, run: str) -> RunRecord:
        """Closes the gate of a run that is under way. Raises WrongState."""

        def change(record: RunRecord) -> RunRecord:
            if record.state not in ("WARMING_UP", "RUNNING"):
                raise WrongState(f"run {run} is {record.shown_state}: only a running one can be paused")
            return replace(record, paused=True)

        record = await self._store.update(run, change)
        if run in self._controls:
            self._controls[run].pause()
        return record

    async def unpause(self, run: str) -> RunRecord:
        """Opens the gate again. Raises WrongState."""

        def change(record: RunRecord) -> RunRecord:
            if not record.paused:
                raise WrongState(f"run {run} is {record.shown_state}: there is nothing to resume")
            return replace(record, paused=False)

        record = await self._store.update(run, change)
        if run in self._controls:
            self._controls[run].resume()
        return record

    async def cancel(self, run: str) -> RunRecord:
        """Ends a run and waits until its processes are told. Raises WrongState when it has ended."""
        record = await self._store.get(run)
        if record.ended:
            raise WrongState(f"run {run} is {record.shown_state} already")
        task = self._attempts.get(run)
        if task is None:
            return await self._end(run, "CANCELLED", "cancelled on request")
        self._cancelled.add(run)
        task.cancel()
        await asyncio.wait([task])
        return await self._store.get(run)

    async def _check(self, config: RunConfig) -> None:
        try:
            known = await asyncio.to_thread(catalog, config, self._peers.settings.cache_folder)
        except InvalidOption as error:
            raise InvalidRequest(f"task {config.task.name}: {error}", field=f"task.{error.key}") from None
        log.info("preflight of %s: %s", config.name, "; ".join(preflight(config, known).lines()))

    async def _create(self, run: str, config: RunConfig, attempt: int = 1) -> RunRecord:
        folder = self._peers.settings.runs_folder.resolve() / run
        record = await self._store.create(
            RunRecord(run=run, config=config, created_at=time.time(), folder=str(folder), attempt=attempt)
        )
        if not record.ended and run not in self._attempts:
            self._begin(record)
        return record

    async def _resume_forgotten(self, run: str, config: RunConfig | None) -> RunRecord:
        folder = self._peers.settings.runs_folder / run
        if config is None:
            if not (folder / "config.toml").is_file():
                raise NotFound(f"there is no run {run!r}, neither in Redis nor in {folder.parent}")
            config = load_file(folder / "config.toml")
        await self._check(config)
        # Above the attempt that wrote the checkpoint, or the catalog would fence this one.
        return await self._create(run, config, attempt=await self._checkpointed_attempt(run) + 1)

    async def _checkpointed_attempt(self, run: str) -> int:
        request = checkpoint_pb.GetLatestCheckpointRequest(run=run)
        try:
            return (await self._peers.checkpoint.GetLatestCheckpoint(request, timeout=30.0)).checkpoint.attempt
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                raise
            raise NotFound(f"run {run!r} is not in Redis and has no committed checkpoint to resume from") from None

    def _begin(self, record: RunRecord) -> None:
        control = self._controls[record.run] = Control()
        if record.paused:
            control.pause()
        # An empty context: the deadline and the trace of the call that started the run are not the run's.
        self._attempts[record.run] = asyncio.create_task(
            self._attempt(record, control), name=f"run {record.run}", context=contextvars.Context()
        )

    async def _attempt(self, record: RunRecord, control: Control) -> None:
        run = record.run

        async def on_state(state: State) -> None:
            await self._store.update(run, lambda found: found.to(state) if found.state != state else found)

        async def on_job(job: str) -> None:
            await self._store.update(run, lambda found: replace(found, job=job))

        attempt = Attempt(record, self._peers, control, on_state, on_job)
        state, message = "SUCCEEDED", ""
        try:
            await attempt.run()
        except asyncio.CancelledError:
            if run not in self._cancelled:
                raise  # the trainer stops; the run goes on when it is back
            state, message = "CANCELLED", "cancelled on request"
        except Exception as error:  # task boundary: the run ends with its cause
            state, message = "FAILED", cause_of(error)
            log.error("run %s failed: %s", run, message, exc_info=error)
        await self._close(attempt, run, state, message)  # type: ignore[arg-type]

    async def _close(self, attempt: Attempt, run: str, state: State, message: str) -> None:
        if attempt.processes is not None:
            await attempt.processes.cancel()
        self._peers.learners.forget(run)
        ended = await self._preview(run, state, message)
        attempt.write_summary(ended, await self._store.step(run))
        await self._end(run, state, message)
        self._cancelled.discard(run)
        self._attempts.pop(run, None)
        self._controls.pop(run, None)

    async def _preview(self, run: str, state: State, message: str) -> RunRecord:
        # The summary is there before watchers hear of the end, because that is when they read it.
        return (await self._store.get(run)).to(state, message=message, now=time.time())

    async def _end(self, run: str, state: State, message: str) -> RunRecord:
        now = time.time()
        record = await self._store.update(run, lambda found: found.to(state, message=message, now=now))
        RUNS_ENDED.labels(state=state).inc()
        log.info("run %s %s %s", run, state, message)
        return record


_FIXED = ("seed", "task", "model", "warmup")
_FIXED_RL = ("groups_per_step", "samples_per_group", "max_lag", "verifier")


def _check_continues(old: RunConfig, new: RunConfig) -> None:
    """A resumed run keeps its data and its counts; rates, limits and the number of steps may change."""
    changed = [name for name in _FIXED if getattr(old, name) != getattr(new, name)]
    changed += [f"rl.{name}" for name in _FIXED_RL if getattr(old.rl, name) != getattr(new.rl, name)]
    if changed:
        raise InvalidRequest(
            f"a resumed run keeps {', '.join(changed)}: resume without a run file, or start a new run", field=changed[0]
        )


def _again(record: RunRecord) -> RunRecord:
    if record.ended:
        return replace(record.to("PENDING"), paused=False)
    return replace(record.to("PENDING"), attempt=record.attempt + 1)


def cause_of(error: BaseException) -> str:
    """One line for people: the first cause inside task groups, with its kind when the text alone would not tell."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, ConfigError):
        return str(error)
    return f"{type(error).__name__}: {str(error) or 'no text'}".replace("\n", "; ")
