"""Values to wire messages."""

import time

from reflux.weight_broker.v1 import weight_broker_service_pb2 as pb
from reflux.weight_broker.v1 import weight_version_pb2 as version_pb
from reflux_transfer.client.wire import KINDS, to_region
from reflux_weight_broker.actions import Abort, Commit, Event, Lease
from reflux_weight_broker.plan import Manifest
from reflux_weight_broker.records import Phase, Replica, Transaction

_STATES = {
    Phase.PREPARING: version_pb.WeightVersion.STATE_PREPARING,
    Phase.COMMITTING: version_pb.WeightVersion.STATE_COMMITTING,
    Phase.COMMITTED: version_pb.WeightVersion.STATE_COMMITTED,
    Phase.ABORTED: version_pb.WeightVersion.STATE_ABORTED,
}


def to_stored(manifest: Manifest) -> pb.BeginVersionRequest:
    """The publisher's offer as it is stored: `parsing.parse_manifest` is its inverse."""
    return pb.BeginVersionRequest(
        request_id=manifest.request_id,
        model_id=manifest.model_id,
        version=manifest.version,
        layout_hash=manifest.tensors.hash,
        sync_timeout_seconds=manifest.timeout_seconds,
        regions=[to_region(region) for region in manifest.regions],
        kind=KINDS[manifest.kind],
        base_epoch=manifest.base_epoch,
        probe_token_ids=manifest.probe_token_ids,
    )


def to_replica(replica: Replica) -> version_pb.ReplicaState:
    """What a replica serves; of its ranks the slowest."""
    seats = replica.seats.values()
    return version_pb.ReplicaState(
        replica=replica.name,
        version=replica.version,
        epoch=replica.epoch,
        error=replica.error,
        pause_ms=max(seat.pause_ms for seat in seats),
        transfer_seconds=max(seat.transfer_seconds for seat in seats),
        fingerprint=replica.seats[min(replica.seats)].fingerprint,
        unhealthy=bool(replica.unhealthy),
        health_reason=replica.unhealthy,
        source=replica.source,
    )


def to_version(transaction: Transaction, *, members: bool = True) -> version_pb.WeightVersion:
    """A version as clients see it; without its members it stays small in a wide fleet."""
    return version_pb.WeightVersion(
        model_id=transaction.manifest.model_id,
        version=transaction.manifest.version,
        epoch=transaction.epoch,
        state=_STATES[transaction.phase],
        replicas=[to_replica(member) for member in transaction.members.values()] if members else (),
        error=transaction.error,
        prepare_seconds=transaction.prepare_seconds,
        commit_seconds=transaction.commit_seconds,
        bytes=transaction.bytes,
        kind=KINDS[transaction.manifest.kind],
        base_epoch=transaction.manifest.base_epoch,
        fingerprint=transaction.fingerprint,
        control_messages=transaction.control_messages,
    )


def to_event(event: Event) -> pb.WatchVersionsResponse:
    """What a rank is asked to do; PREPARE names the source, COMMIT the prompt to score afterwards."""
    if isinstance(event, Abort):
        version = version_pb.WeightVersion(version=event.version, epoch=event.epoch)
        return pb.WatchVersionsResponse(event=pb.WatchVersionsResponse.EVENT_ABORT, version=version)
    manifest = event.manifest
    version = version_pb.WeightVersion(model_id=manifest.model_id, version=manifest.version, epoch=event.epoch)
    if isinstance(event, Commit):
        return pb.WatchVersionsResponse(
            event=pb.WatchVersionsResponse.EVENT_COMMIT, version=version, probe_token_ids=manifest.probe_token_ids
        )
    return pb.WatchVersionsResponse(
        event=pb.WatchVersionsResponse.EVENT_PREPARE,
        version=version,
        layout_hash=event.source.layout_hash,
        regions=[to_region(region) for region in event.source.regions],
        kind=KINDS[event.source.kind],
        base_epoch=manifest.base_epoch,
        timeout_seconds=max(0.0, event.deadline - time.monotonic()),
    )


def to_lease(lease: Lease) -> pb.WatchLeasesResponse:
    """Who reads, and for how long from now on."""
    seconds = max(0.001, lease.deadline - time.monotonic()) if lease.deadline else 0.0
    return pb.WatchLeasesResponse(generation=lease.generation, holder=lease.holder, seconds=seconds)
