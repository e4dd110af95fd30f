"""Follows a model's versions: PREPARE and COMMIT go to the replica's receiver, and what it has is offered to others."""

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
from grpc.aio import AioRpcError, Channel

from reflux.weight_broker.v1 import weight_broker_service_pb2 as pb
from reflux.weight_broker.v1.weight_broker_service_pb2_grpc import WeightBrokerServiceStub
from reflux_kit.errors import reason_of
from reflux_kit.telemetry import span
from reflux_transfer.client import wire
from reflux_transfer.client.leases import keep_leases
from reflux_transfer.client.offer import Offer, Prepared, Route, SourceRegion, is_packed
from reflux_transfer.client.receiver import Apply, Receiver
from reflux_transfer.errors import ReadCancelled, TransferError
from reflux_weightplan.spec import SpecLayout
from reflux_weightplan.wire import layout_hash

log = logging.getLogger(__name__)

_PAUSE_SECONDS = 0.2
_MAX_PAUSE_SECONDS = 2.0
_CALL_SECONDS = 10.0
_PULL_SECONDS = 3600.0
_VERDICT_SECONDS = 60.0
"""The broker answers a probe when the learner has scored it too."""

_ROUTES = 4
_FATAL = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAUTHENTICATED)

Probe = Callable[[Sequence[int]], Awaitable[Sequence[float]]]
"""Log-prob of every token of a prompt after the first, under the weights that are served."""

_Asked = tuple[int, int, tuple[SourceRegion, ...]]
"""Epoch, kind and sources of a PREPARE."""


