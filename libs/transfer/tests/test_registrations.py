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
    cache, remote = RegistrationCache(), backend.open(owner.handle)
    small = cache.get(backend, memory[:4096], 1)
    backend.read(remote, 0, small, 0, 4096, 30.0)
    grown = cache.get(backend, memory, 1)
    assert (grown.address, grown.length) == (small.address, 2 * MIB)
    backend.read(remote, SIZE - MIB, grown, MIB, MIB, 30.0)
    assert bytes(memory[:4096]) == pattern(4096).tobytes()
    assert bytes(memory[MIB:]) == pattern(SIZE)[-MIB:].tobytes()
    with pytest.raises(RegionClosed):
        backend.read(remote, 0, small, 0, 1, 30.0)
    assert len(cache) == 1


def test_backends_have_registrations_of_their_own_and_all_end_together() -> None:
    backends, cache, buffer = [ShmBackend(), ShmBackend()], RegistrationCache(), np.zeros(100, np.uint8)
    regions = [cache.get(backend, buffer) for backend in backends]
    assert [cache.get(backend, buffer) for backend in backends] == regions
    assert len({id(region) for region in regions}) == 2
    backends[0].close()  # has withdrawn its own
    cache.clear()
    assert len(cache) == 0
    for region in regions:
        with pytest.raises(RegionClosed):
            region.check_open()
    backends[1].close()


def test_equal_buffers_are_registered_once_and_generations_apart() -> None:
    backend = ShmBackend()
    cache, buffer = RegistrationCache(), np.zeros(100, np.uint8)
    first = cache.get(backend, buffer, 1)
    assert cache.get(backend, buffer, 1) is first
    assert cache.get(backend, memoryview(buffer), 1) is first
    second = cache.get(backend, buffer, 2)  # freed and mapped again at the same place
    assert second is not first
    with pytest.raises(RegionClosed):
        first.check_open()
    second.check_open()
    backend.close()


def test_the_least_recently_used_registration_goes_first() -> None:
    backend = ShmBackend()
    cache, buffers = RegistrationCache(capacity=2), [np.zeros(10, np.uint8) for _ in range(3)]
    first, second = (cache.get(backend, buffer, 1) for buffer in buffers[:2])
    assert cache.get(backend, buffers[0], 1) is first
    cache.get(backend, buffers[2], 1)
    first.check_open()
    with pytest.raises(RegionClosed):
        second.check_open()
    assert len(cache) == 2
    backend.close()


def test_a_busy_region_retires_after_its_reads() -> None:
    backend = ShmBackend()
    cache, buffer = RegistrationCache(), np.zeros(100, np.uint8)
    region = cache.get(backend, buffer, 1)
    with region.reading(0, 1):
        with pytest.raises(RegionBusy):
            cache.drop(region.address)
        fresh = cache.get(backend, buffer, 1)
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
    cache, buffer, seen = RegistrationCache(), np.zeros(100, np.uint8), []
    start = threading.Barrier(8)

    def one() -> None:
        start.wait(30)
        seen.append(cache.get(backend, buffer, 1))

    threads = [threading.Thread(target=one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(seen) == 8
    assert len(set(map(id, seen))) == 1
    backend.close()
