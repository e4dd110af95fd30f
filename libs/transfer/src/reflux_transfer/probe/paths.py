"""Tests of the path between this process and an owner of memory: a rate per pair, and an error below the floor."""

import hashlib
import json
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from reflux_transfer import handles
from reflux_transfer.backends.base import TransferBackend
from reflux_transfer.errors import PathTooSlow
from reflux_transfer.handles import Scope
from reflux_transfer.peer import ProcessIdentity
from reflux_transfer.probe.floors import floor_of, hint_of
from reflux_transfer.probe.metrics import PATH, PATH_OK
from reflux_transfer.probe.self_test import TEST_BYTES, timed_read
from reflux_transfer.probe.transports import ucx_transports
from reflux_transfer.pulling.source import discard
from reflux_transfer.settings import TransferSettings

log = logging.getLogger(__name__)

_ROUNDS, _MOST_ROUNDS = 3, 20
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
    handle: bytes,
    *,
    peer: str,
    settings: TransferSettings | None = None,
    scope: Scope | None = None,
    length: int = TEST_BYTES,
    seconds: float = _READ_SECONDS,
) -> PathStatus:
    """Reads up to 32 MiB from the start of the peer's region into memory of its own, three times, and takes the best.

    Below the floor it goes on for up to 20 reads: the processor may be busy, the path is not. Each of the reads may
    take `seconds`, 5 at most, and all beyond the third no longer than that together. The status is logged and exported
    whatever it says: the caller
    decides by `check`. Raises what `open` and `read` raise.
    """
    settings = settings or TransferSettings()
    same_host = _owner(handle).on_this_host()
    kind = "ucx-rdma" if backend.name == "ucx" and not same_host and ucx_transports(settings).rdma else backend.name
    remote = backend.open(handle, scope)
    try:
        count = min(length, remote.length)
        scratch = backend.allocate(count)
        try:
            limit, floor = min(seconds, _READ_SECONDS), floor_of(kind, settings)
            times = [timed_read(backend, remote, scratch, count, limit) for _ in range(_ROUNDS)]
            while count / min(times) < floor and len(times) < _MOST_ROUNDS and sum(times[_ROUNDS:]) < limit:
                times.append(timed_read(backend, remote, scratch, count, limit))
            rate = count / min(times)
        finally:
            discard(backend, scratch)
    finally:
        backend.release(remote)
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

    def check(
        self,
        backend: TransferBackend,
        handle: bytes,
        *,
        peer: str,
        scope: Scope | None = None,
        seconds: float = _READ_SECONDS,
    ) -> PathStatus:
        """Tests the path to `peer` unless it is known to be good. Raises `PathTooSlow`; it is tested again then."""
        with self._lock:
            known = self._known.get((peer, backend.name))
        if known is None or not known.ok:
            known = measure_pair(backend, handle, peer=peer, settings=self._settings, scope=scope, seconds=seconds)
            with self._lock:
                self._known[peer, backend.name] = known
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


def peer_of(handle: bytes) -> str:
    """A name for the process behind a handle; no two processes have the same. Raises `WrongHandle`."""
    owner = _owner(handle)
    mark = hashlib.sha256(json.dumps(owner.to_json(), sort_keys=True).encode()).hexdigest()[:8]
    return f"pid {owner.pid} ({mark})"


def _owner(handle: bytes) -> ProcessIdentity:
    return ProcessIdentity.from_json(handles.unseal(handle, handles.backend_of(handle), owner=dict)["owner"])
