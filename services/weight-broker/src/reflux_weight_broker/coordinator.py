"""Carries out what the state machines decide: Redis first, then the listeners' streams, in order.

One writer per model.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import redis

from reflux.weight_broker.v1 import weight_broker_service_pb2 as pb
from reflux.weight_broker.v1 import weight_version_pb2 as version_pb
from reflux_kit import deadline
from reflux_kit.scope import run_of
from reflux_weight_broker import messages, metrics
from reflux_weight_broker.actions import Dismiss, Persist
from reflux_weight_broker.epochs import next_epoch
from reflux_weight_broker.model import Model
from reflux_weight_broker.plan import Manifest
from reflux_weight_broker.records import PUBLISHER, Registration, Replica, Report, Rules
from reflux_weight_broker.refusals import BaseMismatch, StaleEpoch, UnknownReplica
from reflux_weight_broker.store import VersionStore
from reflux_weight_broker.streams import StreamEnded
from reflux_weight_broker.versions import ModelVersions

log = logging.getLogger(__name__)

_TICK_SECONDS = 0.1
_RETRY_SECONDS = 0.5
_STOP_SECONDS = 1.0
_VERDICT_SECONDS = 60.0
_SHARE = 0.9
"""Of a caller's patience: it gets an answer rather than an error."""

_ENDED = (version_pb.WeightVersion.STATE_COMMITTED, version_pb.WeightVersion.STATE_ABORTED)


class Coordinator:
    """All models of the stack. Methods raise refusals, and `redis.RedisError` when Redis is away."""

    def __init__(self, store: VersionStore, rules: Rules) -> None:
        self._store, self._rules = store, rules
        self._models: dict[str, Model] = {}
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

    async def register(self, model_id: str, registration: Registration) -> version_pb.WeightVersion | None:
        """Adds a rank; returns the committed version."""
        model = await self._model(model_id)
        async with model.lock:
            model.post(model.machine.register(registration, time.monotonic()))
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
        """Events for a rank. Raises `UnknownReplica` when it has to register (again)."""
        model = self._known(model_id, name)
        async with model.lock:
            reminders = model.machine.connected(name, incarnation)
            stream = model.replicas.open(name, incarnation)
            model.post(reminders)
        try:
            async for event in stream.read():
                yield event
        except StreamEnded as end:
            raise UnknownReplica(f"replica {name}: {end}; register again") from None
        finally:
            if model.replicas.close(stream, name, incarnation):
                model.machine.fleet.lost(name, incarnation, time.monotonic())

    async def watch_leases(
        self, model_id: str, replica: str, generations: Sequence[int]
    ) -> AsyncIterator[pb.WatchLeasesResponse]:
        """Leases on the memory of a replica, or of the publisher for an empty name; first those that hold now.

        With generations only those. Ends when the broker does not know the model.
        """
        model = await self._existing(model_id) if not replica else self._known(model_id, replica)
        if model is None:
            return
        async with model.lock:
            stream = model.owners.open(replica)
            model.post(model.machine.fleet.leases(replica or PUBLISHER))
        try:
            async for lease in stream.read():
                if not generations or lease.generation in generations:
                    yield lease
        finally:
            model.owners.close(stream, replica)

    async def report(self, model_id: str, report: Report) -> version_pb.WeightVersion | None:
        """Takes an acknowledgement; returns the version after it, without its members."""
        model = self._known(model_id, report.replica)
        async with model.lock:
            model.post(model.machine.report(report, time.monotonic()))
            current = model.machine.current
            if current and current.epoch == report.epoch:
                return messages.to_version(current, members=False)
        return None

    async def probe(self, model_id: str, epoch: int, replica: str, logprobs: Sequence[float]) -> str:
        """Takes log-probs of the probe prompt; who differs is unhealthy from now on.

        Returns what is wrong with `replica`, empty when nothing is or when the learner does not report in time.
        """
        model = await self._existing(model_id)
        if model is None:
            raise StaleEpoch(f"model {model_id} has no epoch {epoch}")
        async with model.lock:
            verdicts = model.machine.probe(epoch, replica, logprobs)
        for name, fault in verdicts.items():
            metrics.PROBES.labels("differs" if fault else "agrees").inc()
            if fault:
                log.error("replica %s of %s is unhealthy: %s", name, model_id, fault)
        model.judge(epoch, verdicts)
        if replica and replica not in verdicts:
            return await model.verdict(epoch, replica, deadline.budget(_VERDICT_SECONDS) * _SHARE)
        return verdicts.get(replica, "")

    async def begin(
        self, manifest: Manifest, *, publisher_epoch: int, replay: bool, min_replicas: int
    ) -> version_pb.WeightVersion:
        """Starts a version, or returns the one that the same request has started before."""
        await self._check_base(manifest)
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
            transaction, actions = model.machine.begin(manifest, epoch, min_replicas=min_replicas, now=time.monotonic())
            await model.remember(messages.to_version(transaction))
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
            if version.state in _ENDED:
                return
            last = version

    def replicas(self, model_id: str) -> list[Replica]:
        """Registered replicas of one model, or of all."""
        models = [self._models[model_id]] if model_id in self._models else [] if model_id else self._models.values()
        return [replica for model in models for replica in model.machine.fleet.replicas.values()]

    async def _check_base(self, manifest: Manifest) -> None:
        """An adapter stands on top of what its model's replicas serve."""
        if manifest.kind != "adapter":
            return
        base = run_of(manifest.model_id)  # a run's model is called like the run
        version, _ = await self.get(base, 0)
        epoch = version.epoch if version else 0
        if epoch != manifest.base_epoch:
            raise BaseMismatch(
                f"the adapter stands on epoch {manifest.base_epoch} of {base}, but epoch {epoch} is committed"
            )

    async def _model(self, model_id: str) -> Model:
        async with self._loading:
            if model_id not in self._models:
                last_epoch, committed = await self._store.load(model_id)
                machine = ModelVersions(model_id, self._rules, last_epoch=last_epoch, committed=committed)
                self._models[model_id] = model = Model(machine)
                assert self._group is not None, "use the coordinator inside `running`"
                self._tasks.append(self._group.create_task(self._carry_out(model)))
            return self._models[model_id]

    async def _existing(self, model_id: str) -> Model | None:
        """Reading must not create models: anyone may ask about any name."""
        if model_id in self._models or await self._store.last_epoch(model_id):
            return await self._model(model_id)
        return None

    def _known(self, model_id: str, name: str) -> Model:
        model = self._models.get(model_id)
        if model is None:
            raise UnknownReplica(f"replica {name} of {model_id} is not registered")
        return model

    async def _committed(self, model: Model) -> version_pb.WeightVersion | None:
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

    async def _version(self, model: Model, epoch: int) -> version_pb.WeightVersion | None:
        return model.versions.get(epoch) or await self._store.version(model.machine.model_id, epoch)

    async def _carry_out(self, model: Model) -> None:
        while (action := await model.outbox.get()) is not None:
            metrics.REPLICAS.set(sum(len(each.machine.fleet.replicas) for each in self._models.values()))
            if isinstance(action, Persist):
                await self._persist(model, action)
                continue
            if isinstance(action, Dismiss):
                log.warning("replica %s of %s leaves: %s", action.replica, model.machine.model_id, action.reason)
            model.tell(action)

    async def _persist(self, model: Model, action: Persist) -> None:
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
        await model.remember(messages.to_version(action.transaction))
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
