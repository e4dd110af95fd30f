import pytest
from prometheus_client import REGISTRY

from reflux_transfer.errors import BackendUnavailable
from reflux_transfer.probe import probe
from reflux_transfer.settings import TransferSettings

BROKEN = "/nonexistent/libucp.so.0"


def test_probe_measures_and_explains() -> None:
    choice = probe(TransferSettings())
    assert {status.name for status in choice.statuses} == {"shm", "ucx"}
    chosen = next(status for status in choice.statuses if status.name == choice.name)
    assert chosen.available
    assert chosen.bytes_per_second > 0
    assert "RDMA" in next(status.note for status in choice.statuses if status.name == "ucx")


def test_without_ucx_shm_is_chosen_and_the_reason_is_kept() -> None:
    choice = probe(TransferSettings(ucx_library=BROKEN))
    assert choice.name == "shm"
    assert BROKEN in next(status.note for status in choice.statuses if status.name == "ucx")


def test_a_configured_backend_that_does_not_work_is_an_error() -> None:
    with pytest.raises(BackendUnavailable, match="configured"):
        probe(TransferSettings(backend="ucx", ucx_library=BROKEN))


def test_the_choice_is_a_metric() -> None:
    probe(TransferSettings(backend="shm"))
    values = {name: REGISTRY.get_sample_value("reflux_transfer_chosen", {"backend": name}) for name in ("shm", "ucx")}
    assert values == {"shm": 1.0, "ucx": 0.0}
