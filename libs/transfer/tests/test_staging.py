"""How a staging ends: written, failed while it is written, or closed away; and the threads that write for it."""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import xxhash
from weights import LAYOUT, SLICE, LastingShm, assert_holds, tensors

from reflux_transfer.arenas.header import Header, State
from reflux_transfer.arenas.publisher import PublisherArenas
from reflux_transfer.arenas.staging import copy
from reflux_transfer.arenas.writing import Writers
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
    staging, done, failed = arenas.begin(), [], []
    arenas.pin(arenas.begin().generation)

    def cast(part: Any, place: memoryview) -> None:
        done.append(part)
        if len(done) == 2 and not failed:
            failed.append(True)
            staging.fail("aborted by the broker")
            with pytest.raises(ArenasBusy, match="in use"):
                arenas.begin()
        copy(part, place)

    with pytest.raises(GenerationGone, match="generation 1 is failed: aborted by the broker"):
        staging.write(tensors(1), cast)
    assert len(done) in (2, 3), "another thread may have been under way"
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


def test_what_is_written_late_stops_with_the_generation(arenas: PublisherArenas) -> None:
    """Threads may be pieces behind, at the end even of all: what is hashed late is not told to readers."""
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


def test_pieces_are_handed_on_in_their_order_with_the_checksums_of_what_lies_there() -> None:
    parts = [np.full(size, index, np.uint8) for index, size in enumerate([3 << 20, 5, 1 << 20, 1])]
    places, seen, second = [memoryview(bytearray(len(part))) for part in parts], [], threading.Event()

    def cast(part: Any, place: memoryview) -> None:
        if part[0] == 0:
            assert second.wait(20), "pieces are not written side by side"
        copy(part, place)
        if part[0] == 1:
            second.set()

    with Writers(cast, lambda *each: seen.append(each)) as writers:
        for index, (part, place) in enumerate(zip(parts, places, strict=True)):
            writers.put(index, part, place)
    assert seen == [(index, xxhash.xxh3_64_intdigest(part)) for index, part in enumerate(parts)]
    assert [bytes(place) for place in places] == [part.tobytes() for part in parts]


@pytest.mark.parametrize("fails", ["cast", "done"])
def test_what_fails_in_a_writer_is_raised_where_the_staging_is_and_ends_it(fails: str) -> None:
    seen = []

    def cast(part: Any, place: memoryview) -> None:
        if fails == "cast" and part[0] == 1:
            raise MemoryError("no room")

    def done(index: int, checksum: int) -> None:
        seen.append(index)
        if fails == "done" and index == 1:
            raise MemoryError("no room")

    def stage() -> None:
        with Writers(cast, done) as writers:
            for index in range(40):
                writers.put(index, np.full(3, index, np.uint8), memoryview(bytearray(3)))

    with pytest.raises(MemoryError, match="no room"):
        stage()
    assert seen == ([0] if fails == "cast" else [0, 1])
