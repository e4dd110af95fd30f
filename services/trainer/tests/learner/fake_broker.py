"""A broker with one replica inside: it pulls what is published, verifies it, and commits or aborts."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np

from reflux.weight_broker.v1 import weight_broker_service_pb2 as pb
from reflux.weight_broker.v1.weight_broker_service_pb2_grpc import (
    WeightBrokerServiceServicer,
    add_WeightBrokerServiceServicer_to_server,
)
from reflux.weight_broker.v1.weight_version_pb2 import WeightVersion
from reflux_kit.server import Mount
from reflux_transfer.layout import Layout, TensorSlot
from reflux_transfer.pull import Slice, pull
from reflux_transfer.registry import open_backend


class FakeBroker(WeightBrokerServiceServicer):
    """Commits every version, or aborts it when `refuse` is set; waits for `gate` before it pulls."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.arrived = asyncio.Event()
        self.refuse = ""
        self.begun: list[pb.BeginVersionRequest] = []
        self.weights: dict[str, np.ndarray] = {}
        self._versions: dict[int, WeightVersion] = {}

    def mount(self) -> Mount:
        name = pb.DESCRIPTOR.services_by_name["WeightBrokerService"].full_name
        return Mount(self, add_WeightBrokerServiceServicer_to_server, name)

    async def GetVersion(self, request: pb.GetVersionRequest, context: Any) -> pb.GetVersionResponse:
        await context.abort(grpc.StatusCode.NOT_FOUND, "no version yet")
        raise AssertionError

    async def BeginVersion(self, request: pb.BeginVersionRequest, context: Any) -> pb.BeginVersionResponse:
        self.arrived.set()
        await self.gate.wait()
        self.begun.append(request)
        epoch = len(self.begun)
        state = WeightVersion.STATE_ABORTED if self.refuse else WeightVersion.STATE_COMMITTED
        self._versions[epoch] = WeightVersion(
            model_id=request.model_id, version=request.version, epoch=epoch, state=state, error=self.refuse
        )
        if not self.refuse:
            self.weights = await asyncio.to_thread(_pulled, request)
        begun = WeightVersion(model_id=request.model_id, version=request.version, epoch=epoch)
        return pb.BeginVersionResponse(version=begun)

    async def WatchVersion(
        self, request: pb.WatchVersionRequest, context: Any
    ) -> AsyncIterator[pb.WatchVersionResponse]:
        yield pb.WatchVersionResponse(version=self._versions[request.epoch])


def _pulled(request: pb.BeginVersionRequest) -> dict[str, np.ndarray]:
    slots = [
        TensorSlot(slot.name, tuple(slot.shape), slot.dtype, slot.offset_bytes, slot.length_bytes)
        for slot in request.layout
    ]
    layout = Layout(tuple(slots))
    pieces = list(layout.pieces(request.slice_bytes))
    slices = [
        Slice(piece.slot.name, piece.slot.offset + piece.start, piece.slot.offset + piece.start, piece.length, checksum)
        for piece, checksum in zip(pieces, request.checksums, strict=True)
    ]
    backend = open_backend(request.transport)
    local, remote = backend.allocate(layout.region_bytes), backend.open(request.region_handle)
    pull(backend, remote, local, slices, deadline_seconds=10.0)
    weights = {
        slot.name: np.frombuffer(bytes(local.view[slot.offset : slot.end]), np.float32).reshape(slot.shape)
        for slot in slots
    }
    backend.release(remote)
    backend.close()
    return weights
