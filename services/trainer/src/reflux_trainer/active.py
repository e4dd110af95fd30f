"""One attempt under way: a task of its own that ends with the end on record, whoever cancels meanwhile."""

import asyncio
import contextvars
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from redis.exceptions import RedisError

from reflux_kit.errors import ServiceError
from reflux_runs.errors import ConfigError
from reflux_trainer.control import Control
from reflux_trainer.late.rewards import cancel_ladders
from reflux_trainer.lifecycle import Attempt
from reflux_trainer.metrics import RUNS_ENDED
from reflux_trainer.peers import Peers
from reflux_trainer.queue.scripts import Fenced
from reflux_trainer.records import RunRecord, State
from reflux_trainer.store import RunStore

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")
_RETRY_SECONDS = 0.5


class ActiveRun:
    """Runs one attempt. `task` is done when the run's end is on record, or when the trainer stops."""

    def __init__(self, record: RunRecord, peers: Peers, store: RunStore) -> None:
        self.record = record
        self.control = Control()
        if record.paused:
            self.control.pause()
        self._peers = peers
        self._store = store
        self._cancelled = False
        self._closing = False
        self._warning = ""
        # An empty context: the deadline and the trace of the call that started the run are not the run's.
        self.task = asyncio.create_task(self._run(), name=f"run {record.run}", context=contextvars.Context())

    def cancel(self) -> None:
        """Ends the run as cancelled. Without effect when it ends already: its end must get on record."""
        if not (self._cancelled or self._closing):
            self._cancelled = True
            self.task.cancel()

    def stop(self) -> None:
        """Ends the attempt because the trainer stops: the run goes on when the trainer is back."""
        if not (self._cancelled or self._closing):
            self.task.cancel()

    async def _run(self) -> None:
        attempt = Attempt(self.record, self._peers, self.control, self._on_state, self._on_job, self._on_warning)
        state: State = "SUCCEEDED"
        message = ""
        try:
            await attempt.run()
            message = self._warning
        except asyncio.CancelledError:
            if not self._cancelled:
                raise  # the trainer stops
            state, message = "CANCELLED", "cancelled on request"
        except Exception as error:  # task boundary: the run ends with its cause
            if superseded(error):
                log.warning("a newer attempt owns run %s, attempt %d stops", self.record.run, self.record.attempt)
                return
            state, message = "FAILED", cause_of(error)
            log.error("run %s failed: %s", self.record.run, message, exc_info=error)
        self._closing = True
        try:
            await self._close(attempt, state, message)
        except ServiceError as error:  # the record is gone, or belongs to a newer attempt
            log.error("the end of run %s (%s) is not on record: %s", self.record.run, state, error)

    async def _close(self, attempt: Attempt, state: State, message: str) -> None:
        run = self.record.run
        found = await patiently(lambda: self._store.get(run))
        self._owned(found)  # before anything is ended: a newer attempt goes on with the same processes
        if attempt.processes is not None:
            await attempt.processes.cancel()
        if state != "SUCCEEDED":  # behind the workers, which put groups on the ladder
            await cancel_ladders(self._peers.ladders, run, found.config.rl)
        self._peers.learners.forget(run)
        # The summary is there before watchers hear of the end, because that is when they read it.
        steps = await patiently(lambda: self._store.step(run))
        try:
            attempt.write_summary(found.to(state, message=message, now=time.time()), steps)
        except (OSError, ValueError, TypeError, LookupError) as error:
            log.error("run %s has no summary: %s: %s", run, type(error).__name__, error)
        await patiently(lambda: end(self._store, run, state, message, attempt=self.record.attempt))

    async def _on_state(self, state: State) -> None:
        await self._store.update(
            self.record.run, lambda found: self._owned(found) if found.state == state else self._owned(found).to(state)
        )

    async def _on_job(self, job: str) -> None:
        await self._store.update(self.record.run, lambda found: replace(self._owned(found), job=job))

    async def _on_warning(self, text: str) -> None:
        """Shows something that goes wrong without ending the run; the last one stays in the run's message."""
        self._warning = text
        await self._store.update(self.record.run, lambda found: replace(self._owned(found), message=text))

    def _owned(self, found: RunRecord) -> RunRecord:
        if found.attempt != self.record.attempt:
            raise Fenced(f"attempt {found.attempt} owns run {found.run}, this is attempt {self.record.attempt}")
        return found


async def end(store: RunStore, run: str, state: State, message: str, *, attempt: int) -> RunRecord:
    """Puts the end of an attempt on record; repeating it is harmless. Raises Fenced when a newer attempt owns it."""
    now = time.time()

    def change(found: RunRecord) -> RunRecord:
        if found.attempt != attempt:
            raise Fenced(f"attempt {found.attempt} owns run {run}, this is attempt {attempt}")
        return found if found.ended else found.to(state, message=message, now=now)

    record = await store.update(run, change)
    RUNS_ENDED.labels(state=record.state).inc()
    log.info("run %s %s %s", run, record.state, record.message)
    return record


async def patiently(call: Callable[[], Awaitable[Answer]]) -> Answer:
    """Repeats a call to Redis until it is answered: the end of a run must not get lost with its connection."""
    while True:
        try:
            return await call()
        except (RedisError, OSError) as error:
            log.warning("Redis is away (%s), the end of a run waits for it", type(error).__name__)
            await asyncio.sleep(_RETRY_SECONDS)


def superseded(error: BaseException) -> bool:
    """True when a newer attempt has fenced this one."""
    if isinstance(error, BaseExceptionGroup):
        return any(superseded(each) for each in error.exceptions)
    return isinstance(error, Fenced)


def cause_of(error: BaseException) -> str:
    """One line for people: the first cause inside task groups, with its kind when the text alone would not tell."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, ConfigError):
        return str(error)
    return f"{type(error).__name__}: {str(error) or 'no text'}".replace("\n", "; ")
