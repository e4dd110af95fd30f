"""A broker with one replica inside: it follows what is published, verifies it, and commits or aborts."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import closing
from typing import Any, ClassVar

import grpc
import torch

from reflux.weight_broker.v1 import weight_broker_service_pb2 as pb
from reflux.weight_broker.v1 import weight_layout_pb2 as layout_pb
from reflux.weight_broker.v1.weight_broker_service_pb2_grpc import (
    WeightBrokerServiceServicer,
    add_WeightBrokerServiceServicer_to_server,
)
from reflux.weight_broker.v1.weight_version_pb2 import WeightVersion
from reflux_kit.errors import WrongState
from reflux_kit.server import Mount
from reflux_transfer.arenas.replica import ReplicaArenas
from reflux_transfer.client import wire
from reflux_transfer.client.layouts import from_message
from reflux_transfer.client.offer import Offer, Route, layout_of_rank
from reflux_transfer.client.swap import SwapReceiver
from reflux_transfer.registry import open_backend
from reflux_weightplan.mesh import Mesh
from reflux_weightplan.spec import SpecLayout, TensorSpec
from reflux_weightplan.wire import layout_hash


class UnknownLayout(WrongState):
    """Asks for the layout."""

    reason: ClassVar[str] = "UNKNOWN_LAYOUT"


class FakeBroker(WeightBrokerServiceServicer):
    """Commits every version, or aborts it when `refuse` is set; waits for `gate` before it does."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.arrived = asyncio.Event()
        self.refuse = ""
        self.begun: list[pb.BeginVersionRequest] = []
        self.probes: list[pb.ReportProbeRequest] = []
        self.paths: asyncio.Queue[pb.ReportPathsRequest] = asyncio.Queue()
        self.weights: dict[str, torch.Tensor] = {}
        self._layouts: dict[str, SpecLayout] = {}
        self._pulls: dict[int, asyncio.Task[int]] = {}

    def mount(self) -> Mount:
        name = pb.DESCRIPTOR.services_by_name["WeightBrokerService"].full_name
        return Mount(self, add_WeightBrokerServiceServicer_to_server, name)

    async def GetVersion(self, request: pb.GetVersionRequest, context: Any) -> pb.GetVersionResponse:
        await context.abort(grpc.StatusCode.NOT_FOUND, "no version yet")
        raise AssertionError

    async def PutLayout(self, request_iterator: AsyncIterator[pb.PutLayoutRequest], context: Any) -> Any:
        data = b"".join([part.chunk async for part in request_iterator])
        layout = from_message(layout_pb.WeightLayout.FromString(data))
        self._layouts[layout_hash(layout)] = layout
        return pb.PutLayoutResponse(hash=layout_hash(layout))

    async def BeginVersion(self, request: pb.BeginVersionRequest, context: Any) -> pb.BeginVersionResponse:
        if request.layout_hash not in self._layouts:
            raise UnknownLayout(request.layout_hash)
        self.begun.append(request)
        epoch = len(self.begun)
        pulling = self._pulled(request, epoch, self._layouts[request.layout_hash])
        self._pulls[epoch] = asyncio.create_task(pulling)
        begun = WeightVersion(model_id=request.model_id, version=request.version, epoch=epoch)
        return pb.BeginVersionResponse(version=begun)

    async def WatchVersion(
        self, request: pb.WatchVersionRequest, context: Any
    ) -> AsyncIterator[pb.WatchVersionResponse]:
        begun = self.begun[request.epoch - 1]
        fingerprint = await self._pulls[request.epoch]
        self.arrived.set()
        await self.gate.wait()
        state = WeightVersion.STATE_ABORTED if self.refuse else WeightVersion.STATE_COMMITTED
        yield pb.WatchVersionResponse(
            version=WeightVersion(
                model_id=begun.model_id,
                version=begun.version,
                epoch=request.epoch,
                state=state,
                error=self.refuse,
                fingerprint=fingerprint,
            )
        )

    async def ReportProbe(self, request: pb.ReportProbeRequest, context: Any) -> pb.ReportProbeResponse:
        self.probes.append(request)
        return pb.ReportProbeResponse()

    async def ReportPaths(self, request: pb.ReportPathsRequest, context: Any) -> pb.ReportPathsResponse:
        self.paths.put_nowait(request)
        return pb.ReportPathsResponse()

    async def _pulled(self, request: pb.BeginVersionRequest, epoch: int, spec: SpecLayout) -> int:
        shapes = {tensor.name: tensor.shape for tensor in spec.tensors}
        whole = SpecLayout(Mesh(()), tuple(TensorSpec(each.name, each.shape, each.dtype) for each in spec.tensors))
        layout = layout_of_rank(whole, 0)
        regions = tuple(wire.from_region(region) for region in request.regions)
        offer = Offer(request.version, epoch, "full", regions, Route(spec, whole, 0), time.monotonic() + 20.0, 20.0)
        with closing(open_backend("shm")) as backend, closing(ReplicaArenas(layout, backend=backend)) as arenas:
            receiver = SwapReceiver(arenas)
            prepared = await receiver.prepare(offer, lambda: False)
            await receiver.close()
            buffer = arenas.view(arenas.shadow_index)
            self.weights = {
                slot.name: torch.frombuffer(
                    bytearray(buffer[slot.offset : slot.end]), dtype=getattr(torch, slot.dtype)
                ).view(shapes[slot.name])
                for slot in layout.slots
            }
        return prepared.fingerprint
