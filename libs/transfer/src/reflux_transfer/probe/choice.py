"""The backend that this process offers its memory by: the order of preference, the choice, and its reason."""

import logging
from dataclasses import dataclass
from pathlib import Path

from reflux_transfer.backends.base import TransferBackend
from reflux_transfer.errors import BackendUnavailable
from reflux_transfer.probe.metrics import CHOSEN
from reflux_transfer.probe.self_test import BackendStatus, self_test
from reflux_transfer.probe.transports import ucx_transports
from reflux_transfer.registry import BACKENDS, open_backend
from reflux_transfer.settings import TransferSettings, Transport

log = logging.getLogger(__name__)

_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_STATUS = Path("/proc/self/status")
_CAP_SYS_PTRACE = 1 << 19


@dataclass(frozen=True)
class Choice:
    """The chosen backend, the reason in a sentence, and every backend's status. `name` is empty when none works."""

    name: str
    reason: str
    statuses: tuple[BackendStatus, ...]
    settings: TransferSettings

    def open(self, transport: str) -> TransferBackend:
        """Opens a transport, for `auto` the chosen backend.

        Raises `BackendUnavailable` for one that failed its self-test, with what that found, and what `open_backend`
        raises.
        """
        name = self.name if transport == "auto" else transport
        if not name:
            raise BackendUnavailable(self.reason)
        for status in self.statuses:
            if status.name == name and status.error:
                raise status.error
        return open_backend(name, self.settings)


def probe(settings: TransferSettings, wanted: Transport = "auto") -> Choice:
    """Tests the backends by reading 32 MiB of this process's own memory; blocks for about half a second.

    What does not work is told by `Choice.open`: a process starts without transports, too, and answers for itself.
    """
    transports = ucx_transports(settings)
    order, why = preference(settings, rdma=bool(transports.rdma), cma=siblings_readable())
    tested = {*order, wanted}
    statuses = tuple(_status(name, settings, tested, str(transports)) for name in BACKENDS)
    report = "; ".join(f"{status.name}: {status.note}" for status in statuses)
    working = {status.name for status in statuses if status.available}
    name = next((name for name in (order if wanted == "auto" else (wanted,)) if name in working), "")
    if wanted != "auto":
        reason = "configured" if name else f"the configured transfer backend {wanted} does not work here ({report})"
    else:
        reason = f"first working one of {', '.join(order)}: {why}" if name else f"no transfer backend works ({report})"
    for status in statuses:
        CHOSEN.labels(status.name).set(status.name == name)
    if across_hosts(settings) and name == "ucx" and not transports.rdma:
        log.warning("ucx is to read across hosts and has no RDMA transport (%s)", transports)
    if name:
        log.info("transfer backend %s (%s): %s", name, reason, report)
    else:
        log.error("%s", reason)
    return Choice(name, reason, statuses, settings)


def across_hosts(settings: TransferSettings) -> bool:
    """Whether peers on other hosts are to be reached: a NIC is named."""
    return settings.ucx_net_devices != "lo" or not _loopback(settings)


def preference(settings: TransferSettings, *, rdma: bool, cma: bool) -> tuple[tuple[str, ...], str]:
    """The order in which `auto` takes backends, and why. `cma`: processes of this host may read each other."""
    if not across_hosts(settings):
        if cma:
            return ("ucx", "shm", "tcp"), "all peers are on this host"
        return ("shm", "tcp", "ucx"), "all peers are on this host, ptrace is restricted"
    tcp = () if _loopback(settings) else ("tcp",)
    if rdma:
        return ("ucx", "nixl", *tcp), "peers are on other hosts, UCX has RDMA"
    return ("nixl", *tcp, "ucx"), "peers are on other hosts, UCX has no RDMA"


def siblings_readable() -> bool:
    """Whether a process may read one that is not its child by cma, which the self-test inside a process cannot tell.

    Yama (Documentation/admin-guide/LSM/Yama.rst): 0 allows it, 1 and 2 only with CAP_SYS_PTRACE, 3 never.
    """
    try:
        scope = int(_YAMA.read_text())
    except OSError:
        return True  # a kernel without Yama
    capabilities = next(line for line in _STATUS.read_text().splitlines() if line.startswith("CapEff:"))
    return scope == 0 or (scope < 3 and bool(int(capabilities.split()[1], 16) & _CAP_SYS_PTRACE))


def _loopback(settings: TransferSettings) -> bool:
    host = settings.tcp_advertise or settings.tcp_listen.rpartition(":")[0]
    return host == "localhost" or host.startswith("127.")


def _status(name: str, settings: TransferSettings, wanted: set[str], transports: str) -> BackendStatus:
    if name == "nixl" and name not in wanted:  # its agent takes seconds to start on some hosts
        return BackendStatus(name, False, 0.0, "not tested, no peer is on another host")
    return self_test(name, settings, transports if name == "ucx" else "")
