"""Conformance, second part: owners that die, stand still, or come back. Nothing hangs, nothing false is a success."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from owner_process import MIB, SIZE, Owner, first_difference, pattern

from reflux_transfer.backends.base import TransferBackend
from reflux_transfer.errors import PeerGone, ReadDeadlineExceeded


def test_owner_killed_before_the_first_read(backend: TransferBackend, owner: Owner) -> None:
    remote, local = backend.open(owner.handle), backend.allocate(MIB)
    owner.kill()
    with pytest.raises(PeerGone):
        backend.read(remote, 0, local, 0, MIB, 10.0)


def test_owner_killed_after_a_read_that_succeeded(backend: TransferBackend, owner: Owner) -> None:
    remote, local, other = backend.open(owner.handle), backend.allocate(MIB), backend.allocate(MIB)
    backend.read(remote, 0, local, 0, MIB, 30.0)
    owner.kill()
    assert first_difference(local.view) is None
    for _ in range(2):
        with pytest.raises(PeerGone):
            backend.read(remote, 0, other, 0, MIB, 10.0)
    backend.release(remote)
    backend.unregister(other)
    assert first_difference(local.view) is None


def test_owner_killed_while_reads_run_ends_them_all(backend: TransferBackend, owner: Owner) -> None:
    remote, local, started = backend.open(owner.handle), backend.allocate(SIZE), threading.Event()

    def loop(_index: int) -> str:
        while True:
            try:
                backend.read(remote, 0, local, 0, SIZE, 20.0)
            except PeerGone:
                return "gone"
            started.set()

    with ThreadPoolExecutor(3) as pool:
        results = [pool.submit(loop, index) for index in range(3)]
        assert started.wait(30)
        owner.kill()
        assert [result.result(timeout=30) for result in results] == ["gone"] * 3
    backend.unregister(local)


def test_owner_that_stands_still_never_hangs_a_read(backend: TransferBackend, owner: Owner) -> None:
    remote, local = backend.open(owner.handle), backend.allocate(MIB)
    os.kill(owner.process.pid, signal.SIGSTOP)  # one-sided paths still work, the others must give up in time
    try:
        backend.read(remote, 0, local, 0, MIB, 0.5)
        assert first_difference(local.view) is None
    except ReadDeadlineExceeded:
        pass
    finally:
        os.kill(owner.process.pid, signal.SIGCONT)
    backend.read(remote, 3 * MIB + 5, local, 0, MIB, 30.0)  # another range: a late answer to the first is no answer
    assert bytes(local.view) == pattern(SIZE)[3 * MIB + 5 : 4 * MIB + 5].tobytes()


def test_spent_deadline_is_an_error(backend: TransferBackend, owner: Owner) -> None:
    remote, local = backend.open(owner.handle), backend.allocate(MIB)
    with pytest.raises(ReadDeadlineExceeded):
        backend.read(remote, 0, local, 0, MIB, -1.0)
    backend.read(remote, 0, local, 0, MIB, 30.0)
    assert first_difference(local.view) is None


def test_reopening_after_the_owner_came_back(backend: TransferBackend, owner: Owner) -> None:
    remote = backend.open(owner.handle)
    owner.kill()
    backend.release(remote)
    second, local = Owner(backend.name, 1000), backend.allocate(1000)
    try:
        again = backend.open(second.handle)
        backend.read(again, 0, local, 0, 1000, 30.0)
        assert first_difference(local.view) is None
        with pytest.raises(PeerGone):
            backend.open(owner.handle)
    finally:
        second.close()