class BrokerSubscriber:
    """One rank's side of the protocol. Run `run()` as a task for the replica's life; it reconnects by itself."""

    def __init__(
        self,
        channel: Channel,
        *,
        replica: str,
        model_id: str,
        layout: SpecLayout,
        receiver: Receiver,
        apply: Apply,
        rank: int = 0,
        probe: Probe | None = None,
        judged: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`layout` is that of all ranks of the replica, of which this process is `rank`.

        `probe` scores the publisher's probe prompt after a commit; the broker compares it with the learner's score.
        `judged` gets what it says is wrong with it, empty when nothing is.
        """
        self._stub = WeightBrokerServiceStub(channel)
        self._replica, self._model_id, self._rank = replica, model_id, rank
        self._layout, self._hash = layout, layout_hash(layout)
        self._incarnation = str(uuid.uuid4())
        self._receiver, self._apply, self._probe = receiver, apply, probe
        self._judged = judged
        self._routes: dict[tuple[str, bool], Route] = {}
        self._pull: asyncio.Task[None] | None = None
        self._probing: asyncio.Task[None] | None = None
        self._leases: asyncio.Task[None] | None = None
        self._cancelled = threading.Event()
        self._asked: _Asked | None = None
        self._pulling = False
        self._prepared: Prepared | None = None
        self._regions: tuple[SourceRegion, ...] = ()
        self.version = 0
        self.epoch = 0
        """What the replica serves; 0 before the first commit, and while its weights are a mixture."""

        self.fingerprint = 0
        """Of the version that is served, see `fingerprint.tree`."""

    async def run(self) -> None:
        """Registers and follows events until it is cancelled.

        Raises only what `apply` raises and what registering refuses.
        """
        try:
            await self._follow()
        finally:
            await self._stop_pull()
            for task in (self._leases, self._probing):
                if task:
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
            await self._receiver.close()

    async def _follow(self) -> None:
        pause = _PAUSE_SECONDS
        while True:
            try:
                await self._register()
                if self._leases is None and (arenas := self._receiver.arenas):
                    keeper = keep_leases(self._stub, self._model_id, self._replica, arenas)
                    self._leases = asyncio.create_task(keeper)
                watch = pb.WatchVersionsRequest(
                    replica=self._replica, model_id=self._model_id, incarnation=self._incarnation
                )
                async for event in self._stub.WatchVersions(watch):
                    pause = _PAUSE_SECONDS
                    await self._handle(event)
                reason = "the stream ended"
            except AioRpcError as error:
                if error.code() in _FATAL:
                    raise  # another layout, a wrong token: no repetition will help
                reason = f"{error.code().name}: {error.details()}"
            log.warning("replica %s lost the weight broker (%s), registering again", self._replica, reason)
            await asyncio.sleep(pause)
            pause = min(_MAX_PAUSE_SECONDS, 2 * pause)

    async def _register(self) -> None:
        request = pb.RegisterReplicaRequest(
            replica=self._replica,
            model_id=self._model_id,
            incarnation=self._incarnation,
            epoch=self.epoch,
            version=self.version,
            layout_hash=self._hash,
            rank=self._rank,
            ranks=self._layout.mesh.ranks,
            mode=wire.MODES[self._receiver.mode],
            fingerprint=self.fingerprint,
        )
        try:
            await self._stub.RegisterReplica(request, timeout=_CALL_SECONDS)
        except AioRpcError as error:
            if reason_of(error) != wire.UNKNOWN_LAYOUT:
                raise
            await wire.put_layout(self._stub, self._layout)
            await self._stub.RegisterReplica(request, timeout=_CALL_SECONDS)
        if self.epoch and self._regions:  # a broker that was restarted does not know who serves what
            committed = pb.AckVersionRequest.OUTCOME_COMMITTED
            await self._acknowledge(self.epoch, committed, self._regions, fingerprint=self.fingerprint)

    async def _handle(self, event: pb.WatchVersionsResponse) -> None:
        epoch = event.version.epoch
        if event.event == pb.WatchVersionsResponse.EVENT_PREPARE:
            asked = (epoch, event.kind, tuple(wire.from_region(region) for region in event.regions))
            if asked == self._asked and self._pulling:
                return  # asked again after a reconnect
            await self._stop_pull()
            again, self._asked = asked == self._asked, asked
            self._cancelled = threading.Event()
            self._pull = asyncio.create_task(self._prepare(event, asked[2], again))
        elif event.event == pb.WatchVersionsResponse.EVENT_COMMIT:
            await self._commit(epoch, event.probe_token_ids)
        elif event.event == pb.WatchVersionsResponse.EVENT_ABORT:
            await self._stop_pull()
            if self._prepared and self._prepared.epoch == epoch:
                self._prepared = None

    async def _stop_pull(self) -> None:
        """Two pulls must never write into the same memory: waits until the thread has noticed."""
        if self._pull:
            self._cancelled.set()
            await asyncio.gather(self._pull, return_exceptions=True)
            self._pull = None

    async def _prepare(self, event: pb.WatchVersionsResponse, regions: tuple[SourceRegion, ...], again: bool) -> None:
        epoch = event.version.epoch
        held = self._prepared
        if held is None or held.epoch != epoch or not again:
            if self.epoch == epoch and held is None:
                # It is served already: another rank of the replica is behind, or an answer was lost.
                await self._acknowledge(epoch, pb.AckVersionRequest.OUTCOME_PREPARED, fingerprint=self.fingerprint)
                return
            self._prepared, self._pulling = None, True
            try:
                with span("weights.pull", epoch=epoch, source=regions[0].transport if regions else ""):
                    offer = await self._offer(event, regions)
                    self._prepared = held = await self._receiver.prepare(offer, self._cancelled.is_set)
            except ReadCancelled:
                return
            except Exception as error:  # task boundary: whatever it is, the publisher is told
                self._asked = None  # the answer may be to try just the same again
                await self._failed(epoch, error)
                return
            finally:
                self._pulling = False
        fields = {"bytes": held.report.bytes, "transfer_seconds": held.report.seconds}
        prepared = pb.AckVersionRequest.OUTCOME_PREPARED
        await self._acknowledge(epoch, prepared, held.regions, fingerprint=held.fingerprint, **fields)

    async def _offer(self, event: pb.WatchVersionsResponse, regions: tuple[SourceRegion, ...]) -> Offer:
        seconds = event.timeout_seconds or _PULL_SECONDS
        deadline, name = time.monotonic() + seconds, event.layout_hash
        packed = is_packed(regions, name, self._hash)
        if (name, packed) not in self._routes:
            source = self._layout if name == self._hash else await wire.get_layout(self._stub, name)
            while len(self._routes) >= _ROUTES:
                self._routes.pop(next(iter(self._routes)))
            made = await asyncio.to_thread(Route, source, self._layout, self._rank, packed=packed)
            self._routes[name, packed] = made
        kind, version = wire.kind_of(event.kind), event.version
        route = self._routes[name, packed]
        return Offer(version.version, version.epoch, kind, regions, route, deadline, seconds)

    async def _commit(self, epoch: int, probe_token_ids: Sequence[int]) -> None:
        prepared, pause_ms = self._prepared, 0.0
        if prepared and prepared.epoch == epoch:
            self._prepared, self._asked = None, None
            try:
                served, pause_ms = await self._receiver.commit(prepared, self._apply)
            except TransferError as error:  # mode in_place: what lies there is no version any more
                self.epoch = self.version = self.fingerprint = 0
                self._regions = ()
                await self._failed(epoch, error)
                return
            self.epoch, self.version, self.fingerprint = epoch, served.version, served.fingerprint
            self._regions = served.regions
            log.info("replica %s serves version %d (epoch %d)", self._replica, self.version, epoch)
        elif self.epoch != epoch:
            await self._failed(epoch, RuntimeError("the epoch was not prepared"))
            return
        committed = pb.AckVersionRequest.OUTCOME_COMMITTED
        await self._acknowledge(epoch, committed, self._regions, fingerprint=self.fingerprint, pause_ms=pause_ms)
        if self._probe and probe_token_ids and (self._probing is None or self._probing.done()):
            self._probing = asyncio.create_task(self._score(self._probe, epoch, probe_token_ids))

    async def _score(self, probe: Probe, epoch: int, token_ids: Sequence[int]) -> None:
        logprobs = await probe(token_ids)
        request = pb.ReportProbeRequest(model_id=self._model_id, epoch=epoch, replica=self._replica, logprobs=logprobs)
        try:
            answer = await self._stub.ReportProbe(request, timeout=_VERDICT_SECONDS)
            self._judged(answer.fault)
        except AioRpcError as error:
            log.info("the probe of epoch %d was not taken: %s", epoch, error.details())

    async def _failed(self, epoch: int, error: Exception) -> None:
        log.warning("replica %s cannot take epoch %d: %s", self._replica, epoch, error)
        text, reason = f"{type(error).__name__}: {error}", wire.failure_of(error)
        await self._acknowledge(epoch, pb.AckVersionRequest.OUTCOME_FAILED, error=text, reason=reason)

    async def _acknowledge(
        self,
        epoch: int,
        outcome: pb.AckVersionRequest.Outcome.ValueType,
        regions: Sequence[SourceRegion] = (),
        **fields: Any,
    ) -> None:
        request = pb.AckVersionRequest(
            replica=self._replica,
            model_id=self._model_id,
            epoch=epoch,
            outcome=outcome,
            incarnation=self._incarnation,
            rank=self._rank,
            regions=[wire.to_region(region) for region in regions],
            **fields,
        )
        try:
            await self._stub.AckVersion(request, timeout=_CALL_SECONDS)
        except AioRpcError as error:
            # Overtaken, or the broker is away: it asks again, in the stream or after a new registration.
            log.info("epoch %d was not acknowledged: %s", epoch, error.details())
