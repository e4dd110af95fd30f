"""Tests of the path between this process and an owner of memory: a rate per pair, and an error below the floor."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from reflux_transfer.backends.base import TransferBackend
from reflux_transfer.errors import PathTooSlow
from reflux_transfer.probe.floors import floor_of, hint_of
from reflux_transfer.probe.metrics import PATH, PATH_OK
from reflux_transfer.probe.self_test import TEST_BYTES, best_seconds
from reflux_transfer.probe.transports import ucx_transports
from reflux_transfer.pulling.source import discard
from reflux_transfer.regions import RemoteRegion
from reflux_transfer.settings import TransferSettings

log = logging.getLogger(__name__)

_JUDGED_BYTES = 4 << 20
_READ_SECONDS = 5.0
"""Less than 7 MB/s is no path: its read ends with `ReadDeadlineExceeded`."""

_PEERS = 256


@dataclass(frozen=True)
class PathStatus:
    """The path to one peer. `kind` is the backend's name, or `ucx-rdma`; rates are bytes per second.

    Regions under 4 MiB are read, but not judged: their time is the latency.
    """

    peer: str
    backend: str
    kind: str
    same_host: bool
    bytes: int
    bytes_per_second: float
    floor: float

    @property
    def judged(self) -> bool:
        """Whether the rate says something about the path."""
        return self.bytes >= _JUDGED_BYTES

    @property
    def ok(self) -> bool:
        """Not known to be below the floor."""
        return not self.judged or self.bytes_per_second >= self.floor

    @property
    def note(self) -> str:
        """The verdict in a few words."""
        if not self.judged:
            return f"not judged, only {self.bytes} bytes to read"
        floor = f"{self.floor / 1e9:.3f} GB/s"
        return f"above its floor of {floor}" if self.ok else f"below its floor of {floor}: {hint_of(self.kind)}"

    def check(self) -> None:
        """Raises `PathTooSlow` below the floor."""
        if not self.ok:
            path = f"the path to {self.peer} by {self.kind}"
            raise PathTooSlow(path, self.bytes_per_second, self.floor, hint_of(self.kind))


def measure_pair(
    backend: TransferBackend,
    remote: RemoteRegion,
    settings: TransferSettings,
    *,
    length: int = TEST_BYTES,
    seconds: float = _READ_SECONDS,
) -> PathStatus:
    """Reads up to 32 MiB from the start of the peer's region into memory of its own, see `best_seconds`.

    A read may take `seconds`, 5 at most. The status is logged and exported whatever it says: the caller decides by
    `check`. Raises what `read` raises.
    """
    peer, same_host = remote.owner.label, remote.owner.on_this_host()
    kind = "ucx-rdma" if backend.name == "ucx" and not same_host and ucx_transports(settings).rdma else backend.name
    count, floor = min(length, remote.length), floor_of(kind, settings)
    scratch = backend.allocate(count)
    try:
        rate = count / best_seconds(backend, remote, scratch, count, floor, min(seconds, _READ_SECONDS))
    finally:
        discard(backend, scratch)
    status = PathStatus(peer, backend.name, kind, same_host, count, rate, floor)
    PATH.labels(peer, backend.name).set(rate)
    PATH_OK.labels(peer, backend.name).set(status.ok)
    level = logging.INFO if status.ok else logging.ERROR
    log.log(level, "path to %s by %s: %.2f GB/s, floor %.2f", peer, kind, rate / 1e9, status.floor / 1e9)
    return status


class PathBook:
    """The paths of one process, each tested once before its first use. All methods may be called from any thread."""

    def __init__(self, settings: TransferSettings | None = None) -> None:
        self._settings = settings or TransferSettings()
        self._known: dict[tuple[str, str], PathStatus] = {}
        self._lock = threading.Lock()
        self.changed: Callable[[], None] = lambda: None
        """Called after each test, by the thread that made it."""

    def check(self, backend: TransferBackend, remote: RemoteRegion, *, seconds: float = _READ_SECONDS) -> PathStatus:
        """Tests the path to a region's owner unless it is known to be good.

        Raises `PathTooSlow`; it is tested again then.
        """
        key = remote.owner.label, backend.name
        with self._lock:
            known = self._known.get(key)
        if known is None or not known.ok:
            known = measure_pair(backend, remote, self._settings, seconds=seconds)
            with self._lock:
                self._known[key] = known
                oldest = next(iter(self._known))[0]
                crowded = len(self._known) > _PEERS
            if crowded:
                self.forget(oldest)
            self.changed()
        known.check()
        return known

    def forget(self, peer: str) -> None:
        """The peer has gone: another process may come under its name."""
        with self._lock:
            gone = [key for key in self._known if key[0] == peer]
            for key in gone:
                del self._known[key]
        for name, backend in gone:
            PATH.remove(name, backend)
            PATH_OK.remove(name, backend)

    def statuses(self) -> tuple[PathStatus, ...]:
        """Every known path, ordered by peer."""
        with self._lock:
            return tuple(self._known[key] for key in sorted(self._known))
