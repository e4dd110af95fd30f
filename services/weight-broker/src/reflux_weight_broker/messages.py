"""Wire messages to values and back. `parse_*` return values or raise `InvalidRequest`."""

import math
from collections.abc import Iterable

from reflux.common.v1 import common_pb2
from reflux.weight_broker.v1 import weight_broker_service_pb2 as pb
from reflux.weight_broker.v1 import weight_version_pb2 as version_pb
from reflux_kit.errors import InvalidRequest
from reflux_transfer.client.wire import to_slots
from reflux_transfer.errors import LayoutError, WrongHandle
from reflux_transfer.handles import backend_of
from reflux_transfer.layout import Layout, TensorSlot
from reflux_weight_broker.plan import Manifest, plan
from reflux_weight_broker.records import Abort, Commit, Phase, Prepare, Replica, Report, Transaction

_MAX_NAME = 256
_MAX_TIMEOUT_SECONDS = 3600.0
_MAX_ADDRESS = 1 << 63

_STATES = {
    Phase.PREPARING: version_pb.WeightVersion.STATE_PREPARING,
    Phase.COMMITTING: version_pb.WeightVersion.STATE_COMMITTING,
    Phase.COMMITTED: version_pb.WeightVersion.STATE_COMMITTED,
    Phase.ABORTED: version_pb.WeightVersion.STATE_ABORTED,
}
_OUTCOMES = {
    pb.AckVersionRequest.OUTCOME_PREPARED: "prepared",
    pb.AckVersionRequest.OUTCOME_COMMITTED: "committed",
    pb.AckVersionRequest.OUTCOME_FAILED: "failed",
}


def require_name(field: str, value: str) -> str:
    """A name of 1 to 256 characters."""
    if not 0 < len(value) <= _MAX_NAME:
        raise InvalidRequest(f"{field} must have 1 to {_MAX_NAME} characters, it has {len(value)}", field=field)
    return value


def require_count(field: str, value: int) -> int:
    """An integer that is not negative."""
    if value < 0:
        raise InvalidRequest(f"{field} must not be negative, it is {value}", field=field)
    return value


def parse_layout(slots: Iterable[common_pb2.TensorSlot]) -> Layout:
    """The tensors of a region."""
    try:
        layout = Layout(
            tuple(TensorSlot(s.name, tuple(s.shape), s.dtype, s.offset_bytes, s.length_bytes) for s in slots)
        )
    except LayoutError as error:
        raise InvalidRequest(f"layout: {error}", field="layout") from None
    if layout.region_bytes >= _MAX_ADDRESS:
        raise InvalidRequest(f"layout: {layout.region_bytes} bytes do not fit an address space", field="layout")
    return layout


def parse_register(request: pb.RegisterReplicaRequest) -> tuple[str, Replica]:
    """Model id and replica."""
    replica = Replica(
        require_name("replica", request.replica),
        require_name("incarnation", request.incarnation),
        parse_layout(request.layout),
        require_count("epoch", request.epoch),
        require_count("version", request.version),
    )
    return require_name("model_id", request.model_id), replica


def parse_ack(request: pb.AckVersionRequest) -> tuple[str, Report]:
    """Model id and report."""
    if request.outcome not in _OUTCOMES:
        raise InvalidRequest("outcome must be PREPARED, COMMITTED or FAILED", field="outcome")
    for field in ("transfer_seconds", "pause_ms"):
        value = getattr(request, field)
        if not math.isfinite(value) or value < 0:
            raise InvalidRequest(f"{field} must be a number of at least 0, it is {value}", field=field)
    if request.epoch < 1:
        raise InvalidRequest(f"epoch must be at least 1, it is {request.epoch}", field="epoch")
    report = Report(
        require_name("replica", request.replica),
        request.incarnation,
        request.epoch,
        _OUTCOMES[request.outcome],
        request.error or "failed without a reason",
        request.bytes,
        request.transfer_seconds,
        request.pause_ms,
        request.fingerprint,
    )
    return require_name("model_id", request.model_id), report


