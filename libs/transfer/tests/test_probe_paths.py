import contextlib
import logging
import os
import re
from dataclasses import replace

import pytest
from owner_process import MIB, SIZE, Owner
from prometheus_client import REGISTRY

from reflux_transfer.backends.base import TransferBackend
from reflux_transfer.errors import PathTooSlow, PeerGone
from reflux_transfer.handles import Scope
from reflux_transfer.probe.paths import PathBook, measure_pair
from reflux_transfer.registry import open_backend
from reflux_transfer.settings import TransferSettings

UNREACHABLE = TransferSettings(floor_gb_per_second=1e6)
EASY = TransferSettings(floor_gb_per_second=1e-6)


def gauge(name: str, peer: str, backend: str) -> float | None:
    return REGISTRY.get_sample_value(f"reflux_transfer_path_{name}", {"peer": peer, "backend": backend})


def test_a_slow_path_is_an_error_that_names_the_floor(
    backend: TransferBackend, owner: Owner, caplog: pytest.LogCaptureFixture
) -> None:
    book, remote = PathBook(UNREACHABLE), backend.open(owner.handle)
    peer = remote.owner.label
    text = rf"path to {re.escape(peer)} by .* its floor is 1000000\.000 GB/s"
    with pytest.raises(PathTooSlow, match=text) as caught:
        book.check(backend, remote)
    assert 0 < caught.value.rate < caught.value.floor == 1e15
    assert "REFLUX_TRANSFER_FLOOR_GB_PER_SECOND" in caught.value.hint
    (status,) = book.statuses()
    assert (status.peer, status.backend, status.same_host, status.bytes) == (peer, backend.name, True, SIZE)
    assert (status.ok, status.bytes_per_second) == (False, caught.value.rate)
    assert gauge("ok", peer, backend.name) == 0
    assert gauge("bytes_per_second", peer, backend.name) == caught.value.rate
    assert any(peer in record.message for record in caplog.records if record.levelno == logging.ERROR)


def test_a_good_path_is_tested_once(backend: TransferBackend, owner: Owner) -> None:
    book, remote = PathBook(EASY), backend.open(owner.handle)
    peer = remote.owner.label
    first = book.check(backend, remote)
    assert book.check(backend, backend.open(owner.handle)) is first
    assert gauge("ok", peer, backend.name) == 1
    book.forget(peer)
    assert book.statuses() == ()
    assert gauge("ok", peer, backend.name) is None
    owner.kill()
    with pytest.raises(PeerGone):
        book.check(backend, remote)


def test_a_small_region_is_read_and_not_judged(backend: TransferBackend) -> None:
    source = backend.allocate(MIB)
    status = measure_pair(backend, backend.open(backend.describe(source)), UNREACHABLE)
    status.check()
    assert (status.bytes, status.judged, status.ok) == (MIB, False, True)
    assert 0 < status.bytes_per_second < status.floor


def test_no_more_than_the_test_length_is_read(backend: TransferBackend, owner: Owner) -> None:
    assert measure_pair(backend, backend.open(owner.handle), EASY, length=5 * MIB).bytes == 5 * MIB


def test_a_process_has_one_name_whatever_it_offers(backend: TransferBackend, owner: Owner) -> None:
    ours = {backend.open(backend.describe(backend.allocate(MIB), Scope(run))).owner.label for run in ("a", "b")}
    assert len(ours) == 1
    assert backend.open(owner.handle).owner.label not in ours
    assert f"pid {os.getpid()} " in ours.pop()


def test_the_book_keeps_the_latest_peers_only() -> None:
    book = PathBook(EASY)
    with contextlib.closing(open_backend("shm")) as shm:
        remote = shm.open(shm.describe(shm.allocate(4096)))
        owners = [replace(remote.owner, start_ticks=number) for number in range(260)]
        for owner in owners:
            book.check(shm, replace(remote, owner=owner))
    kept = {status.peer for status in book.statuses()}
    assert kept == {owner.label for owner in owners[4:]}
    assert gauge("ok", owners[3].label, "shm") is None
