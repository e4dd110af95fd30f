"""The one model of a learner process and the order of everything that is done to it.

Torch runs in one thread of its own, so that the event loop answers health checks and heartbeats during a long backward
pass. What changes the model runs under one lock and to its end, even when the caller hangs up: a repeated call then
finds the answer in the journal.
"""

import asyncio
import functools
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from grpc.aio import Channel

from reflux_kit.errors import NotFound, Unavailable, WrongState
from reflux_kit.scope import ADAPTERS
from reflux_storage.stream import ObjectReceipt
from reflux_trainer.learner.adapter_state import restore_adapter
from reflux_trainer.learner.adapters import PublishersBeside, merged_weights
from reflux_trainer.learner.backends import AnyLearner, Backend, Capture, OneRank
from reflux_trainer.learner.core import Learner
from reflux_trainer.learner.folders import Source
from reflux_trainer.learner.journal import Figures, Journal, Kind
from reflux_trainer.learner.lora import LoraAdapter
from reflux_trainer.learner.ops import CompletionData, GroupData
from reflux_trainer.learner.publish import Outlet, PublishOrder, WeightPublisher
from reflux_trainer.learner.state import StoreAddress
from reflux_transfer.backends.base import TransferBackend
from reflux_transfer.client.publisher import Published
from reflux_transfer.registry import open_backend

log = logging.getLogger(__name__)
T = TypeVar("T")

_KEPT_PUBLISHES = 8


@dataclass
class Session:
    """One created or loaded model."""

    model_id: str
    learner: AnyLearner
    journal: Journal
    publisher: WeightPublisher
    beside: PublishersBeside
    capture: Capture
    adapters: dict[str, LoraAdapter] = field(default_factory=dict)
    """LoRA adapters by name."""
    publishes: OrderedDict[str, asyncio.Task[Published]] = field(default_factory=OrderedDict)

    @property
    def whole(self) -> Learner:
        """The model, for what needs all of it in this process. Raises WrongState when it is sharded."""
        if not isinstance(self.learner, Learner):
            raise WrongState("adapters need a learner of one rank: set REFLUX_LEARNER_RANKS to 1")
        return self.learner

    def adapter(self, name: str) -> LoraAdapter:
        """A LoRA adapter. Raises NotFound."""
        if name not in self.adapters:
            raise NotFound(f"adapter {name!r} is not loaded; call CreateAdapter or LoadState", adapter=name)
        return self.adapters[name]


@dataclass(frozen=True)
class Saved:
    """A stored state: its objects, what it covers, and what it cost."""

    receipts: tuple[ObjectReceipt, ...]
    op_id: int
    version: int
    pause_seconds: float
    seconds: float


