"""Sampling of one base model: calls of one prompt are drawn together, on the replica that holds their weights."""

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING
from uuid import uuid4

import grpc
from redis.exceptions import RedisError

from reflux.common.v1 import common_pb2
from reflux.inference_gateway.v1 import inference_gateway_service_pb2 as gateway_pb
from reflux.trainer.v1 import learner_service_pb2 as learner_pb
from reflux_kit.errors import InvalidRequest, ServiceError
from reflux_storage.errors import StorageError
from reflux_trainer.peers import Peers
from reflux_trainer.tinker import metrics
from reflux_trainer.tinker.calls import Call, Group, group_key, sampling_params, say, wish
from reflux_trainer.tinker.catalog import Catalog
from reflux_trainer.tinker.fleet import Fleet
from reflux_trainer.tinker.futures import PROTOBUF, FutureTable, Outcome
from reflux_trainer.tinker.link import LearnerGone, LearnerLink, Refused
from reflux_trainer.tinker.records import Sampler, Weights
from reflux_trainer.tinker.settings import TinkerSettings
from reflux_trainer.tinker.slots import Slot, SlotTable
from reflux_trainer.tinker.wire import render_samples

if TYPE_CHECKING:
    from reflux.trainer.v1.learner_service_pb2_grpc import LearnerServiceAsyncStub

log = logging.getLogger(__name__)
_GATHER_SECONDS = 0.004
"""Calls of one prompt that come so close together are one group: it is prefilled once."""
_SLICE_SECONDS = 2.0
_TURN_SECONDS = 0.5
_RETRY_SECONDS = 0.3
_GROUP_SECONDS = 3600.0
_MAX_GROUP = 1024


class SamplingFailed(RuntimeError):
    """The replica did not get its weights, or the gateway did not give all samples."""


