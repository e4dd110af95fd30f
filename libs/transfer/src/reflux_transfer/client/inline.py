"""Follows versions whose layout and checksums travel in their messages; for replicas that have not moved yet."""

import asyncio
import logging
import threading
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc
from grpc.aio import AioRpcError, Channel

from reflux.weight_broker.v1 import weight_broker_service_pb2 as pb
from reflux.weight_broker.v1.weight_broker_service_pb2_grpc import WeightBrokerServiceStub
from reflux_kit.telemetry import span
from reflux_transfer.arena import ReplicaArenas
from reflux_transfer.backends.base import TransferBackend
from reflux_transfer.client.offer import Update
from reflux_transfer.client.wire import to_slices, to_slots
from reflux_transfer.errors import ReadCancelled
from reflux_transfer.pull import PullReport, fingerprint, pull
from reflux_transfer.registry import open_backend

log = logging.getLogger(__name__)

_PAUSE_SECONDS = 0.2
_MAX_PAUSE_SECONDS = 2.0
_CALL_SECONDS = 10.0
_PULL_SECONDS = 3600.0
_FATAL = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAUTHENTICATED)
_NOTHING = PullReport(0, 0, 0.0, 0.0)


@dataclass(frozen=True)
class Received:
    """Verified bytes of an epoch; `fingerprint` as in `pull.fingerprint`."""

    epoch: int
    report: PullReport
    fingerprint: int


Apply = Callable[[Update], Awaitable[float]]
"""Swaps to the update between two decode steps and returns the milliseconds that decoding stood still.

When it returns nobody reads the other buffer any more: the next version is pulled into it.
"""

Receive = Callable[[pb.WatchVersionsResponse, Callable[[], bool]], Awaitable[Received]]
"""Has a PREPARE event's bytes pulled into memory of another process, an engine's worker, instead of the arenas.

Ends soon with `ReadCancelled` after the given function turns true.
"""


