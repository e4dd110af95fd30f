"""Begins versions with the broker and waits for their ends, over its restarts; knows the publisher's epoch token."""

import asyncio
import logging
import time

import grpc
from grpc.aio import AioRpcError, Channel

from reflux.weight_broker.v1 import weight_broker_service_pb2 as pb
from reflux.weight_broker.v1.weight_broker_service_pb2_grpc import WeightBrokerServiceStub
from reflux.weight_broker.v1.weight_version_pb2 import WeightVersion
from reflux_kit.errors import reason_of
from reflux_transfer.client import wire
from reflux_transfer.errors import TransferError
from reflux_weightplan.spec import SpecLayout

log = logging.getLogger(__name__)

_PAUSE_SECONDS = 0.2
CALL_SECONDS = 10.0
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class PublishRefused(TransferError, RuntimeError):
    """The broker does not begin the version: other tensors, a lower version, or another publisher is busy."""


class PublisherFenced(TransferError, RuntimeError):
    """Another publisher of the model took over: this process must not publish again."""


class Announcer:
    """One model's versions as the broker sees them. Methods raise `PublishRefused`, `PublisherFenced`, or `AioRpcError`
    when the broker stays away; `end` is a monotonic time.
    """

    def __init__(self, channel: Channel, model_id: str, layout: SpecLayout) -> None:
        self.stub = WeightBrokerServiceStub(channel)
        self.floor = 0
        """Epoch that a checkpoint knows: the next one is higher."""

        self.epoch: int | None = None
        """Highest epoch that is known; None before the broker was asked."""

        self._model_id, self._layout = model_id, layout

    async def announce(self, request: pb.BeginVersionRequest, end: float) -> tuple[WeightVersion, bool]:
        """Begins a version. True: an earlier call with the same request id had it committed already."""
        first = True
        while True:
            try:
                request.publisher_epoch = await self._known_epoch()
                begun = await self.stub.BeginVersion(request, timeout=CALL_SECONDS)
                self.epoch = begun.version.epoch
                return begun.version, first and begun.version.state == WeightVersion.STATE_COMMITTED
            except AioRpcError as error:
                if reason_of(error) == wire.UNKNOWN_LAYOUT:
                    await wire.put_layout(self.stub, self._layout)
                    continue
                await self._bear(error, end)
                first = False

    async def settle(self, request: pb.BeginVersionRequest, version: WeightVersion, end: float) -> WeightVersion:
        """Follows a version to its end, over restarts of the broker: it is asked again by the same request."""
        while True:
            try:
                return await self._outcome(version, end)
            except AioRpcError as error:
                await self._bear(error, end)
            version, _ = await self.announce(request, end)

    async def _bear(self, error: AioRpcError, end: float) -> None:
        """Waits a moment when the broker is away; raises for every other error."""
        if error.code() in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.ABORTED):
            kind = PublisherFenced if reason_of(error) == "PUBLISHER_FENCED" else PublishRefused
            raise kind(error.details() or error.code().name) from None
        if error.code() not in _AWAY or time.monotonic() > end:
            raise error
        log.warning("the weight broker is away (%s), trying on", error.details())
        await asyncio.sleep(_PAUSE_SECONDS)

    async def _outcome(self, version: WeightVersion, end: float) -> WeightVersion:
        request = pb.WatchVersionRequest(model_id=self._model_id, epoch=version.epoch)
        async for change in self.stub.WatchVersion(request, timeout=max(_PAUSE_SECONDS, end - time.monotonic())):
            version = change.version
        return version

    async def _known_epoch(self) -> int:
        """The token: asked for once, then only what this publisher has begun itself."""
        if self.epoch is None:
            request = pb.GetVersionRequest(model_id=self._model_id)
            try:
                self.epoch = (await self.stub.GetVersion(request, timeout=CALL_SECONDS)).last_epoch
            except AioRpcError as error:
                if error.code() is not grpc.StatusCode.NOT_FOUND:
                    raise
                self.epoch = 0
        return max(self.epoch, self.floor)
