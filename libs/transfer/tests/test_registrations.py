import mmap
import threading

import numpy as np
import pytest
from owner_process import MIB, SIZE, Owner, pattern

from reflux_transfer.backends.base import TransferBackend
from reflux_transfer.backends.shm import ShmBackend
from reflux_transfer.errors import RegionBusy, RegionClosed
from reflux_transfer.registrations import RegistrationCache


def test_a_grown_buffer_is_registered_anew_by_the_cache(backend: TransferBackend, owner: Owner) -> None:
    memory = memoryview(mmap.mmap(-1, 2 * MIB))
    cache, remote = RegistrationCache(backend), backend.open(owner.handle)
    small = cache.get(memory[:4096], 1)
    backend.read(remote, 0, small, 0, 4096, 30.0)
    grown = cache.get(memory, 1)
    assert (grown.address, grown.length) == (small.address, 2 * MIB)
    backend.read(remote, SIZE - MIB, grown, MIB, MIB, 30.0)
    assert bytes(memory[:4096]) == pattern(4096).tobytes()
    assert bytes(memory[MIB:]) == pattern(SIZE)[-MIB:].tobytes()
    with pytest.raises(RegionClosed):
        backend.read(remote, 0, small, 0, 1, 30.0)
    assert len(cache) == 1


def test_equal_buffers_are_registered_once_and_generations_apart() -> None:
    backend = ShmBackend()
    cache, buffer = RegistrationCache(backend), np.zeros(100, np.uint8)
    first = cache.get(buffer, 1)
    assert cache.get(buffer, 1) is first
    assert cache.get(memoryview(buffer), 1) is first
    second = cache.get(buffer, 2)  # freed and mapped again at the same place
    assert second is not first
    with pytest.raises(RegionClosed):
        first.check_open()
    second.check_open()
    backend.close()


def test_the_least_recently_used_registration_goes_first() -> None:
    backend = ShmBackend()
    cache, buffers = RegistrationCache(backend, capacity=2), [np.zeros(10, np.uint8) for _ in range(3)]
    first, second = (cache.get(buffer, 1) for buffer in buffers[:2])
    assert cache.get(buffers[0], 1) is first
    cache.get(buffers[2], 1)
    first.check_open()
    with pytest.raises(RegionClosed):
        second.check_open()
    assert len(cache) == 2
    backend.close()


def test_a_busy_region_retires_after_its_reads() -> None:
    backend = ShmBackend()
    cache, buffer = RegistrationCache(backend), np.zeros(100, np.uint8)
    region = cache.get(buffer, 1)
    with region.reading(0, 1):
        with pytest.raises(RegionBusy):
            cache.drop(region.address)
        fresh = cache.get(buffer, 1)
        assert fresh is not region
        region.check_open()
        assert len(cache) == 2
    cache.drop(region.address)
    assert len(cache) == 0
    for each in (region, fresh):
        with pytest.raises(RegionClosed):
            each.check_open()
    cache.drop(12345)
    backend.close()


def test_threads_share_one_registration() -> None:
    backend = ShmBackend()
    cache, buffer, seen = RegistrationCache(backend), np.zeros(100, np.uint8), []
    start = threading.Barrier(8)

    def one() -> None:
        start.wait(30)
        seen.append(cache.get(buffer, 1))

    threads = [threading.Thread(target=one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(seen) == 8
    assert len(set(map(id, seen))) == 1
    backend.close()
