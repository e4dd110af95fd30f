"""Conformance, third part: regions, remotes and backends that end before, while and after they are read."""

import gc
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager

import pytest
from owner_process import MIB, SIZE, Owner, first_difference

from reflux_transfer.backends.base import TransferBackend
from reflux_transfer.backends.ucx_lanes import Connection
from reflux_transfer.errors import PeerGone, RegionBusy, RegionClosed, WrongHandle
from reflux_transfer.peer import PeerWatch
from reflux_transfer.regions import LocalRegion, RemoteRegion
from reflux_transfer.registry import open_backend
from reflux_transfer.settings import TransferEnvironment


class Gate:
    """Where a read stands still."""

    def __init__(self) -> None:
        self._reached, self._opened = threading.Event(), threading.Event()

    def reached(self) -> bool:
        """Waits for the read to come."""
        return self._reached.wait(60)

    def open(self) -> None:
        self._opened.set()

    def stand_still(self) -> None:
        self._reached.set()
        assert self._opened.wait(60)


@contextmanager
def reads_stand_still(remote: RemoteRegion) -> Iterator[Gate]:
    """Reads of the region begin and stop, until the gate is opened or the block ends."""
    gate, watched = Gate(), getattr(remote.resource, "watch", None) is not None
    kind, name = (PeerWatch, "check") if watched else (Connection, "get")
    real = getattr(kind, name)

    def gated(*arguments: object) -> object:
        gate.stand_still()
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, name, gated)
        try:
            yield gate
        finally:
            gate.open()


def test_a_withdrawn_region_is_gone(backend: TransferBackend, owner: Owner) -> None:
    remote, local = backend.open(owner.handle), backend.allocate(1000)
    backend.read(remote, 0, local, 0, 1000, 30.0)
    owner.withdraw()
    for _ in range(2):
        with pytest.raises(PeerGone, match="withdrawn"):
            backend.read(remote, 0, local, 0, 1000, 30.0)
    with pytest.raises(PeerGone, match="withdrawn"):
        backend.read(backend.open(owner.handle), 0, local, 0, 1000, 30.0)


def test_a_region_of_a_closed_backend_is_gone(backend: TransferBackend, owner: Owner) -> None:
    remote, local = backend.open(owner.handle), backend.allocate(1000)
    backend.read(remote, 0, local, 0, 1000, 30.0)
    owner.close_backend()
    with pytest.raises(PeerGone):
        backend.read(remote, 0, local, 0, 1000, 30.0)
    with pytest.raises(PeerGone):
        backend.read(backend.open(owner.handle), 0, local, 0, 1000, 30.0)


def test_memory_that_is_used_for_something_else_is_never_read(backend: TransferBackend, owner: Owner) -> None:
    remote, local = backend.open(owner.handle), backend.allocate(SIZE)
    second = owner.reuse()
    for _ in range(2):
        with pytest.raises(PeerGone):
            backend.read(remote, 0, local, 0, SIZE, 30.0)
    with pytest.raises((PeerGone, WrongHandle)):
        backend.read(backend.open(owner.handle), SIZE - 1, local, 0, 1, 30.0)
    backend.read(backend.open(second), 0, local, 0, SIZE, 30.0)  # the owner has not suffered
    assert first_difference(local.view) is None


def test_a_read_that_succeeds_has_read_before_the_withdrawal(backend: TransferBackend, owner: Owner) -> None:
    handle = owner.handle
    locals_ = [backend.allocate(SIZE) for _ in range(2)]

    def until_gone(remote: RemoteRegion, local: LocalRegion) -> int | None:
        while True:
            try:
                backend.read(remote, 0, local, 0, SIZE, 30.0)
            except PeerGone:
                return None
            started.release()
            if (wrong := first_difference(local.view)) is not None:
                return wrong

    for _ in range(3):
        started = threading.Semaphore(0)
        with ThreadPoolExecutor(2) as pool:
            # Opened here: a reader that first opens after the withdrawal finds nothing, which is no read.
            results = [pool.submit(until_gone, backend.open(handle), local) for local in locals_]
            assert started.acquire(timeout=60)
            handle = owner.reuse()
            assert [result.result(timeout=60) for result in results] == [None, None]


def test_unregister_is_refused_while_a_read_is_in_flight(backend: TransferBackend, owner: Owner) -> None:
    remote, local = backend.open(owner.handle), backend.allocate(MIB)
    with ThreadPoolExecutor(1) as pool, reads_stand_still(remote) as gate:
        read = pool.submit(backend.read, remote, 0, local, 0, MIB, 60.0)
        assert gate.reached()
        with pytest.raises(RegionBusy):
            backend.unregister(local)
        gate.open()
        read.result(timeout=60)
    assert first_difference(local.view) is None
    backend.unregister(local)
    backend.unregister(local)
    with pytest.raises(RegionClosed):
        backend.describe(local)


def test_close_and_release_wait_for_a_read_in_flight_and_leave_nothing(case: str, owner: Owner) -> None:
    gc.collect()
    before = {thread.name for thread in threading.enumerate()}
    backend = open_backend(case, TransferEnvironment())
    remote, local = backend.open(owner.handle), backend.allocate(MIB)
    with ThreadPoolExecutor(3) as pool, reads_stand_still(remote) as gate:
        read = pool.submit(backend.read, remote, 0, local, 0, MIB, 60.0)
        assert gate.reached()
        ends = [pool.submit(backend.release, remote), pool.submit(backend.close)]
        assert not wait(ends, 0.05, FIRST_COMPLETED).done
        gate.open()
        for each in (read, *ends):
            each.result(timeout=60)
    assert first_difference(local.view) is None
    assert {thread.name for thread in threading.enumerate()} == before
    with pytest.raises(RegionClosed):
        backend.read(remote, 0, local, 0, MIB, 1.0)
    with pytest.raises(RegionClosed):
        local.check_open()


def test_read_after_release(backend: TransferBackend, owner: Owner) -> None:
    remote, local = backend.open(owner.handle), backend.allocate(10)
    backend.read(remote, 0, local, 0, 10, 30.0)
    backend.release(remote)
    backend.release(remote)
    for length in (0, 10):
        with pytest.raises(RegionClosed):
            backend.read(remote, 0, local, 0, length, 30.0)
    backend.read(backend.open(owner.handle), 0, local, 0, 10, 30.0)
