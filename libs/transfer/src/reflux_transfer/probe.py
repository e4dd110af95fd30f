"""Start-up probe: which backends work here, how fast, which one is chosen and why."""

import logging
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import Gauge

from reflux_transfer.backends import ucp
from reflux_transfer.backends.base import TransferBackend
from reflux_transfer.errors import BackendUnavailable, TransferError
from reflux_transfer.registry import BACKENDS, open_backend
from reflux_transfer.settings import TransferSettings

log = logging.getLogger(__name__)

_SELF_TEST_BYTES = 8 << 20
_FLOOR_GB_PER_SECOND = 0.05
_RDMA = ("rc_", "dc_", "ud_", "srd", "gga_")
_PREFERENCE = ("ucx", "shm")

_RATE = Gauge(
    "reflux_transfer_self_test_bytes_per_second", "Rate of the start-up self-test, 0 if it failed", ["backend"]
)
_CHOSEN = Gauge("reflux_transfer_chosen", "1 for the backend that the start-up probe chose", ["backend"])


@dataclass(frozen=True)
class BackendStatus:
    """Outcome of one backend's self-test. `note` is its transports, or why it does not work."""

    name: str
    available: bool
    bytes_per_second: float
    note: str


@dataclass(frozen=True)
class Choice:
    """The chosen backend, the reason in a sentence, and every backend's status."""

    name: str
    reason: str
    statuses: tuple[BackendStatus, ...]


def probe(settings: TransferSettings | None = None) -> Choice:
    """Tests every backend by reading 8 MiB of this process's own memory; blocks for about 0.2 s.

    Raises `BackendUnavailable` when the configured backend, or all of them, fail the test.
    """
    settings = settings or TransferSettings()
    statuses = tuple(_test(name, settings) for name in BACKENDS)
    working = {status.name for status in statuses if status.available}
    report = "; ".join(f"{status.name}: {status.note}" for status in statuses)
    if settings.backend != "auto":
        if settings.backend not in working:
            raise BackendUnavailable(
                f"the configured transfer backend {settings.backend} does not work here ({report})"
            )
        choice = Choice(settings.backend, "configured", statuses)
    else:
        name = next((name for name in _PREFERENCE if name in working), None)
        if name is None:
            raise BackendUnavailable(f"no transfer backend works here ({report})")
        choice = Choice(name, f"first working one of {', '.join(_PREFERENCE)}", statuses)
    for status in statuses:
        _CHOSEN.labels(status.name).set(status.name == choice.name)
    log.info("transfer backend %s (%s): %s", choice.name, choice.reason, report)
    return choice


def _test(name: str, settings: TransferSettings) -> BackendStatus:
    try:
        backend = open_backend(name, settings)
    except BackendUnavailable as error:
        _RATE.labels(name).set(0)
        return BackendStatus(name, False, 0.0, str(error))
    try:
        rate = _self_test(backend)
    except (TransferError, MemoryError) as error:
        _RATE.labels(name).set(0)
        return BackendStatus(name, False, 0.0, f"self-test failed: {error}")
    finally:
        backend.close()
    _RATE.labels(name).set(rate)
    note = f"{rate / 1e9:.2f} GB/s" + (f" over {ucx_transports(settings)}" if name == "ucx" else "")
    if rate < _FLOOR_GB_PER_SECOND * 1e9:
        return BackendStatus(name, False, rate, f"{note}, below the floor of {_FLOOR_GB_PER_SECOND} GB/s")
    return BackendStatus(name, True, rate, note)


def _self_test(backend: TransferBackend) -> float:
    source, destination = backend.allocate(_SELF_TEST_BYTES), backend.allocate(_SELF_TEST_BYTES)
    source.view[:] = os.urandom(1 << 16) * (_SELF_TEST_BYTES >> 16)
    remote = backend.open(backend.describe(source))
    seconds = []
    for _ in range(2):  # the first read pays for page faults and the connection
        start = time.perf_counter()
        backend.read(remote, 0, destination, 0, _SELF_TEST_BYTES, 5.0)
        seconds.append(time.perf_counter() - start)
    backend.release(remote)
    if destination.view != source.view:
        raise TransferError("the bytes that arrived are others")
    return _SELF_TEST_BYTES / min(seconds)


def ucx_transports(settings: TransferSettings) -> str:
    """What the loaded UCX offers of the configured transports, and whether any of it is RDMA."""
    present = _listed_transports(settings)
    wanted = settings.ucx_transports
    rdma = sorted(name for name in present if name.startswith(_RDMA))
    return f"{wanted} of {','.join(sorted(present)) or 'unknown'}; " + (
        f"RDMA: {','.join(rdma)}" if rdma else "no RDMA"
    )


def _listed_transports(settings: TransferSettings) -> set[str]:
    library = Path(ucp.library_path(settings.ucx_library))
    tool = library.parent.parent / "bin" / "ucx_info"
    if not tool.exists():
        return set()
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library.parent), "UCX_LOG_LEVEL": "fatal"}
    try:
        done = subprocess.run(
            [str(tool), "-d"], env=environment, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return set()
    return {line.split()[-1] for line in done.stdout.splitlines() if "Transport:" in line}
