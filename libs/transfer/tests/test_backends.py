"""Conformance, first part: what arrives, what is refused, what is left behind. Every backend, two real processes."""

import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from owner_process import MIB, NIXL, SIZE, Owner, OwnerByAll, fill, first_difference, pattern

from reflux_transfer import memory
from reflux_transfer.backends.base import TransferBackend
from reflux_transfer.errors import OutOfRange, RegionClosed
from reflux_transfer.regions import RemoteRegion, Run
from reflux_transfer.registry import open_backend
from reflux_transfer.settings import TransferEnvironment

GIB = 1 << 30


def read(backend: TransferBackend, remote: RemoteRegion, offset: int, length: int, local_offset: int = 0) -> bytes:
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


def test_many_ranges_arrive_in_one_call(backend: TransferBackend, owner: Owner) -> None:
    remote, truth, local = backend.open(owner.handle), pattern(SIZE), backend.allocate(2 * MIB)
    runs = [Run(7 + 13_001 * index, 1021 * index + index % 3, 1000) for index in range(1200)]
    runs += [Run(3, 1_500_000, 0), Run(5 * MIB + 1, 1_500_001, 300_000)]
    expected = np.zeros(2 * MIB, np.uint8)
    for run in runs:
        source = truth[run.remote_offset : run.remote_offset + run.length]
        expected[run.local_offset : run.local_offset + run.length] = source
    backend.read_runs(remote, local, runs, 30.0)
    assert np.array_equal(np.frombuffer(local.view, np.uint8), expected)
    with pytest.raises(OutOfRange):
        backend.read_runs(remote, local, [Run(0, 0, 1), Run(SIZE, 0, 1)], 30.0)


@pytest.fixture(scope="module")
def gibibyte() -> Iterator[tuple[OwnerByAll, memoryview]]:
    """An owner of 1 GiB that it offers by all backends, and memory to read it into: filling it takes longest."""
    owner = OwnerByAll(["shm", "ucx", "tcp", *NIXL], GIB)
    yield owner, memory.private(GIB)
    owner.close()


@pytest.mark.parametrize("case", ["shm", "ucx", "tcp", *NIXL], indirect=True)
def test_one_gibibyte_arrives_bit_for_bit(backend: TransferBackend, gibibyte: tuple[OwnerByAll, memoryview]) -> None:
    owner, view = gibibyte
    np.frombuffer(view, np.uint8).fill(0)
    backend.read(backend.open(owner.handles[backend.name]), 0, backend.register(view), 0, GIB, 120.0)
    assert first_difference(view) is None


@pytest.mark.parametrize("case", ["ucx-tcp"], indirect=True)
@pytest.mark.parametrize("length", [64 * MIB + 1, pytest.param(GIB, marks=pytest.mark.slow)])
def test_a_large_range_arrives_without_cma(backend: TransferBackend, length: int) -> None:
    owner, local = Owner(backend.name, length), backend.allocate(length)
    try:
        backend.read(backend.open(owner.handle), 0, local, 0, length, 120.0)
        assert first_difference(local.view) is None
    finally:
        owner.close()


def test_reads_into_existing_memory(backend: TransferBackend, owner: Owner) -> None:
    buffer = np.zeros(1000, np.uint8)
    local, remote = backend.register(buffer), backend.open(owner.handle)
    backend.read(remote, 7, local, 100, 300, 30.0)
    assert bytes(buffer[100:400]) == pattern(400)[7:307].tobytes()
    assert not buffer[:100].any()
    assert not buffer[400:].any()


def test_sixty_four_reads_at_once(backend: TransferBackend, owner: Owner) -> None:
    size, count = MIB // 4, 64
    remote, truth, local = backend.open(owner.handle), pattern(SIZE), backend.allocate(count * size)
    starts = [index * size + index % 11 for index in range(count)]
    together = threading.Barrier(count)

    def one(index: int) -> None:
        together.wait(30)
        backend.read(remote, starts[index], local, index * size, size, 60.0)

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(one, range(count)))
    for index, start in enumerate(starts):
        assert bytes(local.view[index * size : (index + 1) * size]) == truth[start : start + size].tobytes()


def test_ranges_outside_are_refused(backend: TransferBackend, owner: Owner) -> None:
    remote, local = backend.open(owner.handle), backend.allocate(100)
    for arguments in [(SIZE, 0, 1), (-1, 0, 1), (0, 100, 1), (0, -1, 1), (0, 0, 101), (0, 0, -1), (SIZE - 5, 0, 6)]:
        remote_offset, local_offset, length = arguments
        with pytest.raises(OutOfRange):
            backend.read(remote, remote_offset, local, local_offset, length, 30.0)
    assert not any(local.view)


def test_register_again_after_growing_in_place(backend: TransferBackend) -> None:
    buffer = memory.private(3 * MIB)
    for length in (10, 4096, 3 * MIB):
        source, local = backend.allocate(length), backend.register(buffer[:length])
        fill(source.view)
        remote = backend.open(backend.describe(source))
        backend.read(remote, 0, local, 0, length, 30.0)
        assert local.view == source.view
        backend.release(remote)
        backend.unregister(local)
        backend.unregister(source)


def test_use_after_close(case: str) -> None:
    backend = open_backend(case, TransferEnvironment())
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
        backend = open_backend(case, TransferEnvironment())
        source, local = backend.allocate(MIB), backend.allocate(MIB)
        remote = backend.open(backend.describe(source))
        backend.read(remote, 0, local, 0, MIB, 30.0)
        backend.close()

    def held() -> tuple[int, int]:
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))

    cycle()
    before = held()
    for _ in range(5):
        cycle()
    assert held() == before


def test_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="shm, ucx, tcp, nixl"):
        open_backend("pigeon")
