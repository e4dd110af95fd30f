"""The gRPC face: translates messages, delegates, holds no policy."""

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from grpc.aio import ServicerContext

from reflux.weight_broker.v1 import weight_broker_service_pb2 as pb
from reflux.weight_broker.v1.weight_broker_service_pb2_grpc import WeightBrokerServiceServicer
from reflux_kit.errors import Conflict, InvalidRequest, NotFound, ServiceError, WrongState
from reflux_transfer.client.layouts import chunks
from reflux_weight_broker import layouts, messages, parsing, refusals
from reflux_weight_broker.coordinator import Coordinator
from reflux_weight_broker.paths import Paths

Context = ServicerContext[Any, Any]
SERVICE_NAME = pb.DESCRIPTOR.services_by_name["WeightBrokerService"].full_name


class PublisherFenced(WrongState):
    """Another publisher took over."""

    reason: ClassVar[str] = "PUBLISHER_FENCED"


class VersionRegression(WrongState):
    """Lower than the committed version."""

    reason: ClassVar[str] = "VERSION_REGRESSION"


class LayoutMismatch(WrongState):
    """Different tensors."""

    reason: ClassVar[str] = "LAYOUT_MISMATCH"


class UnknownLayout(WrongState):
    """The layout has to be sent first."""

    reason: ClassVar[str] = "UNKNOWN_LAYOUT"


class BaseMismatch(WrongState):
    """The base is not the committed epoch."""

    reason: ClassVar[str] = "BASE_MISMATCH"


class StaleEpoch(WrongState):
    """The epoch is not under way."""

    reason: ClassVar[str] = "STALE_EPOCH"


class VersionInProgress(Conflict):
    """Another version is under way."""

    reason: ClassVar[str] = "VERSION_IN_PROGRESS"


class UnknownReplica(NotFound):
    """The replica has to register."""

    reason: ClassVar[str] = "UNKNOWN_REPLICA"


_ERRORS: dict[type[refusals.Refusal], type[ServiceError]] = {
    refusals.PublisherFenced: PublisherFenced,
    refusals.VersionRegression: VersionRegression,
    refusals.LayoutMismatch: LayoutMismatch,
    refusals.UnknownLayout: UnknownLayout,
    refusals.BaseMismatch: BaseMismatch,
    refusals.StaleEpoch: StaleEpoch,
    refusals.VersionInProgress: VersionInProgress,
    refusals.UnknownReplica: UnknownReplica,
}


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except refusals.Refusal as refusal:
        raise _ERRORS[type(refusal)](str(refusal)) from None


