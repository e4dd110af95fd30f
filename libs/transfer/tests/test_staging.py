"""How a staging ends: written, failed while it is written, or closed away; and the thread that hashes for it."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from weights import LAYOUT, SLICE, LastingShm, assert_holds, tensors

from reflux_transfer.arenas.hashing import Hasher
from reflux_transfer.arenas.header import Header, State
from reflux_transfer.arenas.publisher import PublisherArenas
from reflux_transfer.arenas.staging import copy
from reflux_transfer.backends.shm import ShmBackend
from reflux_transfer.errors import ArenasBusy, GenerationGone, LayoutError
from reflux_transfer.pulling.source import RemoteSource
from reflux_transfer.pulling.stream import follow
from reflux_transfer.pulling.whole import whole
from reflux_transfer.regions import LocalRegion


@pytest.fixture
def backend() -> Iterator[ShmBackend]:
    opened = ShmBackend()
    yield opened
    opened.close()


@pytest.fixture
def arenas(backend: ShmBackend) -> PublisherArenas:
    return PublisherArenas(backend, LAYOUT, SLICE)


def local_region(backend: ShmBackend) -> LocalRegion:
    return backend.allocate(LAYOUT.region_bytes)


def test_a_generation_is_written_once(arenas: PublisherArenas) -> None:
    staging = arenas.begin()
    staging.write(tensors(1))
    with pytest.raises(LayoutError, match="written or given up before"):
        staging.write(tensors(2))
    staging.fail("too late")
    assert Header.parse(staging._view).state == State.SEALED
    assert_holds(arenas.view(staging.generation), tensors(1))


def test_a_transposed_tensor_is_staged_in_its_logical_order(arenas: PublisherArenas) -> None:
    staging = arenas.begin()
    staging.write({**tensors(1), "big": np.asfortranarray(tensors(1)["big"])})
    assert_holds(arenas.view(staging.generation), tensors(1))


def test_a_writer_whose_generation_was_failed_never_touches_the_next_one(arenas: PublisherArenas) -> None:
    staging, done = arenas.begin(), []
    arenas.pin(arenas.begin().generation)

    def cast(part: Any, place: memoryview) -> None:
        done.append(part)
        if len(done) == 2:
            staging.fail("aborted by the broker")
            with pytest.raises(ArenasBusy, match="in use"):
                arenas.begin()
        copy(part, place)

    with pytest.raises(GenerationGone, match="generation 1 is failed: aborted by the broker"):
        staging.write(tensors(1), cast)
    assert len(done) == 2
    after = arenas.begin()
    assert after.generation == 3
    staging.fail("again")  # of the generation that is gone
    assert after.write(tensors(2)) == arenas.fingerprint(3)
    assert_holds(arenas.view(3), tensors(2))


def test_a_generation_failed_when_all_its_pieces_lie_there_is_not_sealed(
    arenas: PublisherArenas, backend: ShmBackend
) -> None:
    staging, other = arenas.begin(), arenas.begin()
    other.write(tensors(2))
    remote, fingerprint_of = backend.open(staging.offer()), arenas.fingerprint

    def fails_on_the_way(generation: int) -> int:
        staging.fail("aborted at the end")
        return fingerprint_of(generation)

    arenas.fingerprint = fails_on_the_way
    with pytest.raises(GenerationGone, match="aborted at the end"):
        staging.write(tensors(1), base=other.generation)
    with pytest.raises(GenerationGone, match="failed: aborted at the end"):
        follow(backend, [RemoteSource(remote, 1)], local_region(backend), whole(LAYOUT), deadline_seconds=9)


def test_the_hashing_thread_stops_with_the_generation(arenas: PublisherArenas) -> None:
    """The writer may be pieces ahead of it, at the end even done: what is hashed late is not told to readers."""
    staging = arenas.begin()
    staging._header.ready(0, 1)
    staging.fail("given up")
    with pytest.raises(GenerationGone, match="given up"):
        staging._ready(1, 2)
    assert Header.parse(staging._view).ready_pieces == 1


def test_closing_the_arenas_ends_who_writes_into_them() -> None:
    backend = LastingShm()
    arenas = PublisherArenas(backend, LAYOUT, SLICE)
    staging = arenas.begin()

    def cast(part: Any, place: memoryview) -> None:
        arenas.close()
        copy(part, place)

    with pytest.raises(GenerationGone, match="withdrawn: the publisher has closed its arenas"):
        staging.write(tensors(1), cast)
    remote = backend.open(staging.offer())
    with pytest.raises(GenerationGone, match="withdrawn: the publisher has closed its arenas"):
        follow(backend, [RemoteSource(remote, 1)], local_region(backend), whole(LAYOUT), deadline_seconds=9)
    backend.close()


def test_what_fails_in_the_hashing_thread_is_raised_where_the_staging_is() -> None:
    seen = []

    def done(index: int, checksum: int) -> None:
        seen.append(index)
        if index == 1:
            raise MemoryError("no room for a checksum")

    def stage() -> None:
        with Hasher(done) as hasher:
            for index in range(4):
                hasher.put(index, memoryview(b"abc"))

    with pytest.raises(MemoryError, match="no room"):
        stage()
    assert seen == [0, 1]


def test_nothing_more_is_put_once_the_hashing_thread_has_failed() -> None:
    def done(index: int, checksum: int) -> None:
        raise MemoryError("no room for a checksum")

    def stage() -> None:
        with Hasher(done) as hasher:
            hasher.put(0, memoryview(b"abc"))
            hasher._thread.join(20)
            hasher.put(1, memoryview(b"abc"))
            raise AssertionError("the second piece was taken")

    with pytest.raises(MemoryError, match="no room"):
        stage()
