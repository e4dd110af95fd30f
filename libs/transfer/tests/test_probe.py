import contextlib
import logging

import pytest
from prometheus_client import REGISTRY

from reflux_transfer.backends.shm import ShmBackend
from reflux_transfer.errors import BackendUnavailable, PathTooSlow, TransferError
from reflux_transfer.probe import choice as choice_module
from reflux_transfer.probe.choice import preference, probe, siblings_readable
from reflux_transfer.probe.self_test import measure
from reflux_transfer.probe.transports import Transports
from reflux_transfer.settings import TransferEnvironment, TransferSettings

BROKEN = "/nonexistent/libucp.so.0"
UNREACHABLE_GB_PER_SECOND = 1e6


def note_of(choice, name: str) -> str:
    return next(status.note for status in choice.statuses if status.name == name)


def test_probe_measures_and_explains(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        choice = probe(TransferSettings())
    assert {status.name for status in choice.statuses} == {"shm", "ucx", "tcp", "nixl"}
    chosen = next(status for status in choice.statuses if status.name == choice.name)
    assert chosen.available
    assert chosen.bytes_per_second > 0
    assert "RDMA" in note_of(choice, "ucx")
    line = caplog.messages[-1]
    for part in (f"transfer backend {choice.name}", "all peers are on this host", note_of(choice, "tcp")):
        assert part in line
    rate = REGISTRY.get_sample_value("reflux_transfer_self_test_bytes_per_second", {"backend": choice.name})
    assert rate == chosen.bytes_per_second


def test_without_ucx_shm_is_chosen_and_the_reason_is_kept() -> None:
    choice = probe(TransferSettings(ucx_library=BROKEN))
    assert choice.name == "shm"
    assert BROKEN in note_of(choice, "ucx")


def test_a_configured_backend_that_does_not_work_is_an_error_when_it_is_opened() -> None:
    choice = probe(TransferSettings(ucx_library=BROKEN), "ucx")
    assert choice.name == ""
    for transport in ("ucx", "auto"):
        with pytest.raises(BackendUnavailable, match="libucx-cu12"):
            choice.open(transport)
    with contextlib.closing(choice.open("shm")) as other:
        assert other.name == "shm"


def test_a_backend_below_its_floor_is_an_error_with_rate_floor_and_hint() -> None:
    slow = TransferSettings(floor_gb_per_second=UNREACHABLE_GB_PER_SECOND)
    with pytest.raises(PathTooSlow, match="its floor is 1000000") as caught:
        probe(slow, "tcp").open("tcp")
    assert 0 < caught.value.rate < caught.value.floor == UNREACHABLE_GB_PER_SECOND * 1e9
    assert "TCP_LISTEN" in caught.value.hint
    with pytest.raises(BackendUnavailable, match=r"no transfer backend works .*its floor"):
        probe(slow).open("auto")


def test_the_chosen_backend_is_what_auto_opens_with_the_settings_of_the_probe() -> None:
    choice = probe(TransferSettings(ucx_library=BROKEN, tcp_listen="127.0.0.2:0"))
    with contextlib.closing(choice.open("auto")) as chosen, contextlib.closing(choice.open("tcp")) as tcp:
        assert chosen.name == choice.name == "shm"
        assert b'"host":"127.0.0.2"' in tcp.describe(tcp.allocate(1))


def test_the_choice_is_a_metric() -> None:
    probe(TransferSettings(), "shm")
    values = {name: REGISTRY.get_sample_value("reflux_transfer_chosen", {"backend": name}) for name in ("shm", "ucx")}
    assert values == {"shm": 1.0, "ucx": 0.0}


class Corrupting(ShmBackend):
    def read(self, remote, remote_offset, local, local_offset, length, deadline_seconds) -> None:
        super().read(remote, remote_offset, local, local_offset, length, deadline_seconds)
        local.view[length // 2] ^= 1


def test_a_flipped_bit_fails_the_self_test() -> None:
    backend = Corrupting()
    with pytest.raises(TransferError, match="others"):
        measure(backend, 1 << 20)
    backend.close()
    backend = ShmBackend()
    assert measure(backend, 12345) > 0
    backend.close()


@pytest.mark.parametrize(
    ("settings", "rdma", "order"),
    [
        (TransferSettings(), False, ("ucx", "shm", "tcp")),
        (TransferSettings(), True, ("ucx", "shm", "tcp")),
        (TransferSettings(ucx_net_devices="mlx5_0:1"), True, ("ucx", "nixl")),
        (TransferSettings(ucx_net_devices="eth0", tcp_listen="10.0.0.1:0"), True, ("ucx", "nixl", "tcp")),
        (TransferSettings(ucx_net_devices="eth0", tcp_listen="10.0.0.1:0"), False, ("nixl", "tcp", "ucx")),
        (TransferSettings(tcp_listen="0.0.0.0:0", tcp_advertise="node-7"), False, ("nixl", "tcp", "ucx")),
    ],
)
def test_the_order_follows_where_the_peers_are(settings: TransferSettings, rdma: bool, order: tuple[str, ...]) -> None:
    assert preference(settings, rdma=rdma, cma=True)[0] == order


def test_where_processes_may_not_read_each_other_shared_memory_comes_first(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(choice_module, "_YAMA", tmp_path / "scope")
    monkeypatch.setattr(choice_module, "_STATUS", tmp_path / "status")
    assert siblings_readable(), "a kernel without Yama"
    (tmp_path / "status").write_text("Name:\tx\nCapEff:\t0000000000000000\n")
    for scope, readable in (("0", True), ("1", False), ("2", False), ("3", False)):
        (tmp_path / "scope").write_text(f"{scope}\n")
        assert siblings_readable() == readable
    (tmp_path / "status").write_text("Name:\tx\nCapEff:\t0000000000080000\n")
    (tmp_path / "scope").write_text("1\n")
    assert siblings_readable()
    assert preference(TransferSettings(), rdma=False, cma=False)[0] == ("shm", "tcp", "ucx")


def test_settings_are_read_from_the_environment_by_those_only_who_ask(monkeypatch) -> None:
    monkeypatch.setenv("REFLUX_TRANSFER_UCX_RMA_RAILS", "5")
    monkeypatch.setenv("REFLUX_TRANSFER_FLOOR_GB_PER_SECOND", "0.5")
    assert TransferSettings().ucx_rma_rails == 2
    assert TransferEnvironment() == TransferEnvironment(ucx_rma_rails=5, floor_gb_per_second=0.5)


def test_rdma_is_named_or_its_absence_is_said() -> None:
    assert str(Transports("cma,tcp", frozenset({"tcp", "cma"}))) == "cma,tcp of cma,tcp; no RDMA"
    assert str(Transports("all", frozenset({"rc_mlx5", "tcp", "srd"}))) == "all of rc_mlx5,srd,tcp; RDMA: rc_mlx5,srd"
    assert str(Transports("all", frozenset())) == "all of unknown; no RDMA"
