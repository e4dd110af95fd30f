"""Carries out what the state machines decide: Redis first, then the replicas' streams, in order.

One writer per model.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import redis

from reflux.weight_broker.v1 import weight_broker_service_pb2 as pb
from reflux.weight_broker.v1 import weight_version_pb2 as version_pb
from reflux_weight_broker import messages, metrics
from reflux_weight_broker.epochs import next_epoch
from reflux_weight_broker.plan import Manifest
from reflux_weight_broker.records import Action, Dismiss, Persist, Replica, Report
from reflux_weight_broker.refusals import UnknownReplica
from reflux_weight_broker.store import VersionStore
from reflux_weight_broker.versions import ModelVersions

log = logging.getLogger(__name__)

_TICK_SECONDS = 0.1
_RETRY_SECONDS = 0.5
_STOP_SECONDS = 1.0
_HISTORY = 64


@dataclass(frozen=True)
class _End:
    """Last item of a replica's stream."""

    reason: str


@dataclass(eq=False)
class _Stream:
    """An open WatchVersions call."""

    incarnation: str
    events: asyncio.Queue[pb.WatchVersionsResponse | _End] = field(default_factory=asyncio.Queue)


@dataclass(eq=False)
class _Model:
    """One model's machine and everything that is under way for it."""

    machine: ModelVersions
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    outbox: asyncio.Queue[Action | None] = field(default_factory=asyncio.Queue)
    """What is to be done, in order; None ends the writer."""

    streams: dict[str, _Stream] = field(default_factory=dict)
    versions: OrderedDict[int, version_pb.WeightVersion] = field(default_factory=OrderedDict)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def post(self, actions: list[Action]) -> None:
        """Queues actions; call it with the lock held, so that their order is the machine's."""
        for action in actions:
            self.outbox.put_nowait(action)


