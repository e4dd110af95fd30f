"""Which backends exist, by name."""

from collections.abc import Callable

from reflux_transfer.backends.base import TransferBackend
from reflux_transfer.backends.nixl import NixlBackend
from reflux_transfer.backends.shm import ShmBackend
from reflux_transfer.backends.tcp import TcpBackend
from reflux_transfer.backends.ucx import UcxBackend
from reflux_transfer.settings import BackendName, TransferSettings

BACKENDS: dict[BackendName, Callable[[TransferSettings], TransferBackend]] = {
    "shm": ShmBackend,
    "ucx": UcxBackend,
    "tcp": TcpBackend,
    "nixl": NixlBackend,
}


def open_backend(name: str, settings: TransferSettings | None = None) -> TransferBackend:
    """Opens a backend. Raises `ValueError` for an unknown name and `BackendUnavailable` where it cannot work."""
    if name not in BACKENDS:
        raise ValueError(f"unknown transfer backend {name!r}, known are {', '.join(BACKENDS)}")
    return BACKENDS[name](settings or TransferSettings())