class SamplingDesk:
    """Owns the open calls of one base model, their groups, and which weights its replicas hold."""

    def __init__(
        self,
        fleet: Fleet,
        link: LearnerLink,
        peers: Peers,
        catalog: Catalog,
        futures: FutureTable,
        settings: TinkerSettings,
        store_url: str,
    ) -> None:
        self._fleet, self._link, self._peers = fleet, link, peers
        self._catalog, self._futures, self._settings, self._store_url = catalog, futures, settings, store_url
        slots = [Slot(index) for index in range(settings.samplers_per_base)]
        self._table = SlotTable(slots, _SLICE_SECONDS)
        self._changed = asyncio.Event()
        self._locks = [asyncio.Lock() for _ in slots]
        self._gathering: dict[tuple[object, ...], Group] = {}
        self._calls: dict[tuple[str, int], Call] = {}
        self._groups: set[asyncio.Task[None]] = set()
        self._endings: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def busy(self) -> bool:
        """Whether calls are open."""
        return bool(self._calls)

    async def close(self) -> None:
        """Stops everything; open futures stay logged."""
        self._closed = True
        for task in self._groups:
            task.cancel()
        await asyncio.gather(*self._groups, return_exceptions=True)
        for task in self._endings:
            task.cancel()
        await asyncio.gather(*self._endings, return_exceptions=True)

    def find(self, sampler_id: str, seq_id: int) -> Call | None:
        """An open call."""
        return self._calls.get((sampler_id, seq_id))

    def add(self, call: Call) -> None:
        """Takes a logged call up. What comes while the trainer stops is left to the next one."""
        if self._closed:
            return
        self._calls[call.sampler.sampler_id, call.seq_id] = call
        key = group_key(call)
        group = self._gathering.get(key)
        if group is None or group.size + call.body.num_samples > _MAX_GROUP:
            group = self._gathering[key] = Group()
            task = asyncio.create_task(self._gather(key, group), name="tinker-group")
            self._groups.add(task)
            task.add_done_callback(self._groups.discard)
            group.calls.append(call)
            call.task = task
            return
        group.calls.append(call)
        call.task = next(iter(group.calls)).task

    async def cancel(self, call: Call) -> None:
        """Ends a call; its group is stopped when nobody wants it any more."""
        call.cancelled = True
        await self._end(call, Outcome(b"the client cancelled it", failed="user"))
        if call.task is not None and not any(
            each.task is call.task and not each.cancelled for each in self._calls.values()
        ):
            for key, group in list(self._gathering.items()):
                if group.calls[0].task is call.task:
                    del self._gathering[key]  # nobody joins a group that ends
            call.task.cancel()

    async def cancel_all(self, sampler_id: str) -> None:
        """Ends all calls of a sampler."""
        for call in [each for (owner, _), each in self._calls.items() if owner == sampler_id]:
            await self.cancel(call)

    async def _gather(self, key: tuple[object, ...], group: Group) -> None:
        await asyncio.sleep(_GATHER_SECONDS)
        if self._gathering.get(key) is group:
            del self._gathering[key]
        group.calls = [call for call in group.calls if not call.cancelled]
        try:
            await self._draw(group)
        except ServiceError as error:
            await self._fail(group, str(error), user=isinstance(error, InvalidRequest))
        except SamplingFailed as error:
            await self._fail(group, str(error), user=False)
        except Exception:  # the boundary of the task: a future must end whatever happens
            log.exception("sampling for %s failed", group.calls[0].sampler.sampler_id)
            await self._fail(group, "internal error; the trainer's log says more", user=False)

    async def _fail(self, group: Group, text: str, *, user: bool) -> None:
        for call in group.calls:
            await self._end(call, Outcome(text.encode(), failed="user" if user else "server"))

    async def _end(self, call: Call, outcome: Outcome) -> None:
        """Records an end, whole even when the group's task is cancelled meanwhile."""
        task = asyncio.create_task(self._record(call, outcome), name="tinker-end")
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)
        await asyncio.shield(task)

    async def _record(self, call: Call, outcome: Outcome) -> None:
        while self._calls.pop((call.sampler.sampler_id, call.seq_id), None) is not None:
            try:
                await self._futures.finish(call.sampler.sampler_id, call.seq_id, outcome)
            except (RedisError, StorageError) as error:
                log.warning("the end of a sample is not recorded yet (%s)", type(error).__name__)
                self._calls[call.sampler.sampler_id, call.seq_id] = call
                await asyncio.sleep(_RETRY_SECONDS)

    async def _draw(self, group: Group) -> None:
        """Draws a group's samples, again as long as the fleet is away, and ends its futures."""
        while group.calls:
            slot = await self._slot(group)
            try:
                samples = await self._generate(group, slot)
                break
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                    raise InvalidRequest(error.details() or "refused") from None
                log.info("sampling on %s failed (%s), again", self._fleet.base.slot(slot.index), error.details())
                say(group, f"the replica went away ({error.code().name}); it is tried again", paused=True)
                self._table.forget(slot)
                await asyncio.sleep(_RETRY_SECONDS)
            finally:
                self._table.give_back(slot, time.monotonic())
                self._wake()
        else:
            return
        metrics.GROUP_SAMPLES.observe(len(samples))
        await self._deliver(group, samples)

    async def _deliver(self, group: Group, samples: Sequence[common_pb2.Sample]) -> None:
        start = 0
        for call in group.calls:
            mine = samples[start : start + call.body.num_samples]
            start += call.body.num_samples
            try:
                outcome = Outcome(render_samples(mine, wish(call)), PROTOBUF)
            except ValueError as error:
                outcome = Outcome(str(error).encode(), failed="user")
            await self._end(call, outcome)

    async def _generate(self, group: Group, slot: Slot) -> list[common_pb2.Sample]:
        say(group, "is being drawn", paused=False)
        first = group.calls[0]
        request = gateway_pb.GenerateGroupRequest(
            request_id=f"tinker-{uuid4().hex}",
            model_id=self._fleet.base.slot(slot.index),
            prompt_token_ids=first.prompt,
            num_samples=group.size,
            sampling=sampling_params(first, self._fleet.base.max_context),
            tenant=first.sampler.tenant,
        )
        if first.sampler.kind == "inflight":
            request.min_version = slot.version
        else:
            request.version = slot.version
        self._fleet.used_at = time.monotonic()
        stream = self._peers.gateway.GenerateGroup(request, timeout=_GROUP_SECONDS)
        try:
            found = {answer.sample.index: answer.sample async for answer in stream}
        finally:
            stream.cancel()
        if sorted(found) != list(range(group.size)):
            raise SamplingFailed(f"the gateway sent {len(found)} of {group.size} samples")
        if any(sample.finish_reason == "abort" for sample in found.values()):
            raise SamplingFailed("an operator stopped the requests of this base model")
        return [found[index] for index in range(group.size)]

    async def _slot(self, group: Group) -> Slot:
        """A slot that holds the group's weights; the caller gives it back."""
        sampler = group.calls[0].sampler
        target = f"inflight:{sampler.model_id}" if sampler.kind == "inflight" else sampler.stored.key or "base"
        with self._table.queued(target):
            while (slot := self._table.take(target, time.monotonic())) is None:
                say(group, "all sampler replicas of this base model serve other weights", paused=True)
                await self._change()
        loaded = False
        try:
            async with self._locks[slot.index]:
                await self._load(group, sampler, slot, target)
            loaded = True
        finally:
            if not loaded:
                self._table.give_back(slot, time.monotonic())
                self._wake()
        return slot

    async def _load(self, group: Group, sampler: Sampler, slot: Slot, target: str) -> None:
        """Publishes the weights that the sampler wants now, unless the slot holds them."""
        weights = await self._catalog.newest(sampler.model_id) if sampler.kind == "inflight" else sampler.stored
        assert weights is not None
        # A learner that was replaced offers nothing: a replica that starts again could not fetch what it has to serve.
        source = self._link.incarnation or slot.source
        if slot.version > 0 and slot.target and (slot.weights, slot.source) == (weights.key, source):
            return
        say(group, "the weights are on their way to a replica", paused=True)
        slot.target, slot.version, slot.loading = target, 0, True  # others of this target join and wait for the lock
        version = 0
        try:
            version = await self._publish(group, slot.index, weights)
        finally:
            self._table.hold(slot, target, weights.key, version, self._link.incarnation)

    async def _publish(self, group: Group, index: int, weights: Weights) -> int:
        if not await self._fleet.replica_ready(index):
            raise SamplingFailed(f"the replicas of {self._fleet.base.name} did not start in time")
        base, attempts = self._fleet.base, 0
        while True:
            version = int(await self._peers.redis.incr(f"tinker:versions:{base.run}"))
            request = learner_pb.PublishWeightsRequest(
                request_id=str(uuid4()),
                model_id=base.run,
                publish_as=base.slot(index),
                merged_objects=weights.messages,
                store_url=self._store_url if weights.objects else "",
                version=version,
                min_replicas=1,
                sync_timeout_seconds=self._settings.sync_seconds,
            )
            try:
                await self._link.ready()
                await self._link.call(partial(_send, request, 2 * self._settings.sync_seconds + 10))
                metrics.PUBLISHES.inc()
                return version
            except LearnerGone as error:
                say(group, f"the learner starts again ({error})", paused=True)
            except Refused as error:
                attempts += not error.transient
                if attempts > 1:
                    raise SamplingFailed(f"the weights did not reach the replica: {error}") from None
                say(group, f"the weights did not reach the replica yet ({error})", paused=True)
            await asyncio.sleep(_RETRY_SECONDS)

    async def _change(self) -> None:
        """Returns when a slot may be free, or after a moment, since waiting for long changes whose turn it is."""
        try:
            async with asyncio.timeout(_TURN_SECONDS):
                await self._changed.wait()
        except TimeoutError:
            return

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


async def _send(
    request: learner_pb.PublishWeightsRequest, seconds: float, stub: "LearnerServiceAsyncStub"
) -> learner_pb.PublishWeightsResponse:
    return await stub.PublishWeights(request, timeout=seconds)