class Coordinator:
    """All models of the stack. Methods raise refusals, and `redis.RedisError` when Redis is away."""

    def __init__(self, store: VersionStore, reconnect_seconds: float) -> None:
        self._store = store
        self._reconnect_seconds = reconnect_seconds
        self._models: dict[str, _Model] = {}
        self._loading = asyncio.Lock()
        self._group: asyncio.TaskGroup | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Coordinator"]:
        """Runs the clock and one writer per model until the block ends."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            self._tasks = [group.create_task(self._tick())]
            try:
                yield self
            finally:
                await self._stop()

    async def _stop(self) -> None:
        """Lets the writers finish what was decided, within a second, then ends them."""
        clock, *writers = self._tasks
        clock.cancel()
        for model in self._models.values():
            model.outbox.put_nowait(None)
        if writers:
            await asyncio.wait(writers, timeout=_STOP_SECONDS)
        while pending := [task for task in self._tasks if not task.done()]:
            # Again and again: a Redis call may swallow a cancellation that meets its own timeout.
            for task in pending:
                task.cancel()
            await asyncio.wait(pending, timeout=_TICK_SECONDS)

    async def register(self, model_id: str, replica: Replica) -> version_pb.WeightVersion | None:
        """Adds a replica; returns the committed version."""
        model = await self._model(model_id)
        async with model.lock:
            model.post(model.machine.register(replica, time.monotonic()))
            return await self._committed(model)

    async def deregister(self, model_id: str, name: str) -> bool:
        """Removes a replica; False when it was not registered."""
        model = await self._existing(model_id)
        if model is None:
            return False
        async with model.lock:
            try:
                model.post(model.machine.deregister(name, time.monotonic()))
            except UnknownReplica:
                return False
        return True

    async def watch(self, model_id: str, name: str, incarnation: str) -> AsyncIterator[pb.WatchVersionsResponse]:
        """Events for a replica. Raises `UnknownReplica` when it has to register (again)."""
        model = await self._known(model_id, name)
        stream = _Stream(incarnation)
        async with model.lock:
            reminders = model.machine.connected(name, incarnation)
            if name in model.streams:
                model.streams[name].events.put_nowait(_End("another stream of the replica took over"))
            model.streams[name] = stream
            model.post(reminders)
        try:
            while not isinstance(event := await stream.events.get(), _End):
                yield event
            raise UnknownReplica(f"replica {name}: {event.reason}; register again")
        finally:
            if model.streams.get(name) is stream:
                del model.streams[name]
                model.machine.disconnected(name, incarnation, time.monotonic())

    async def report(self, model_id: str, report: Report) -> version_pb.WeightVersion | None:
        """Takes an acknowledgement; returns the version after it."""
        model = await self._known(model_id, report.replica)
        async with model.lock:
            model.post(model.machine.report(report, time.monotonic()))
            current = model.machine.current
            if current and current.epoch == report.epoch:
                return messages.to_version(current)
        return model.versions.get(report.epoch)

    async def begin(
        self, manifest: Manifest, *, publisher_epoch: int, replay: bool, timeout_seconds: float, min_replicas: int
    ) -> version_pb.WeightVersion:
        """Starts a version, or returns the one that the same request has started before."""
        model = await self._model(manifest.model_id)
        async with model.lock:
            known = await self._store.epoch_of_request(manifest.model_id, manifest.request_id)
            if known is not None and known <= model.machine.last_epoch:
                return await self._version(model, known) or version_pb.WeightVersion(
                    model_id=manifest.model_id,
                    version=manifest.version,
                    epoch=known,
                    state=version_pb.WeightVersion.STATE_ABORTED,
                    error="the broker restarted before the version began",
                )
            model.machine.check_begin(manifest, publisher_epoch, replay=replay)
            floor = next_epoch(publisher_epoch, model.machine.last_epoch) - 1
            epoch = await self._store.allocate(manifest.model_id, manifest.request_id, floor)
            transaction, actions = model.machine.begin(
                manifest, epoch, timeout_seconds=timeout_seconds, min_replicas=min_replicas, now=time.monotonic()
            )
            await self._remember(model, messages.to_version(transaction))
            model.post(actions)
        log.info("epoch %d of %s begins: version %d", epoch, manifest.model_id, manifest.version)
        return messages.to_version(transaction)

    async def get(self, model_id: str, epoch: int) -> tuple[version_pb.WeightVersion | None, int]:
        """A version (epoch 0: the committed one) and the last begun epoch; (None, 0) for what is unknown."""
        model = await self._existing(model_id)
        if model is None:
            return None, 0
        async with model.lock:
            version = await (self._version(model, epoch) if epoch else self._committed(model))
            return version, model.machine.last_epoch

    async def follow(self, model_id: str, epoch: int) -> AsyncIterator[version_pb.WeightVersion]:
        """A version after each change until it has ended; empty for an unknown one."""
        model = await self._existing(model_id)
        if model is None or await self._version(model, epoch) is None:
            return
        last = None
        while True:
            async with model.changed:
                version = await self._version(model, epoch)
                while version == last:
                    await model.changed.wait()
                    version = await self._version(model, epoch)
            if version is None:
                return
            yield version
            if version.state in (version_pb.WeightVersion.STATE_COMMITTED, version_pb.WeightVersion.STATE_ABORTED):
                return
            last = version

    def replicas(self, model_id: str) -> list[Replica]:
        """Registered replicas of one model, or of all."""
        models = [self._models[model_id]] if model_id in self._models else [] if model_id else self._models.values()
        return [replica for model in models for replica in model.machine.replicas.values()]

    async def _model(self, model_id: str) -> _Model:
        async with self._loading:
            if model_id not in self._models:
                last_epoch, committed = await self._store.load(model_id)
                machine = ModelVersions(
                    model_id, reconnect_seconds=self._reconnect_seconds, last_epoch=last_epoch, committed=committed
                )
                self._models[model_id] = model = _Model(machine)
                assert self._group is not None, "use the coordinator inside `running`"
                self._tasks.append(self._group.create_task(self._carry_out(model)))
            return self._models[model_id]

    async def _existing(self, model_id: str) -> _Model | None:
        """Reading must not create models: anyone may ask about any name."""
        if model_id in self._models or (await self._store.load(model_id))[0]:
            return await self._model(model_id)
        return None

    async def _known(self, model_id: str, name: str) -> _Model:
        model = self._models.get(model_id)
        if model is None:
            raise UnknownReplica(f"replica {name} of {model_id} is not registered")
        return model

    async def _committed(self, model: _Model) -> version_pb.WeightVersion | None:
        committed = model.machine.committed
        if committed is None:
            return None
        stored = await self._version(model, committed.epoch)
        return stored or version_pb.WeightVersion(
            model_id=model.machine.model_id,
            version=committed.manifest.version,
            epoch=committed.epoch,
            state=version_pb.WeightVersion.STATE_COMMITTED,
        )

    async def _version(self, model: _Model, epoch: int) -> version_pb.WeightVersion | None:
        return model.versions.get(epoch) or await self._store.version(model.machine.model_id, epoch)

    async def _remember(self, model: _Model, version: version_pb.WeightVersion) -> None:
        async with model.changed:
            model.versions[version.epoch] = version
            while len(model.versions) > _HISTORY:
                model.versions.popitem(last=False)
            model.changed.notify_all()

    async def _carry_out(self, model: _Model) -> None:
        while True:
            action = await model.outbox.get()
            if action is None:
                return
            metrics.REPLICAS.set(sum(len(each.machine.replicas) for each in self._models.values()))
            if isinstance(action, Persist):
                await self._persist(model, action)
                continue
            stream = model.streams.get(action.replica)
            listens = stream is not None and stream.incarnation == action.incarnation
            if isinstance(action, Dismiss):
                log.warning("replica %s of %s leaves: %s", action.replica, model.machine.model_id, action.reason)
                if stream and listens:
                    stream.events.put_nowait(_End(action.reason))
            elif stream and listens and (replica := model.machine.replicas.get(action.replica)):
                stream.events.put_nowait(messages.to_event(action, replica))

    async def _persist(self, model: _Model, action: Persist) -> None:
        # Nothing that follows may be seen before it is stored, so Redis is waited for however long it is away.
        while True:
            try:
                await self._store.save(action.transaction)
                break
            except redis.RedisError as error:
                log.warning(
                    "Redis does not take epoch %d (%s), trying on", action.transaction.epoch, type(error).__name__
                )
                await asyncio.sleep(_RETRY_SECONDS)
        await self._remember(model, messages.to_version(action.transaction))
        if action.transaction.phase.ended:
            metrics.observe(action.transaction)
            ended = action.transaction
            log.info("epoch %d of %s: %s %s", ended.epoch, ended.manifest.model_id, ended.phase.value, ended.error)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            for model in list(self._models.values()):
                async with model.lock:
                    model.post(model.machine.tick(time.monotonic()))
