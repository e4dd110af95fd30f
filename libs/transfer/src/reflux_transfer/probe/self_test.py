"""One backend's self-test: 32 MiB of this process's own memory, compared and timed."""

import os
import time
from dataclasses import dataclass

from reflux_transfer.backends.base import TransferBackend
from reflux_transfer.errors import BackendUnavailable, PathTooSlow, TransferError
from reflux_transfer.probe.floors import floor_of, hint_of
from reflux_transfer.probe.metrics import SELF_TEST
from reflux_transfer.regions import LocalRegion, RemoteRegion
from reflux_transfer.registry import open_backend
from reflux_transfer.settings import TransferSettings

TEST_BYTES = 32 << 20
_ROUNDS, _MOST_ROUNDS = 3, 20
_SECONDS = 10.0


@dataclass(frozen=True)
class BackendStatus:
    """Outcome of one backend's self-test. `note` is its rate and transports, or why it does not work."""

    name: str
    available: bool
    bytes_per_second: float
    note: str
    error: BackendUnavailable | None = None


def measure(backend: TransferBackend, length: int = TEST_BYTES, floor: float = 0.0) -> float:
    """Bytes per second, see `best_seconds`.

    Raises `TransferError` when other bytes arrive, and what a read raises.
    """
    source, destination = backend.allocate(length), backend.allocate(length)
    noise = os.urandom(1 << 16)
    for start in range(0, length, len(noise)):
        source.view[start : start + len(noise)] = noise[: length - start]
    remote = backend.open(backend.describe(source))
    try:
        seconds = best_seconds(backend, remote, destination, length, floor, _SECONDS)
    finally:
        backend.release(remote)
    if destination.view != source.view:
        raise TransferError("the bytes that arrived are others")
    backend.unregister(destination)
    backend.unregister(source)
    return length / seconds


def best_seconds(
    backend: TransferBackend,
    remote: RemoteRegion,
    destination: LocalRegion,
    length: int,
    floor: float,
    limit: float,
) -> float:
    """Seconds of the best of three reads of the first `length` bytes: the first one pays for the connection.

    Below the `floor`, in bytes per second, it goes on for up to 20 reads: the processor may be busy, the path is not.
    Each read may take `limit` seconds, and all beyond the third no longer than that together.
    """
    times: list[float] = []
    while len(times) < _ROUNDS or (
        length / min(times) < floor and len(times) < _MOST_ROUNDS and sum(times[_ROUNDS:]) < limit
    ):
        start = time.perf_counter()
        backend.read(remote, 0, destination, 0, length, limit)
        times.append(time.perf_counter() - start)
    return min(times)


def self_test(name: str, settings: TransferSettings, details: str = "") -> BackendStatus:
    """Opens a backend for its test and closes it again; never raises because it does not work."""
    SELF_TEST.labels(name).set(0)
    try:
        backend = open_backend(name, settings)
    except BackendUnavailable as error:
        return BackendStatus(name, False, 0.0, str(error), error)
    try:
        rate = measure(backend, floor=floor_of(name, settings))
    except (TransferError, MemoryError) as error:
        failure = BackendUnavailable(f"the self-test of {name} failed: {error}")
        return BackendStatus(name, False, 0.0, str(failure), failure)
    finally:
        backend.close()
    SELF_TEST.labels(name).set(rate)
    note = f"{rate / 1e9:.2f} GB/s" + (f" over {details}" if details else "")
    if rate < (floor := floor_of(name, settings)):
        slow = PathTooSlow(f"{name} inside this process", rate, floor, hint_of(name))
        return BackendStatus(name, False, rate, f"{note}: {slow}", slow)
    return BackendStatus(name, True, rate, note)