def parse_manifest(request: pb.BeginVersionRequest) -> Manifest:
    """What the publisher offers; checks that every slice has a checksum and that the handle is one of the transport."""
    manifest = Manifest(
        require_name("model_id", request.model_id),
        require_count("version", request.version),
        parse_layout(request.layout),
        tuple(request.checksums),
        request.slice_bytes,
        request.region_handle,
        request.transport,
        require_name("request_id", request.request_id),
    )
    if request.slice_bytes < 1:
        raise InvalidRequest("slice_bytes must be at least 1", field="slice_bytes")
    slices = sum(-(-slot.nbytes // request.slice_bytes) for slot in manifest.layout.slots)
    if slices != len(request.checksums):
        raise InvalidRequest(
            f"checksums: {slices} slices need as many, not {len(request.checksums)}", field="checksums"
        )
    try:
        backend = backend_of(request.region_handle)
    except WrongHandle as error:
        raise InvalidRequest(f"region_handle: {error}", field="region_handle") from None
    if backend != request.transport:
        raise InvalidRequest(f"transport is {request.transport!r}, the handle is one of {backend}", field="transport")
    return manifest


def parse_timeout(request: pb.BeginVersionRequest) -> float:
    """Seconds that the replicas have to prepare, and again to commit."""
    seconds = request.sync_timeout_seconds
    if not 0 < seconds <= _MAX_TIMEOUT_SECONDS:
        field = "sync_timeout_seconds"
        raise InvalidRequest(
            f"{field} must be above 0 and at most {_MAX_TIMEOUT_SECONDS:g}, it is {seconds}", field=field
        )
    return seconds


def to_stored(manifest: Manifest) -> pb.BeginVersionRequest:
    """The publisher's offer as it is stored: `parse_manifest` is its inverse."""
    return pb.BeginVersionRequest(
        request_id=manifest.request_id,
        model_id=manifest.model_id,
        version=manifest.version,
        layout=to_slots(manifest.layout),
        checksums=manifest.checksums,
        slice_bytes=manifest.slice_bytes,
        region_handle=manifest.region_handle,
        transport=manifest.transport,
    )


def to_replica(replica: Replica) -> version_pb.ReplicaState:
    """What a replica serves."""
    return version_pb.ReplicaState(
        replica=replica.name,
        version=replica.version,
        epoch=replica.epoch,
        error=replica.error,
        pause_ms=replica.pause_ms,
        transfer_seconds=replica.transfer_seconds,
        fingerprint=replica.fingerprint,
    )


def to_version(transaction: Transaction) -> version_pb.WeightVersion:
    """A version as clients see it."""
    return version_pb.WeightVersion(
        model_id=transaction.manifest.model_id,
        version=transaction.manifest.version,
        epoch=transaction.epoch,
        state=_STATES[transaction.phase],
        replicas=[to_replica(member) for member in transaction.members.values()],
        error=transaction.error,
        prepare_seconds=transaction.prepare_seconds,
        commit_seconds=transaction.commit_seconds,
        bytes=transaction.bytes,
    )


def to_event(event: Prepare | Commit | Abort, replica: Replica) -> pb.WatchVersionsResponse:
    """What a replica is asked to do; PREPARE carries the plan for its layout."""
    if not isinstance(event, Prepare):
        kind = (
            pb.WatchVersionsResponse.EVENT_COMMIT if isinstance(event, Commit) else pb.WatchVersionsResponse.EVENT_ABORT
        )
        return pb.WatchVersionsResponse(
            event=kind, version=version_pb.WeightVersion(version=event.version, epoch=event.epoch)
        )
    manifest = event.manifest
    slices = [
        pb.Slice(
            name=part.name,
            remote_offset_bytes=part.remote_offset,
            local_offset_bytes=part.local_offset,
            length_bytes=part.length,
            checksum=part.checksum,
        )
        for part in plan(manifest, replica.layout, replica.name)
    ]
    return pb.WatchVersionsResponse(
        event=pb.WatchVersionsResponse.EVENT_PREPARE,
        version=version_pb.WeightVersion(model_id=manifest.model_id, version=manifest.version, epoch=event.epoch),
        slices=slices,
        region_handle=manifest.region_handle,
        transport=manifest.transport,
    )
