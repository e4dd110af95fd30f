"""The rate below which a path counts as broken, and what may be done about it."""

from collections.abc import Mapping

from reflux_transfer.settings import TransferSettings

FLOORS_BYTES_PER_SECOND: Mapping[str, float] = {
    "shm": 0.1e9,
    "ucx": 0.1e9,
    "ucx-rdma": 5e9,
    "nixl": 0.1e9,
    "tcp": 0.03e9,
}
"""By kind of path. They tell broken from slow: a hundredth of the best, and low enough for two cores that twenty busy
processes share (a load at which the best of three reads fell below 0.2 GB/s).
"""

_HINTS: Mapping[str, str] = {
    "shm": "the machine is overloaded, or /dev/shm is swapped out",
    "ucx": "without cma UCX reads by messages over tcp: allow ptrace between the processes, name a UCX with RDMA by "
    "REFLUX_TRANSFER_UCX_LIBRARY, or use the tcp backend, which is faster",
    "ucx-rdma": "look at the NIC that REFLUX_TRANSFER_UCX_NET_DEVICES names, at memlock, and for memory from growing "
    "virtual segments",
    "nixl": "look at the NIC that REFLUX_TRANSFER_UCX_NET_DEVICES names and whether cma is allowed",
    "tcp": "look at the NIC that REFLUX_TRANSFER_TCP_LISTEN names",
}


def floor_of(kind: str, settings: TransferSettings) -> float:
    """Bytes per second; the setting REFLUX_TRANSFER_FLOOR_GB_PER_SECOND holds for every kind."""
    if settings.floor_gb_per_second is not None:
        return settings.floor_gb_per_second * 1e9
    return FLOORS_BYTES_PER_SECOND[kind]


def hint_of(kind: str) -> str:
    """What to look at when a path of this kind is below its floor."""
    return f"{_HINTS[kind]}; REFLUX_TRANSFER_FLOOR_GB_PER_SECOND sets another floor"