class WeightBrokerServicer(WeightBrokerServiceServicer):
    """Weight versions over gRPC."""

    def __init__(self, coordinator: Coordinator, known: layouts.Layouts, paths: Paths) -> None:
        self._coordinator, self._layouts, self._paths = coordinator, known, paths

    async def RegisterReplica(self, request: pb.RegisterReplicaRequest, context: Context) -> pb.RegisterReplicaResponse:
        with _refusals():
            tensors = await self._layouts.tensors(parsing.require_name("layout_hash", request.layout_hash))
            model_id, registration = parsing.parse_register(request, tensors)
            return pb.RegisterReplicaResponse(committed=await self._coordinator.register(model_id, registration))

    async def WatchVersions(
        self, request: pb.WatchVersionsRequest, context: Context
    ) -> AsyncIterator[pb.WatchVersionsResponse]:
        model_id = parsing.require_name("model_id", request.model_id)
        name = parsing.require_name("replica", request.replica)
        incarnation = parsing.require_name("incarnation", request.incarnation)
        # Headers at once: the client knows that it is heard before the first event, which may be hours away.
        with _refusals():
            events = self._coordinator.watch(model_id, name, incarnation)
            await context.send_initial_metadata(())
            async for event in events:
                yield event

    async def AckVersion(self, request: pb.AckVersionRequest, context: Context) -> pb.AckVersionResponse:
        model_id, report = parsing.parse_ack(request)
        with _refusals():
            return pb.AckVersionResponse(version=await self._coordinator.report(model_id, report))

    async def BeginVersion(self, request: pb.BeginVersionRequest, context: Context) -> pb.BeginVersionResponse:
        with _refusals():
            tensors = await self._layouts.tensors(parsing.require_name("layout_hash", request.layout_hash))
            manifest = parsing.parse_manifest(request, tensors)
            version = await self._coordinator.begin(
                manifest,
                publisher_epoch=parsing.require_epoch("publisher_epoch", request.publisher_epoch),
                replay=request.replay,
                min_replicas=request.min_replicas,
            )
        return pb.BeginVersionResponse(version=version)

    async def WatchVersion(
        self, request: pb.WatchVersionRequest, context: Context
    ) -> AsyncIterator[pb.WatchVersionResponse]:
        model_id = parsing.require_name("model_id", request.model_id)
        found = False
        async for version in self._coordinator.follow(model_id, parsing.require_count("epoch", request.epoch)):
            found = True
            yield pb.WatchVersionResponse(version=version)
        if not found:
            raise NotFound(f"model {model_id} has no epoch {request.epoch}, or it is too old")

    async def GetVersion(self, request: pb.GetVersionRequest, context: Context) -> pb.GetVersionResponse:
        model_id = parsing.require_name("model_id", request.model_id)
        version, last_epoch = await self._coordinator.get(model_id, parsing.require_count("epoch", request.epoch))
        targets = {replica.tensors.hash: None for replica in self._coordinator.replicas(model_id)}
        if version is None and (request.epoch or not (last_epoch or targets)):
            raise NotFound(f"model {model_id} has no version" + (f" of epoch {request.epoch}" if request.epoch else ""))
        return pb.GetVersionResponse(version=version, last_epoch=last_epoch, target_layouts=targets)

    async def ListReplicas(self, request: pb.ListReplicasRequest, context: Context) -> pb.ListReplicasResponse:
        replicas = self._coordinator.replicas(request.model_id)
        return pb.ListReplicasResponse(replicas=[messages.to_replica(replica) for replica in replicas])

    async def DeregisterReplica(
        self, request: pb.DeregisterReplicaRequest, context: Context
    ) -> pb.DeregisterReplicaResponse:
        model_id = parsing.require_name("model_id", request.model_id)
        name = parsing.require_name("replica", request.replica)
        return pb.DeregisterReplicaResponse(found=await self._coordinator.deregister(model_id, name))

    async def PutLayout(
        self, request_iterator: AsyncIterator[pb.PutLayoutRequest], context: Context
    ) -> pb.PutLayoutResponse:
        data = bytearray()
        async for part in request_iterator:
            data += part.chunk
            if len(data) > layouts.MAX_BYTES:
                raise InvalidRequest(f"a layout has at most {layouts.MAX_BYTES} bytes", field="chunk")
        return pb.PutLayoutResponse(hash=await self._layouts.put(bytes(data)))

    async def GetLayout(self, request: pb.GetLayoutRequest, context: Context) -> AsyncIterator[pb.GetLayoutResponse]:
        name = parsing.require_name("hash", request.hash)
        with _refusals():
            data = await self._layouts.get(name)
        for chunk in chunks(data):
            yield pb.GetLayoutResponse(chunk=chunk)

    async def WatchLeases(
        self, request: pb.WatchLeasesRequest, context: Context
    ) -> AsyncIterator[pb.WatchLeasesResponse]:
        model_id = parsing.require_name("model_id", request.model_id)
        with _refusals():
            await context.send_initial_metadata(())
            async for lease in self._coordinator.watch_leases(model_id, request.replica, request.generations):
                yield lease

    async def ReportProbe(self, request: pb.ReportProbeRequest, context: Context) -> pb.ReportProbeResponse:
        model_id, epoch, replica, logprobs = parsing.parse_probe(request)
        with _refusals():
            fault = await self._coordinator.probe(model_id, epoch, replica, logprobs)
        return pb.ReportProbeResponse(fault=fault)

    async def ReportPaths(self, request: pb.ReportPathsRequest, context: Context) -> pb.ReportPathsResponse:
        self._paths.report(parsing.parse_paths(request))
        return pb.ReportPathsResponse()

    async def ListPaths(self, request: pb.ListPathsRequest, context: Context) -> pb.ListPathsResponse:
        return pb.ListPathsResponse(processes=self._paths.all())
