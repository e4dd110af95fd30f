"""Which replicas fit a request, and what to say when none does. Pure."""

from collections.abc import Sequence

from reflux_inference_gateway.errors import NoReplica, VersionGone
from reflux_inference_gateway.replicas import Replica, ReplicaTable
from reflux_inference_gateway.want import Want


def fitting(table: ReplicaTable, want: Want, tried: Sequence[str]) -> list[Replica]:
    """Replicas that may take the request now, none when there are none: untried ones, tried ones that came back rather
    than nobody. Raises VersionGone when it is bound to a version that every replica is past.
    """
    oldest = table.oldest_version(want.model_id)
    if want.version is not None and oldest is not None and oldest > want.version:
        raise VersionGone(f"every replica of {want.model_id!r} is past version {want.version}: {oldest} or newer")
    lowest = _lowest_version(table, want)
    for excluded in (tried, ()) if tried else ((),):
        found = table.routable(
            want.model_id, min_version=lowest, version=want.version, excluded=excluded, http=want.http
        )
        if found:
            return found
    return []


def is_syncing(table: ReplicaTable, want: Want) -> bool:
    """True while the version that the request asks for may be on its way."""
    return want.particular and table.syncing(want.model_id)


def nobody(table: ReplicaTable, want: Want) -> NoReplica:
    """Why a request waited in vain although replicas are known."""
    entries = table.entries(want.model_id)
    versions = sorted({entry.info.version for entry in entries})
    exactly = "" if want.version is None else f"exactly {want.version} and "
    faults = "".join(f"; unhealthy {fault}" for fault in table.faults(want.model_id))
    return NoReplica(
        f"no replica of {want.model_id!r} took the request in time: {len(entries)} known with versions {versions}, "
        f"asked for {exactly}at least {_lowest_version(table, want)}{faults}",
        state="syncing" if is_syncing(table, want) else "waiting",
    )


def _lowest_version(table: ReplicaTable, want: Want) -> int:
    if want.max_lag is None:
        return want.min_version
    return max(want.min_version, table.newest_version(want.model_id) - want.max_lag)
