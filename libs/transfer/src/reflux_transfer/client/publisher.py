"""Publishes weights through the broker: stage, begin, wait for the outcome, free or pin the arena."""

import asyncio
import logging
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from grpc.aio import AioRpcError, Channel

from reflux.weight_broker.v1 import weight_broker_service_pb2 as pb
from reflux.weight_broker.v1.weight_broker_service_pb2_grpc import WeightBrokerServiceStub
from reflux.weight_broker.v1.weight_version_pb2 import ReplicaState, WeightVersion
from reflux_kit.errors import reason_of
from reflux_kit.telemetry import span
from reflux_transfer.arena import PublisherArenas, StagedWeights
from reflux_transfer.client.wire import to_slots
from reflux_transfer.errors import TransferError

log = logging.getLogger(__name__)

_PAUSE_SECONDS = 0.2
_CALL_SECONDS = 10.0
_SLACK_SECONDS = 5.0
_SYNC = "sync"
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class PublishAborted(TransferError, RuntimeError):
    """The version was given up everywhere, the old one stays; the text is the broker's or the failing replica's."""


class PublishRefused(TransferError, RuntimeError):
    """The broker does not begin the version: other tensors, a lower version, or another publisher is busy."""


class PublisherFenced(TransferError, RuntimeError):
    """Another publisher of the model took over: this process must not publish again."""


@dataclass(frozen=True)
class Published:
    """A committed version and what it took. `transfer_seconds` is the slowest replica's pull."""

    version: int
    epoch: int
    stage_seconds: float
    sync_seconds: float
    prepare_seconds: float
    transfer_seconds: float
    commit_seconds: float
    bytes: int
    replicas: tuple[ReplicaState, ...]


class BrokerPublisher:
    """The one publisher of a model; one version after the other. A fresh one takes over from its predecessor."""

    def __init__(self, channel: Channel, model_id: str, arenas: PublisherArenas) -> None:
        self._stub = WeightBrokerServiceStub(channel)
        self._model_id = model_id
        self._arenas = arenas
        self._epoch: int | None = None
        self._floor = 0
        self._replay = True

    def restored(self, epoch: int = 0) -> None:
        """The weights came from a checkpoint of `epoch`: the next version may be lower than the committed one."""
        self._replay, self._floor = True, max(self._floor, epoch)

    async def publish(
        self, tensors: Mapping[str, Any], version: int, *, sync_timeout_seconds: float, min_replicas: int = 0
    ) -> Published:
        """`stage` and `distribute`."""
        staged = await self.stage(tensors, sync_timeout_seconds)
        return await self.distribute(
            staged, version, sync_timeout_seconds=sync_timeout_seconds, min_replicas=min_replicas
        )

    async def stage(self, tensors: Mapping[str, Any], deadline_seconds: float) -> StagedWeights:
        """Copies name -> C-contiguous buffer into the free arena; afterwards the tensors may change again.

        Raises `ArenasBusy` or `LayoutError`.
        """
        return await asyncio.to_thread(self._arenas.stage, tensors, deadline_seconds)

    async def distribute(
        self,
        staged: StagedWeights,
        version: int,
        *,
        sync_timeout_seconds: float,
        min_replicas: int = 0,
        request_id: str = "",
    ) -> Published:
        """Brings staged weights to all replicas; the replicas have the timeout to prepare and again to commit.

        Raises `PublishAborted`, `PublishRefused`, `PublisherFenced`, or `AioRpcError` when the broker stays away.
        """
        start = time.monotonic()
        seconds = 2 * sync_timeout_seconds + _SLACK_SECONDS
        self._arenas.lease(staged.generation, _SYNC, seconds)
        try:
            with span("weights.publish", version=version):
                request = self._request(staged, version, request_id or str(uuid.uuid4()))
                request.sync_timeout_seconds, request.min_replicas = sync_timeout_seconds, min_replicas
                outcome, first = await self._distribute(request, start + seconds)
            if outcome.state != WeightVersion.STATE_COMMITTED:
                raise PublishAborted(f"epoch {outcome.epoch} (version {version}) was aborted: {outcome.error}")
            if first:
                self._arenas.pin(staged.generation)
        finally:
            self._arenas.release(staged.generation, _SYNC)
        self._replay = False
        return Published(
            version,
            outcome.epoch,
            staged.stage_seconds,
            time.monotonic() - start,
            outcome.prepare_seconds,
            max((replica.transfer_seconds for replica in outcome.replicas), default=0.0),
            outcome.commit_seconds,
            outcome.bytes,
            tuple(outcome.replicas),
        )

    async def _distribute(self, request: pb.BeginVersionRequest, end: float) -> tuple[WeightVersion, bool]:
        """Begins and follows a version over restarts of the broker; `end` is a monotonic time.

        The flag is False when an earlier call with this request id had committed it already, from another arena.
        """
        attempts = 0
        while True:
            try:
                request.publisher_epoch = await self._known_epoch()
                begun = await self._stub.BeginVersion(request, timeout=_CALL_SECONDS)
                self._epoch = begun.version.epoch
                known = attempts == 0 and begun.version.state == WeightVersion.STATE_COMMITTED
                return await self._outcome(begun.version, end), not known
            except AioRpcError as error:
                if error.code() in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.ABORTED):
                    kind = PublisherFenced if reason_of(error) == "PUBLISHER_FENCED" else PublishRefused
                    raise kind(error.details() or error.code().name) from None
                if error.code() not in _AWAY or time.monotonic() > end:
                    raise
                attempts += 1
                log.warning("the weight broker is away (%s), trying on", error.details())
                await asyncio.sleep(_PAUSE_SECONDS)

    async def _outcome(self, version: WeightVersion, end: float) -> WeightVersion:
        request = pb.WatchVersionRequest(model_id=self._model_id, epoch=version.epoch)
        async for change in self._stub.WatchVersion(request, timeout=max(_PAUSE_SECONDS, end - time.monotonic())):
            version = change.version
        return version

    async def _known_epoch(self) -> int:
        """The token: asked for once, then only what this publisher has begun itself."""
        if self._epoch is None:
            request = pb.GetVersionRequest(model_id=self._model_id)
            try:
                self._epoch = (await self._stub.GetVersion(request, timeout=_CALL_SECONDS)).last_epoch
            except AioRpcError as error:
                if error.code() is not grpc.StatusCode.NOT_FOUND:
                    raise
                self._epoch = 0
        return max(self._epoch, self._floor)

    def _request(self, staged: StagedWeights, version: int, request_id: str) -> pb.BeginVersionRequest:
        return pb.BeginVersionRequest(
            request_id=request_id,
            model_id=self._model_id,
            version=version,
            layout=to_slots(self._arenas.layout),
            checksums=staged.checksums,
            slice_bytes=self._arenas.slice_bytes,
            region_handle=staged.handle,
            transport=self._arenas.transport,
            replay=self._replay,
        )