class LearnerHost:
    """Owns the torch thread and at most one model."""

    def __init__(
        self,
        broker: Channel,
        threads: int = 1,
        secret: str = "",
        opened: Callable[[str], TransferBackend] = open_backend,
        backend: Backend | None = None,
    ) -> None:
        """The stack's `secret` signs what is published; `opened` makes the backend of a transport; `backend` computes,
        this process alone if there is none."""
        self._backend = backend or OneRank()
        self._broker, self._secret, self._opened = broker, secret, opened
        self._torch = ThreadPoolExecutor(1, "torch", initializer=torch.set_num_threads, initargs=(threads,))
        self.order = asyncio.Lock()
        """Held by what changes a model or an adapter, or must see neither change."""
        self._publishing = asyncio.Lock()
        self._saving = asyncio.Lock()
        self._running: set[asyncio.Task[Any]] = set()
        self.session: Session | None = None

    async def close(self) -> None:
        """Waits for what runs, then frees model and arenas."""
        if self.session is not None:
            for publish in self.session.publishes.values():
                publish.cancel()  # it may wait for replicas; nothing in the model depends on it
        await asyncio.gather(*self._running, return_exceptions=True)
        await self.in_torch(lambda: None)  # a cancelled publish may still be writing
        await self._forget()
        await self.in_torch(self._backend.close)
        await asyncio.to_thread(self._torch.shutdown)

    def require(self, model_id: str) -> Session:
        """The session of `model_id`; raises NotFound when another model, or none, is loaded."""
        if self.session is None or self.session.model_id != model_id:
            loaded = f"model {self.session.model_id!r} is" if self.session else "no model is"
            raise NotFound(f"model {model_id!r} is not loaded, {loaded}; call CreateModel or LoadState", model=model_id)
        return self.session

    async def create(self, model_id: str, source: Source, outlet: Outlet) -> Session:
        """Loads a model folder as operation 0; forgets what was there."""
        return await self.finish(self._create(model_id, source, outlet))

    async def load(self, model_id: str, source: Source, outlet: Outlet, address: StoreAddress, key: str) -> Session:
        """Loads a stored state; the folder gives the shape. Forgets what was there."""
        return await self.finish(self._load(model_id, source, outlet, address, key))

    async def operate(self, model_id: str, op_id: int, kind: Kind, compute: Callable[[AnyLearner], Figures]) -> Figures:
        """Runs operation `op_id` once; repeated calls get the first answer. Raises `OutOfOrderError`."""
        return await self.finish(self._operate(model_id, op_id, kind, compute))

    async def publish(self, model_id: str, order: PublishOrder) -> Published:
        """Publishes the present weights; the same `request_id` joins or repeats the first call."""
        session = self.require(model_id)
        task = session.publishes.get(order.request_id)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._spawn(self._publish(session, order))
            session.publishes[order.request_id] = task
            while len(session.publishes) > _KEPT_PUBLISHES:
                session.publishes.popitem(last=False)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled() and self.session is not session:
                raise WrongState(f"model {model_id!r} was created or loaded anew meanwhile; repeat the call") from None
            raise

    async def save(self, model_id: str, address: StoreAddress, key: str) -> Saved:
        """Streams the state; operations wait only while it is copied."""
        return await self.finish(self._save(self.require(model_id), address, key))

    async def _create(self, model_id: str, source: Source, outlet: Outlet) -> Session:
        async with self._publishing, self.order:
            learner = await self.in_torch(self._backend.create, source)
            return await self._install(model_id, learner, Journal(), outlet, epoch=0)

    async def _load(self, model_id: str, source: Source, outlet: Outlet, address: StoreAddress, key: str) -> Session:
        async with self._publishing, self.order:
            restored = await self.in_torch(self._backend.restore, address, key, source)
            return await self._install(model_id, restored.learner, restored.journal, outlet, restored.epoch)

    async def _install(
        self, model_id: str, learner: AnyLearner, journal: Journal, outlet: Outlet, epoch: int
    ) -> Session:
        outlet = replace(outlet, secret=self._secret, opened=self._opened)
        publisher = await asyncio.to_thread(self._backend.publisher, self._broker, model_id, learner, outlet)
        if journal.last:
            publisher.restored(epoch)
        await self._forget()
        beside = PublishersBeside(self._broker, replace(outlet, delta=False))
        self.session = Session(model_id, learner, journal, publisher, beside, self._backend.capture())
        log.info("model %s is at operation %d, version %d", model_id, journal.last, learner.version)
        return self.session

    async def _operate(
        self, model_id: str, op_id: int, kind: Kind, compute: Callable[[AnyLearner], Figures]
    ) -> Figures:
        async with self.order:
            session = self.require(model_id)
            known = session.journal.recall(op_id, kind)
            if known is not None:
                return known
            figures = await self.in_torch(compute, session.learner)
            session.journal.record(op_id, kind, figures)
            return figures

    async def _publish(self, session: Session, order: PublishOrder) -> Published:
        if order.publish_as:
            return await self._publish_beside(session, order)
        async with self._publishing, AsyncExitStack() as until_finished:
            await self._broker_reached(order.sync_timeout_seconds)
            async with self.order:
                # From the announcement on replicas wait for the weights, so no operation may come in between.
                self.check_present(session)
                name = order.adapter or order.merged_adapter
                adapter = session.adapter(name) if name else None
                version = adapter.version if adapter else session.learner.version
                if adapter is not None and order.adapter:
                    params, published_as = adapter.params, f"{session.model_id}{ADAPTERS}{name}"
                    await until_finished.enter_async_context(session.beside.turn(published_as))
                    publisher = await session.beside.of(published_as, params)
                else:
                    publisher = session.publisher
                    params = await self.in_torch(merged_weights, session.learner.params, adapter)
                publishing = await publisher.begin(version, order, session.publisher.epoch)
                await until_finished.enter_async_context(publishing)
                await self.in_torch(publisher.write, publishing, params)
                scores = await self.in_torch(_probe_scores, session.learner, order.probe_token_ids, adapter)
            if scores:
                await publisher.report_probe(publishing, scores)
            return await publisher.finish(publishing)

    async def _publish_beside(self, session: Session, order: PublishOrder) -> Published:
        """Full weights as another model, side by side with publishes of the model and of others."""
        saved = None
        if order.merged_from is not None:
            config = session.learner.config
            saved = await asyncio.to_thread(restore_adapter, *order.merged_from, config, weights_only=True)
        async with session.beside.turn(order.publish_as), AsyncExitStack() as until_finished:
            await self._broker_reached(order.sync_timeout_seconds)
            async with self.order:
                self.check_present(session)
                adapter = saved or (session.adapter(order.merged_adapter) if order.merged_adapter else None)
                params = await self.in_torch(merged_weights, session.whole.params, adapter)
                publisher = await session.beside.of(order.publish_as, params)
                publishing = await publisher.begin(order.version, order)
                await until_finished.enter_async_context(publishing)
                await self.in_torch(publisher.write, publishing, params)
            return await publisher.finish(publishing)

    async def _broker_reached(self, seconds: float) -> None:
        """A broker that is away is waited for here, where that does not hold up training."""
        try:
            async with asyncio.timeout(seconds):
                await self._broker.channel_ready()
        except TimeoutError:
            raise Unavailable(f"the weight broker is away, since {seconds:g} s at least") from None

    async def _save(self, session: Session, address: StoreAddress, key: str) -> Saved:
        started = time.monotonic()
        async with self._saving:
            async with self.order:
                self.check_present(session)
                begun = time.monotonic()
                await self.in_torch(session.capture.take, session.learner, session.journal, session.publisher.epoch)
                op_id, version = session.journal.last, session.learner.version
                pause = time.monotonic() - begun
            receipts = await asyncio.to_thread(session.capture.write, address, key)
        return Saved(receipts, op_id, version, pause, time.monotonic() - started)

    def check_present(self, session: Session) -> None:
        """Raises WrongState when the session was replaced while its caller waited."""
        if self.session is not session:
            raise WrongState(f"model {session.model_id!r} was created or loaded anew meanwhile; repeat the call")

    async def _forget(self) -> None:
        session, self.session = self.session, None
        if session is not None:
            waiting = [task for task in session.publishes.values() if not task.done()]
            for task in waiting:
                task.cancel()  # those beside the model do not hold its lock; nothing in the model depends on them
            await asyncio.gather(*waiting, return_exceptions=True)
            await session.beside.close()
            await session.publisher.close()

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs work to its end, even when the caller hangs up."""
        return await asyncio.shield(self._spawn(work))

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # seen by the caller, if there still is one

    def in_torch(self, function: Callable[..., T], *arguments: Any) -> Awaitable[T]:
        """Runs a function in the torch thread."""
        return asyncio.get_running_loop().run_in_executor(self._torch, functools.partial(function, *arguments))


def _probe_scores(learner: AnyLearner, token_ids: tuple[int, ...], adapter: LoraAdapter | None) -> list[float]:
    """Log-prob of every token of the probe prompt after the first; none without a prompt."""
    if not token_ids:
        return []
    prompt = GroupData(list(token_ids[:1]), [CompletionData(list(token_ids[1:]))])
    if adapter is not None:
        return list(learner.rescored([prompt], adapter, None).logprobs[0])
    ((logprobs,),) = learner.score([prompt])
    return logprobs
