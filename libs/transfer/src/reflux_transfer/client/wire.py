"""Values and the messages of the broker's protocol, and which of its calls may be repeated."""

from typing import TYPE_CHECKING

from reflux.weight_broker.v1 import weight_broker_service_pb2 as pb
from reflux.weight_broker.v1 import weight_layout_pb2 as layout_pb
from reflux.weight_broker.v1.weight_version_pb2 import WeightVersion
from reflux_kit import auth
from reflux_kit.scope import run_of
from reflux_transfer import errors
from reflux_transfer.client.layouts import chunks, from_message, to_message
from reflux_transfer.client.offer import Kind, SourceRegion
from reflux_transfer.handles import Scope
from reflux_transfer.modes import Mode
from reflux_weightplan.errors import WeightPlanError
from reflux_weightplan.spec import SpecLayout

if TYPE_CHECKING:
    from reflux.weight_broker.v1.weight_broker_service_pb2_grpc import WeightBrokerServiceAsyncStub

_SERVICE = "reflux.weight_broker.v1.WeightBrokerService"
_NAMES = ("RegisterReplica", "AckVersion", "BeginVersion", "GetVersion", "ReportProbe", "ReportPaths")
RETRY = tuple(f"{_SERVICE}/{name}" for name in _NAMES)
"""For `open_channel(retry=...)`: all of these are idempotent."""

UNKNOWN_LAYOUT = "UNKNOWN_LAYOUT"
"""Reason of a refusal: send the layout, then call again."""

_CALL_SECONDS = 60.0

KINDS: dict[Kind, WeightVersion.Kind.ValueType] = {
    "full": WeightVersion.KIND_FULL,
    "delta": WeightVersion.KIND_DELTA,
    "adapter": WeightVersion.KIND_ADAPTER,
}
_KIND_NAMES: dict[int, Kind] = {number: name for name, number in KINDS.items()}
MODES: dict[Mode, pb.UpdateMode.ValueType] = {
    "swap": pb.UPDATE_MODE_SWAP,
    "in_place": pb.UPDATE_MODE_IN_PLACE,
}

_REASONS: dict[type[Exception], pb.AckVersionRequest.Reason.ValueType] = {
    errors.ChecksumMismatch: pb.AckVersionRequest.REASON_CHECKSUM,
    errors.DeltaDamaged: pb.AckVersionRequest.REASON_CHECKSUM,
    errors.GenerationGone: pb.AckVersionRequest.REASON_GENERATION_GONE,
    # Of an owner that gave its memory up, whose place something else has taken.
    errors.WrongHandle: pb.AckVersionRequest.REASON_GENERATION_GONE,
    errors.PeerGone: pb.AckVersionRequest.REASON_PEER_GONE,
    errors.ReadDeadlineExceeded: pb.AckVersionRequest.REASON_DEADLINE,
    errors.BaseMismatch: pb.AckVersionRequest.REASON_BASE_MISMATCH,
    errors.LayoutError: pb.AckVersionRequest.REASON_LAYOUT,
    errors.PlanNotStaged: pb.AckVersionRequest.REASON_LAYOUT,
    WeightPlanError: pb.AckVersionRequest.REASON_LAYOUT,
}


def scope_of(model_id: str, secret: str = "") -> Scope:
    """Where the handles of a model's weights are valid: in its run, signed where the stack has a secret."""
    run = run_of(model_id)
    return Scope(run, key=auth.derived_key(secret, f"weight handles of {run}"))


def kind_of(number: int) -> Kind:
    """What lies in the regions of an event."""
    return _KIND_NAMES.get(number, "full")


def failure_of(error: Exception) -> pb.AckVersionRequest.Reason.ValueType:
    """Why a replica could not; the engine is to blame for everything that is no transfer."""
    found = (reason for kind, reason in _REASONS.items() if isinstance(error, kind))
    return next(found, pb.AckVersionRequest.REASON_ENGINE)


def to_region(region: SourceRegion) -> layout_pb.RegionOffer:
    """The wire form of a region that others may read."""
    return layout_pb.RegionOffer(
        rank=region.rank,
        handle=region.handle,
        transport=region.transport,
        generation=region.generation,
        plans=region.plans,
    )


def from_region(offer: layout_pb.RegionOffer) -> SourceRegion:
    """The inverse."""
    return SourceRegion(offer.rank, offer.handle, offer.transport, offer.generation, tuple(offer.plans))


async def put_layout(stub: "WeightBrokerServiceAsyncStub", layout: SpecLayout) -> str:
    """Stores a layout with the broker; returns its hash."""
    data = to_message(layout).SerializeToString()
    parts = (pb.PutLayoutRequest(chunk=chunk) for chunk in chunks(data))
    return (await stub.PutLayout(parts, timeout=_CALL_SECONDS)).hash


async def get_layout(stub: "WeightBrokerServiceAsyncStub", name: str) -> SpecLayout:
    """The layout of a hash."""
    request = pb.GetLayoutRequest(hash=name)
    parts = [part.chunk async for part in stub.GetLayout(request, timeout=_CALL_SECONDS)]
    return from_message(layout_pb.WeightLayout.FromString(b"".join(parts)))
