"""The gRPC face: translates messages, delegates, holds no policy."""

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from grpc.aio import ServicerContext

from reflux.weight_broker.v1 import weight_broker_service_pb2 as pb
from reflux.weight_broker.v1.weight_broker_service_pb2_grpc import WeightBrokerServiceServicer
from reflux_kit.errors import Conflict, NotFound, ServiceError, WrongState
from reflux_weight_broker import messages, refusals
from reflux_weight_broker.coordinator import Coordinator

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

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    async def RegisterReplica(self, request: pb.RegisterReplicaRequest, context: Context) -> pb.RegisterReplicaResponse:
        model_id, replica = messages.parse_register(request)
        with _refusals():
            return pb.RegisterReplicaResponse(committed=await self._coordinator.register(model_id, replica))

    async def WatchVersions(
        self, request: pb.WatchVersionsRequest, context: Context
    ) -> AsyncIterator[pb.WatchVersionsResponse]:
        model_id = messages.require_name("model_id", request.model_id)
        name = messages.require_name("replica", request.replica)
        incarnation = messages.require_name("incarnation", request.incarnation)
        # Headers at once: the client knows that it is heard before the first event, which may be hours away.
        with _refusals():
            events = self._coordinator.watch(model_id, name, incarnation)
            await context.send_initial_metadata(())
            async for event in events:
                yield event

    async def AckVersion(self, request: pb.AckVersionRequest, context: Context) -> pb.AckVersionResponse:
        model_id, report = messages.parse_ack(request)
        with _refusals():
            return pb.AckVersionResponse(version=await self._coordinator.report(model_id, report))

    async def BeginVersion(self, request: pb.BeginVersionRequest, context: Context) -> pb.BeginVersionResponse:
        manifest, timeout_seconds = messages.parse_manifest(request), messages.parse_timeout(request)
        with _refusals():
            version = await self._coordinator.begin(
                manifest,
                publisher_epoch=messages.require_count("publisher_epoch", request.publisher_epoch),
                replay=request.replay,
                timeout_seconds=timeout_seconds,
                min_replicas=request.min_replicas,
            )
        return pb.BeginVersionResponse(version=version)

    async def WatchVersion(
        self, request: pb.WatchVersionRequest, context: Context
    ) -> AsyncIterator[pb.WatchVersionResponse]:
        model_id = messages.require_name("model_id", request.model_id)
        found = False
        async for version in self._coordinator.follow(model_id, messages.require_count("epoch", request.epoch)):
            found = True
            yield pb.WatchVersionResponse(version=version)
        if not found:
            raise NotFound(f"model {model_id} has no epoch {request.epoch}, or it is too old")

    async def GetVersion(self, request: pb.GetVersionRequest, context: Context) -> pb.GetVersionResponse:
        model_id = messages.require_name("model_id", request.model_id)
        version, last_epoch = await self._coordinator.get(model_id, messages.require_count("epoch", request.epoch))
        if version is None and (request.epoch or not last_epoch):
            raise NotFound(f"model {model_id} has no version" + (f" of epoch {request.epoch}" if request.epoch else ""))
        return pb.GetVersionResponse(version=version, last_epoch=last_epoch)

    async def ListReplicas(self, request: pb.ListReplicasRequest, context: Context) -> pb.ListReplicasResponse:
        replicas = self._coordinator.replicas(request.model_id)
        return pb.ListReplicasResponse(replicas=[messages.to_replica(replica) for replica in replicas])

    async def DeregisterReplica(
        self, request: pb.DeregisterReplicaRequest, context: Context
    ) -> pb.DeregisterReplicaResponse:
        model_id = messages.require_name("model_id", request.model_id)
        name = messages.require_name("replica", request.replica)
        return pb.DeregisterReplicaResponse(found=await self._coordinator.deregister(model_id, name))
