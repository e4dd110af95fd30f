"""The backend that this process offers its memory by: the order of preference, the choice, and its reason."""

import logging
from dataclasses import dataclass

from reflux_transfer.errors import BackendUnavailable
from reflux_transfer.probe.metrics import CHOSEN
from reflux_transfer.probe.self_test import BackendStatus, self_test
from reflux_transfer.probe.transports import ucx_transports
from reflux_transfer.registry import BACKENDS
from reflux_transfer.settings import TransferSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """The chosen backend, the reason in a sentence, and every backend's status."""

    name: str
    reason: str
    statuses: tuple[BackendStatus, ...]


def probe(settings: TransferSettings | None = None) -> Choice:
    """Tests the backends by reading 32 MiB of this process's own memory; blocks for about half a second.

    Raises `PathTooSlow` when the configured backend is below its floor, and `BackendUnavailable` when it, or all of
    them, do not work.
    """
    settings = settings or TransferSettings()
    transports = ucx_transports(settings)
    order, why = preference(settings, rdma=bool(transports.rdma))
    wanted = {*order, settings.backend}
    statuses = tuple(_status(name, settings, wanted, str(transports)) for name in BACKENDS)
    by_name = {status.name: status for status in statuses}
    report = "; ".join(f"{status.name}: {status.note}" for status in statuses)
    if settings.backend != "auto":
        error = by_name[settings.backend].error
        if error is not None:
            log.error("the configured transfer backend %s does not work: %s", settings.backend, report)
            raise error
        choice = Choice(settings.backend, "configured", statuses)
    else:
        name = next((name for name in order if by_name[name].available), None)
        if name is None:
            raise BackendUnavailable(f"no transfer backend works here ({report})")
        choice = Choice(name, f"first working one of {', '.join(order)}: {why}", statuses)
    for status in statuses:
        CHOSEN.labels(status.name).set(status.name == choice.name)
    if across_hosts(settings) and choice.name == "ucx" and not transports.rdma:
        log.warning("ucx is to read across hosts and has no RDMA transport (%s)", transports)
    log.info("transfer backend %s (%s): %s", choice.name, choice.reason, report)
    return choice


def across_hosts(settings: TransferSettings) -> bool:
    """Whether peers on other hosts are to be reached: a NIC is named."""
    return settings.ucx_net_devices != "lo" or not _loopback(settings)


def preference(settings: TransferSettings, *, rdma: bool) -> tuple[tuple[str, ...], str]:
    """The order in which `auto` takes backends, and why."""
    if not across_hosts(settings):
        return ("ucx", "shm", "tcp"), "all peers are on this host"
    tcp = () if _loopback(settings) else ("tcp",)
    if rdma:
        return ("ucx", "nixl", *tcp), "peers are on other hosts, UCX has RDMA"
    return ("nixl", *tcp, "ucx"), "peers are on other hosts, UCX has no RDMA"


def _loopback(settings: TransferSettings) -> bool:
    host = settings.tcp_advertise or settings.tcp_listen.rpartition(":")[0]
    return host == "localhost" or host.startswith("127.")


def _status(name: str, settings: TransferSettings, wanted: set[str], transports: str) -> BackendStatus:
    if name == "nixl" and name not in wanted:  # its agent takes seconds to start on some hosts
        return BackendStatus(name, False, 0.0, "not tested, no peer is on another host")
    return self_test(name, settings, transports if name == "ucx" else "")