class InlineSubscriber:
    """One replica's side of the protocol. Run `run()` as a task for the replica's life; it reconnects by itself."""

    def __init__(
        self,
        channel: Channel,
        *,
        replica: str,
        model_id: str,
        arenas: ReplicaArenas,
        apply: Apply,
        receive: Receive | None = None,
    ) -> None:
        """With `receive` the arenas only lend their layout; their buffers are never touched, so they take no memory."""
        self._stub = WeightBrokerServiceStub(channel)
        self._replica, self._model_id = replica, model_id
        self._incarnation = str(uuid.uuid4())
        self._arenas, self._apply = arenas, apply
        self._receive = receive or self._into_shadow
        self._backends: dict[str, TransferBackend] = {}
        self._pull: asyncio.Task[None] | None = None
        self._cancelled = threading.Event()
        self._pulling = 0
        self._prepared: Received | None = None
        self.version = 0
        self.epoch = 0
        """What the replica serves; 0 before the first commit."""

        self.fingerprint = 0
        """xxh3_64 over the served parameters in layout order."""

    async def run(self) -> None:
        """Registers and follows events until it is cancelled.

        Raises only what `apply` raises and what registering refuses.
        """
        pause = _PAUSE_SECONDS
        try:
            while True:
                try:
                    await self._register()
                    async for event in self._stub.WatchVersions(self._watch_request()):
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
        finally:
            await self._stop_pull()
            for backend in self._backends.values():
                await asyncio.to_thread(backend.close)

    async def _register(self) -> None:
        request = pb.RegisterReplicaRequest(
            replica=self._replica,
            model_id=self._model_id,
            layout=to_slots(self._arenas.layout),
            incarnation=self._incarnation,
            epoch=self.epoch,
            version=self.version,
        )
        await self._stub.RegisterReplica(request, timeout=_CALL_SECONDS)

    def _watch_request(self) -> pb.WatchVersionsRequest:
        return pb.WatchVersionsRequest(replica=self._replica, model_id=self._model_id, incarnation=self._incarnation)

    async def _handle(self, event: pb.WatchVersionsResponse) -> None:
        epoch = event.version.epoch
        if event.event == pb.WatchVersionsResponse.EVENT_PREPARE:
            if self._pulling == epoch and self._pull and not self._pull.done():
                return  # asked again after a reconnect
            await self._stop_pull()
            self._cancelled, self._pulling = threading.Event(), epoch
            self._pull = asyncio.create_task(self._prepare(event))
        elif event.event == pb.WatchVersionsResponse.EVENT_COMMIT:
            await self._commit(epoch, event.version.version)
        elif event.event == pb.WatchVersionsResponse.EVENT_ABORT:
            await self._stop_pull()
            if self._prepared and self._prepared.epoch == epoch:
                self._prepared = None

    async def _stop_pull(self) -> None:
        """Two pulls must never write into the shadow at the same time: waits until the thread has noticed."""
        if self._pull:
            self._cancelled.set()
            await asyncio.gather(self._pull, return_exceptions=True)
            self._pull = None

    async def _prepare(self, event: pb.WatchVersionsResponse) -> None:
        epoch, report = event.version.epoch, _NOTHING
        if self.epoch != epoch and (self._prepared is None or self._prepared.epoch != epoch):
            self._prepared = None
            try:
                with span("weights.pull", epoch=epoch, transport=event.transport):
                    self._prepared = await self._receive(event, self._cancelled.is_set)
            except ReadCancelled:
                return
            except Exception as error:  # task boundary: whatever it is, the publisher is told
                log.warning("replica %s cannot prepare epoch %d: %s", self._replica, epoch, error)
                text = f"{type(error).__name__}: {error}"
                await self._acknowledge(epoch, pb.AckVersionRequest.OUTCOME_FAILED, error=text)
                return
            report = self._prepared.report
        outcome = pb.AckVersionRequest.OUTCOME_PREPARED
        await self._acknowledge(epoch, outcome, bytes=report.bytes, transfer_seconds=report.seconds)

    async def _into_shadow(self, event: pb.WatchVersionsResponse, cancelled: Callable[[], bool]) -> Received:
        return await asyncio.to_thread(self._pull_into_shadow, event, cancelled)

    def _pull_into_shadow(self, event: pb.WatchVersionsResponse, cancelled: Callable[[], bool]) -> Received:
        backend = self._backends.get(event.transport)
        if backend is None:
            backend = self._backends[event.transport] = open_backend(event.transport)
        local = self._arenas.shadow_region(backend)
        remote = backend.open(event.region_handle)
        try:
            slices = to_slices(event.slices)
            report = pull(backend, remote, local, slices, deadline_seconds=_PULL_SECONDS, cancelled=cancelled)
        finally:
            backend.release(remote)
        return Received(event.version.epoch, report, fingerprint(local.view, self._arenas.layout))

    async def _commit(self, epoch: int, version: int) -> None:
        pause_ms = 0.0
        if self.epoch != epoch:
            if self._prepared is None or self._prepared.epoch != epoch:
                await self._acknowledge(epoch, pb.AckVersionRequest.OUTCOME_FAILED, error="the epoch was not prepared")
                return
            index = self._arenas.shadow_index
            pause_ms = await self._apply(Update(version, epoch, index, self._arenas.buffers[index]))
            self._arenas.swap()
            self.epoch, self.version, self.fingerprint = epoch, version, self._prepared.fingerprint
            self._prepared = None
            log.info("replica %s serves version %d (epoch %d)", self._replica, version, epoch)
        outcome = pb.AckVersionRequest.OUTCOME_COMMITTED
        await self._acknowledge(epoch, outcome, fingerprint=self.fingerprint, pause_ms=pause_ms)

    async def _acknowledge(self, epoch: int, outcome: pb.AckVersionRequest.Outcome.ValueType, **fields: object) -> None:
        request = pb.AckVersionRequest(
            replica=self._replica, model_id=self._model_id, epoch=epoch, outcome=outcome, incarnation=self._incarnation
        )
        for name, value in fields.items():
            setattr(request, name, value)
        try:
            await self._stub.AckVersion(request, timeout=_CALL_SECONDS)
        except AioRpcError as error:
            # Overtaken, or the broker is away: it asks again, in the stream or after a new registration.
            log.info("epoch %d was not acknowledged: %s", epoch, error.details())
