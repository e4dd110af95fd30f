import contextlib
import logging
import os

import pytest
from owner_process import MIB, SIZE, Owner
from prometheus_client import REGISTRY

from reflux_transfer.backends.base import TransferBackend
from reflux_transfer.errors import PathTooSlow, PeerGone, WrongHandle
from reflux_transfer.handles import Scope
from reflux_transfer.probe.paths import PathBook, measure_pair, peer_of
from reflux_transfer.registry import open_backend
from reflux_transfer.settings import TransferSettings

UNREACHABLE = TransferSettings(floor_gb_per_second=1e6)
EASY = TransferSettings(floor_gb_per_second=1e-6)


def gauge(name: str, peer: str, backend: str) -> float | None:
    return REGISTRY.get_sample_value(f"reflux_transfer_path_{name}", {"peer": peer, "backend": backend})


def test_a_slow_path_is_an_error_that_names_the_floor(
    backend: TransferBackend, owner: Owner, caplog: pytest.LogCaptureFixture
) -> None:
    book = PathBook(UNREACHABLE)
    with pytest.raises(PathTooSlow, match=r"path to learner-0 by .* its floor is 1000000\.000 GB/s") as caught:
        book.check(backend, owner.handle, peer="learner-0")
    assert 0 < caught.value.rate < caught.value.floor == 1e15
    assert "REFLUX_TRANSFER_FLOOR_GB_PER_SECOND" in caught.value.hint
    (status,) = book.statuses()
    assert (status.peer, status.backend, status.same_host, status.bytes) == ("learner-0", backend.name, True, SIZE)
    assert (status.ok, status.bytes_per_second) == (False, caught.value.rate)
    assert gauge("ok", "learner-0", backend.name) == 0
    assert gauge("bytes_per_second", "learner-0", backend.name) == caught.value.rate
    assert any("learner-0" in record.message for record in caplog.records if record.levelno == logging.ERROR)


def test_a_good_path_is_tested_once(backend: TransferBackend, owner: Owner) -> None:
    book = PathBook(EASY)
    first = book.check(backend, owner.handle, peer="learner-1")
    assert book.check(backend, owner.handle, peer="learner-1") is first
    assert gauge("ok", "learner-1", backend.name) == 1
    book.forget("learner-1")
    assert book.statuses() == ()
    assert gauge("ok", "learner-1", backend.name) is None
    owner.kill()
    with pytest.raises(PeerGone):
        book.check(backend, owner.handle, peer="learner-1")


def test_a_small_region_is_read_and_not_judged(backend: TransferBackend) -> None:
    source = backend.allocate(MIB)
    status = measure_pair(backend, backend.describe(source), peer="small", settings=UNREACHABLE)
    status.check()
    assert (status.bytes, status.judged, status.ok) == (MIB, False, True)
    assert 0 < status.bytes_per_second < status.floor


def test_no_more_than_the_test_length_is_read(backend: TransferBackend, owner: Owner) -> None:
    assert measure_pair(backend, owner.handle, peer="p", settings=EASY, length=5 * MIB).bytes == 5 * MIB


def test_a_path_is_not_tested_for_another_run(backend: TransferBackend, owner: Owner) -> None:
    with pytest.raises(WrongHandle, match="run-9"):
        measure_pair(backend, owner.handle, peer="p", scope=Scope("run-9"))
    with pytest.raises(WrongHandle):
        measure_pair(backend, b"no handle", peer="p")


def test_a_process_has_one_name_whatever_it_offers(backend: TransferBackend, owner: Owner) -> None:
    ours = {peer_of(backend.describe(backend.allocate(MIB), Scope(run))) for run in ("a", "b")}
    assert len(ours) == 1
    assert peer_of(owner.handle) not in ours
    assert f"pid {os.getpid()} " in ours.pop()


def test_the_book_keeps_the_latest_peers_only() -> None:
    book = PathBook(EASY)
    with contextlib.closing(open_backend("shm")) as shm:
        handle = shm.describe(shm.allocate(4096))
        for number in range(260):
            book.check(shm, handle, peer=f"kept-{number:03d}")
    assert [book.statuses()[0].peer, len(book.statuses())] == ["kept-004", 256]
    assert gauge("ok", "kept-003", "shm") is None
