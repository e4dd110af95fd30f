"""The engine's thread and its border to asyncio: one wake-up per step in each direction, whatever the batch."""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from reflux_inference_gateway.engine.core import EngineCore, Event
from reflux_inference_gateway.engine.lanes import OWN
from reflux_inference_gateway.engine.served import Scored, Weights
from reflux_inference_gateway.engine.sinks import Sinks
from reflux_inference_gateway.engine.types import (
    EngineLoad,
    EngineStopped,
    FinishedSample,
    GroupRequest,
    QueueFull,
)

log = logging.getLogger(__name__)
T = TypeVar("T")


class EngineLoop:
    """Owns the thread that steps an EngineCore.

    The event loop never waits for a step: it leaves commands in a queue, and reads a snapshot of the load.
    """

    def __init__(
        self,
        new_core: Callable[[Callable[[str, Event], None]], EngineCore],
        *,
        max_open_samples: int,
        on_failure: Callable[[str], None],
    ) -> None:
        """`new_core` gets the function that delivers events; `max_open_samples` bounds running and waiting samples.

        `on_failure` is called in the event loop when the thread died: the process should end.
        """
        self._on_failure = on_failure
        self._core = new_core(self._collect)
        self._max_open_samples = max_open_samples
        self._open_samples = 0
        self._wake = threading.Event()
        self._commands: deque[Callable[[], object]] = deque()
        self._batch: list[tuple[str, Event]] = []
        self._sinks: Sinks[Event] = Sinks()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = self._ended = False
        self._failure: str | None = None
        self._unfit: str | None = None
        self._asked: set[Future[Any]] = set()
        self._swapped: dict[str, Future[float]] = {}
        """By model, whoever waits for the first decode step after a swap."""
        self.writes = 0
        """Grows when weights begin and when they end to be written or exchanged: odd meanwhile."""

        self._snapshot = self._measure()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    async def __aenter__(self) -> "EngineLoop":
        """Starts the thread."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Ends the thread after its current step; requests that still run end with EngineStopped."""
        self._stopping = True
        self._wake.set()
        await asyncio.to_thread(self._thread.join)

    async def generate(self, request: GroupRequest) -> AsyncGenerator[list[Event], None]:
        """Yields the events of a group, all of one step together, until every sample is finished.

        Raises QueueFull when too many samples are open and EngineStopped when the thread has ended. Closing the
        iterator aborts what still runs. An id may come again while its first use is still being aborted (a caller
        that lost its connection and repeats), so that the core knows each use by a ticket of its own.
        """
        self._admit(request)
        self._open_samples += request.num_samples
        left = request.num_samples
        try:
            with self._sinks.opened((request.model, request.request_id)) as (ticket, sink):
                try:
                    self._command(lambda: self._submit(replace(request, request_id=ticket)))
                    while left:
                        events = await sink.get()
                        if not events:
                            raise EngineStopped(self._reason(request.model))
                        left -= sum(isinstance(event, FinishedSample) for event in events)
                        yield events
                finally:
                    if left:
                        self._command(lambda: self._core.abort(ticket))
        finally:
            self._open_samples -= request.num_samples

    def abort(self, request_id: str, model: str = OWN) -> bool:
        """Ends a group between two steps; False when no such group runs or waits."""
        tickets = self._sinks.tickets((model, request_id))
        self._command(lambda: [self._core.abort(ticket) for ticket in tickets])
        return bool(tickets)

    def swap(self, weights: Weights, fill: Callable[[], None] | None = None, model: str = OWN) -> "Future[float]":
        """Makes new weights current between two steps; `fill` writes them first, while nothing is read.

        The future ends when the old weights are no longer read: with the first decode step under the new ones, or at
        once when no sequence runs. Its result is the visible pause: the longest time without a decode step until then,
        in milliseconds.

        When `fill` raises, the weights are a mixture: all requests end with EngineStopped, further ones are refused
        until another swap works, `unfit` says why, and the future raises what `fill` raised.

        The first version of an adapter opens it; requests of other models go on whatever it takes.
        """
        return self._ask(lambda done: self._exchange(weights, fill, model, done))

    def close_adapter(self, name: str) -> "Future[float]":
        """Serves an adapter no longer: its requests end with EngineStopped, and its weights are not read any more."""
        return self._ask(lambda done: self._close(name, done))

    def score(self, token_ids: Sequence[int], model: str = OWN) -> "Future[Scored]":
        """Scores a prompt under a model's weights between two decode steps. Fails with EngineStopped."""
        return self._ask(lambda done: self._score(token_ids, model, done))

    def load(self) -> EngineLoad:
        """Counts and version after the last step; samples that the thread has not seen yet count as waiting."""
        seen = self._snapshot
        unseen = max(0, self._open_samples - seen.running - seen.waiting)
        return seen if not unseen else seen.with_waiting(seen.waiting + unseen)

    @property
    def failure(self) -> str | None:
        """Why the thread ended; None while it runs."""
        return self._failure

    @property
    def unfit(self) -> str | None:
        """Why nothing may be generated at the moment; None when all is well."""
        return self._unfit

    @property
    def weights(self) -> Weights:
        """What is served now of the engine's own model."""
        return self._core.weights

    def serves(self, model: str) -> Weights | None:
        """What is served now of a model; None when the engine has no weights of it."""
        return self._core.lanes.of(model).weights if model in self._core.lanes else None

    def _admit(self, request: GroupRequest) -> None:
        if self._failure is not None or self._stopping or self._unfit is not None:
            raise EngineStopped(self._reason())
        if request.model not in self._core.lanes:
            raise EngineStopped(self._reason(request.model))
        if self._open_samples and self._open_samples + request.num_samples > self._max_open_samples:
            raise QueueFull(f"{self._open_samples} samples run or wait; the limit is {self._max_open_samples}")

    def _reason(self, model: str = OWN) -> str:
        absent = "" if model in self._core.lanes else f"no weights of {model} are here"
        return self._failure or self._unfit or absent or "the engine stops"

    def _submit(self, request: GroupRequest) -> None:
        if self._unfit is None and request.model in self._core.lanes:
            self._core.submit(request)
        else:  # accepted just before the weights were spoilt or the adapter left
            self._post(lambda: self._sinks.end([request.request_id]))

    def _ask(self, run: Callable[["Future[T]"], None]) -> "Future[T]":
        """Has the thread answer a question; its end answers those that are left."""
        done: Future[T] = Future()
        self._asked.add(done)
        done.add_done_callback(self._asked.discard)
        self._command(lambda: done.set_running_or_notify_cancel() and run(done))
        if self._ended:
            self._refuse()
        return done

    def _refuse(self) -> None:
        for done in list(self._asked):
            with suppress(InvalidStateError):  # the thread and the loop may both find it open
                done.set_exception(EngineStopped(self._reason()))

    def _exchange(self, weights: Weights, fill: Callable[[], None] | None, model: str, done: "Future[float]") -> None:
        self._settle(model)
        self.writes += 1
        try:
            if fill is not None:
                fill()
            if model == OWN:
                self._unfit = None
            self._swapped[model] = done
            self._core.swap(weights, overwritten=fill is not None, model=model)
        except Exception as error:  # task boundary: whoever asked for the swap decides what follows
            self._spoil(f"the weights are a mixture of versions, new ones did not arrive: {error}")
            done.set_exception(error)
        finally:
            self.writes += 1

    def _close(self, name: str, done: "Future[float]") -> None:
        self._settle(name)
        ended = self._core.close(name)
        self._batch = [entry for entry in self._batch if entry[0] not in ended]
        self._post(lambda: self._sinks.end(ended))
        done.set_result(0.0)

    def _spoil(self, reason: str) -> None:
        """Ends all requests without their samples: who asked may ask another replica."""
        self._unfit = reason
        self._core.drop()
        self._snapshot = self._measure()
        self._batch.clear()
        self._post(self._sinks.end)

    def _settle(self, model: str) -> None:
        if (done := self._swapped.pop(model, None)) is not None:
            done.set_result(self._core.lanes.of(model).pause.longest_seconds * 1000.0)

    def _score(self, token_ids: Sequence[int], model: str, done: "Future[Scored]") -> None:
        if self._unfit is not None or model not in self._core.lanes:
            done.set_exception(EngineStopped(self._reason(model)))
        else:
            done.set_result(self._core.score(token_ids, model))

    def _command(self, command: Callable[[], object]) -> None:
        self._commands.append(command)
        self._wake.set()

    def _collect(self, request_id: str, event: Event) -> None:
        self._batch.append((request_id, event))

    def _measure(self) -> EngineLoad:
        core = self._core
        return EngineLoad(
            running=core.batcher.num_active,
            waiting=core.batcher.num_waiting,
            pending_tokens=core.pending_tokens(),
            version=core.weights.version,
            epoch=core.weights.epoch,
            generated_tokens=core.generated_tokens,
            prefilled_prompts=core.prompts.seated,
            prefilled_tokens=core.filler.prompt_tokens,
            reused_tokens=core.prompts.reused_tokens,
        )

    def _run(self) -> None:
        try:
            while not self._stopping:
                if not self._turn():
                    self._wake.wait()
                    self._wake.clear()
        except Exception as error:
            log.exception("the engine's thread failed")
            self._failure = f"{type(error).__name__}: {error}"
            self._post(lambda: self._on_failure(self._failure or ""))
        self._failure = self._failure or "the engine stops"
        self._ended = True
        self._refuse()
        self._post(self._sinks.end)

    def _turn(self) -> bool:
        """Runs commands and one step; False when there was nothing to do."""
        busy = bool(self._commands)
        while self._commands:
            self._commands.popleft()()
        busy = self._core.step() or busy
        for model in [name for name in self._swapped if self._core.lanes.of(name).settled]:
            self._settle(model)
        if busy:
            self._snapshot = self._measure()
        if self._batch:
            batch, self._batch = self._batch, []
            self._post(lambda: self._sinks.deliver(batch))
        return busy

    def _post(self, call: Callable[[], None]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call)
