"""Conformance: every backend passes the same suite, always between two real processes."""

import gc
import multiprocessing
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from owner_process import offer, pattern

from reflux_transfer import handles
from reflux_transfer.backends.base import TransferBackend
from reflux_transfer.errors import (
    BackendUnavailable,
    OutOfRange,
    PeerGone,
    ReadDeadlineExceeded,
    RegionBusy,
    RegionClosed,
    UnshareableRegion,
    WrongHandle,
)
from reflux_transfer.registry import BACKENDS, open_backend
from reflux_transfer.settings import TransferSettings

MIB = 1 << 20
SIZE = 17 * MIB + 11
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["numpy", "reflux_transfer.registry"])
CASES = ["shm", "ucx", "ucx-tcp", "tcp"]


class Owner:
    """The other process."""

    def __init__(self, backend: str, length: int) -> None:
        self.pipe, theirs = FORKS.Pipe()
        self.process = FORKS.Process(target=offer, args=(theirs, backend, TransferSettings(), length), daemon=True)
        self.process.start()
        theirs.close()
        assert self.pipe.poll(60), "the owner did not start"
        self.handle = self.pipe.recv()

    def withdraw(self) -> None:
        self.pipe.send("withdraw")
        assert self.pipe.recv() == "withdrawn"

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def close(self) -> None:
        self.kill()
        self.pipe.close()


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Backend name; "ucx-tcp" is ucx in error mode PEER, as towards another host."""
    if request.param == "ucx-tcp":
        monkeypatch.setenv("REFLUX_TRANSFER_UCX_TRANSPORTS", "tcp,self")
    return request.param.partition("-")[0]


@pytest.fixture
def backend(case: str) -> Iterator[TransferBackend]:
    try:
        opened = open_backend(case)
    except BackendUnavailable as error:
        pytest.skip(str(error))
    yield opened
    opened.close()


@pytest.fixture
def owner(backend: TransferBackend) -> Iterator[Owner]:
    process = Owner(backend.name, SIZE)
    yield process
    process.close()


def read(backend: TransferBackend, remote, offset: int, length: int, local_offset: int = 0) -> bytes:
    local = backend.allocate(local_offset + max(1, length))
    backend.read(remote, offset, local, local_offset, length, 30.0)
    assert not any(local.view[:local_offset])
    data = bytes(local.view[local_offset : local_offset + length])
    backend.unregister(local)
    return data


def test_any_range_arrives_bit_for_bit(backend: TransferBackend, owner: Owner) -> None:
    remote, truth = backend.open(owner.handle), pattern(SIZE)
    for offset, length, local_offset in [
        (0, 0, 0),
        (SIZE, 0, 0),
        (5, 1, 3),
        (0, 8, 0),
        (4097, 12_345, 1),
        (SIZE - 1, 1, 7),
    ]:
        assert read(backend, remote, offset, length, local_offset) == truth[offset : offset + length].tobytes()


def test_a_large_range_arrives_bit_for_bit(backend: TransferBackend) -> None:
    owner, local = Owner(backend.name, 64 * MIB), backend.allocate(64 * MIB)
    try:
        backend.read(backend.open(owner.handle), 0, local, 0, 64 * MIB, 60.0)
        assert np.array_equal(np.frombuffer(local.view, np.uint8), pattern(64 * MIB))
    finally:
        owner.close()


def test_reads_into_existing_memory(backend: TransferBackend, owner: Owner) -> None:
    buffer = np.zeros(1000, np.uint8)
    local, remote = backend.register(buffer), backend.open(owner.handle)
    backend.read(remote, 7, local, 100, 300, 30.0)
    assert bytes(buffer[100:400]) == pattern(400)[7:307].tobytes()
    assert not buffer[:100].any()
    assert not buffer[400:].any()


def test_sixteen_reads_at_once(backend: TransferBackend, owner: Owner) -> None:
    remote, truth, local = backend.open(owner.handle), pattern(SIZE), backend.allocate(16 * MIB)
    starts = [index * MIB + index % 11 for index in range(16)]

    def one(index: int) -> None:
        backend.read(remote, starts[index], local, index * MIB, MIB, 30.0)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(one, range(16)))
    for index, start in enumerate(starts):
        assert bytes(local.view[index * MIB : (index + 1) * MIB]) == truth[start : start + MIB].tobytes()


def test_ranges_outside_are_refused(backend: TransferBackend, owner: Owner) -> None:
    remote, local = backend.open(owner.handle), backend.allocate(100)
    for arguments in [(SIZE, 0, 1), (-1, 0, 1), (0, 100, 1), (0, -1, 1), (0, 0, 101), (0, 0, -1), (SIZE - 5, 0, 6)]:
        remote_offset, local_offset, length = arguments
        with pytest.raises(OutOfRange):
            backend.read(remote, remote_offset, local, local_offset, length, 30.0)
    assert not any(local.view)


def test_owner_killed_before_the_first_read(backend: TransferBackend, owner: Owner) -> None:
    remote, local = backend.open(owner.handle), backend.allocate(MIB)
    owner.kill()
    with pytest.raises(PeerGone):
        backend.read(remote, 0, local, 0, MIB, 10.0)


def test_owner_killed_between_reads(backend: TransferBackend, owner: Owner) -> None:
    remote, local = backend.open(owner.handle), backend.allocate(MIB)
    backend.read(remote, 0, local, 0, MIB, 30.0)
    owner.kill()
    for _ in range(2):
        with pytest.raises(PeerGone):
            backend.read(remote, 0, local, 0, MIB, 10.0)


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


def test_owner_that_stands_still_never_hangs_a_read(backend: TransferBackend, owner: Owner) -> None:
    remote, local = backend.open(owner.handle), backend.allocate(MIB)
    os.kill(owner.process.pid, 19)  # SIGSTOP: one-sided paths still work, the others must give up in time
    try:
        backend.read(remote, 0, local, 0, MIB, 1.0)
        assert bytes(local.view) == pattern(MIB).tobytes()
    except ReadDeadlineExceeded:
        pass
    finally:
        os.kill(owner.process.pid, 18)
    backend.read(remote, 0, local, 0, MIB, 30.0)
    assert bytes(local.view) == pattern(MIB).tobytes()


def test_spent_deadline_is_an_error(backend: TransferBackend, owner: Owner) -> None:
    remote, local = backend.open(owner.handle), backend.allocate(MIB)
    with pytest.raises(ReadDeadlineExceeded):
        backend.read(remote, 0, local, 0, MIB, -1.0)
    backend.read(remote, 0, local, 0, MIB, 30.0)


def test_reopening_after_the_owner_came_back(backend: TransferBackend, owner: Owner) -> None:
    remote = backend.open(owner.handle)
    owner.kill()
    backend.release(remote)
    second = Owner(backend.name, 1000)
    try:
        assert read(backend, backend.open(second.handle), 0, 1000) == pattern(1000).tobytes()
        with pytest.raises(PeerGone):
            read(backend, backend.open(owner.handle), 0, 1)
    finally:
        second.close()


def test_unregister_is_refused_while_a_read_is_in_flight(backend: TransferBackend) -> None:
    local = backend.allocate(10)
    with local.reading(0, 10), pytest.raises(RegionBusy):
        backend.unregister(local)
    backend.unregister(local)
    backend.unregister(local)
    with pytest.raises(RegionClosed):
        backend.describe(local)


def test_register_again_after_growing(backend: TransferBackend) -> None:
    for length in (10, 4096, 3 * MIB):
        source, local = backend.allocate(length), backend.allocate(length)
        source.view[:] = memoryview(pattern(length))
        remote = backend.open(backend.describe(source))
        backend.read(remote, 0, local, 0, length, 30.0)
        assert local.view == source.view
        backend.release(remote)
        backend.unregister(local)
        backend.unregister(source)


def test_bytes_that_are_no_handle(backend: TransferBackend, owner: Owner) -> None:
    envelope = handles.unseal(owner.handle, backend.name)
    fields = {name: value for name, value in envelope.items() if name not in ("format", "backend")}
    broken = [
        b"",
        b"x",
        b"[]",
        b"null",
        b"{}",
        owner.handle[:-3],
        owner.handle + b" " * 20_000,
        handles.seal("other", fields),
    ]
    broken += [handles.seal(backend.name, {**fields, name: None}) for name in fields]
    broken += [
        handles.seal(backend.name, {**fields, "length": -1}),
        handles.seal(backend.name, {**fields, "owner": {"pid": 1}}),
    ]
    for handle in broken:
        with pytest.raises(WrongHandle):
            backend.open(handle)


def test_handle_of_a_reused_pid_is_gone(backend: TransferBackend, owner: Owner) -> None:
    fields = handles.unseal(owner.handle, backend.name)
    fields["owner"]["start_ticks"] += 1
    with pytest.raises(PeerGone):
        backend.open(
            handles.seal(backend.name, {name: fields[name] for name in fields if name not in ("format", "backend")})
        )


def test_use_after_close(case: str) -> None:
    backend = open_backend(case)
    region = backend.allocate(10)
    remote = backend.open(backend.describe(region))
    backend.close()
    backend.close()
    for call in (
        lambda: backend.allocate(1),
        lambda: backend.open(b"x"),
        lambda: backend.read(remote, 0, region, 0, 1, 1.0),
    ):
        with pytest.raises(RegionClosed):
            call()


def test_open_and_close_leaks_neither_descriptors_nor_threads(case: str) -> None:
    def cycle() -> None:
        backend = open_backend(case)
        source, local = backend.allocate(MIB), backend.allocate(MIB)
        remote = backend.open(backend.describe(source))
        backend.read(remote, 0, local, 0, MIB, 30.0)
        backend.close()

    def held() -> tuple[int, int]:
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    cycle()
    before = held()
    for _ in range(5):
        cycle()
    assert held() == before


def test_withdrawn_shm_region_is_gone_although_mapped() -> None:
    backend, owner = open_backend("shm"), Owner("shm", 1000)
    try:
        remote, local = backend.open(owner.handle), backend.allocate(1000)
        backend.read(remote, 0, local, 0, 1000, 5.0)
        owner.withdraw()
        with pytest.raises(PeerGone, match="withdrawn"):
            backend.read(remote, 0, local, 0, 1000, 5.0)
        with pytest.raises(PeerGone):
            backend.open(owner.handle)
    finally:
        owner.close()
        backend.close()


def test_shm_cannot_describe_foreign_memory() -> None:
    backend = open_backend("shm")
    with pytest.raises(UnshareableRegion):
        backend.describe(backend.register(bytearray(10)))
    backend.close()


def test_shm_handle_cannot_name_another_file() -> None:
    backend, owner = open_backend("shm"), Owner("shm", 1000)
    try:
        fields = handles.unseal(owner.handle, "shm")
        fields["fd"] = 0
        with pytest.raises(WrongHandle):
            backend.open(handles.seal("shm", {name: fields[name] for name in ("owner", "fd", "length", "token")}))
    finally:
        owner.close()
        backend.close()


def test_missing_library_says_what_would_help() -> None:
    with pytest.raises(BackendUnavailable, match="libucx-cu12"):
        BACKENDS["ucx"](TransferSettings(ucx_library="/nonexistent/libucp.so.0"))


def test_unknown_transport_is_refused_by_name() -> None:
    with pytest.raises(BackendUnavailable, match="no_such"):
        BACKENDS["ucx"](TransferSettings(ucx_transports="no_such"))


def test_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="shm, ucx, tcp"):
        open_backend("pigeon")
