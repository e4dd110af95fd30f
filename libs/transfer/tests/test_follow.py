import multiprocessing
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from weights import GEOMETRY, LAYOUT, SLICE, WatchedShm, assert_holds, publish, tensors

from reflux_transfer import fingerprint
from reflux_transfer.arenas.publisher import PublisherArenas
from reflux_transfer.arenas.staging import copy
from reflux_transfer.errors import (
    ChecksumMismatch,
    GenerationGone,
    PeerGone,
    ReadCancelled,
    ReadDeadlineExceeded,
    RegionBusy,
)
from reflux_transfer.layout import Layout
from reflux_transfer.pulling.source import RemoteSource
from reflux_transfer.pulling.stream import follow
from reflux_transfer.pulling.whole import WholeTensor, whole
from reflux_transfer.registry import open_backend

PIECES = len(GEOMETRY.pieces)


@pytest.fixture
def backend() -> Iterator[WatchedShm]:
    opened = WatchedShm()
    yield opened
    opened.close()


@pytest.fixture
def arenas(backend: WatchedShm) -> PublisherArenas:
    return PublisherArenas(backend, LAYOUT, SLICE)


def pull(backend: WatchedShm, handle: bytes, generation: int, **options: Any) -> tuple[Any, memoryview]:
    local = backend.allocate(LAYOUT.region_bytes)
    source = RemoteSource(backend.open(handle), generation)
    return follow(backend, [source], local, whole(LAYOUT), **{"deadline_seconds": 20, **options}), local.view


@pytest.mark.parametrize("name", ["shm", "ucx", "tcp"])
def test_a_reader_pulls_while_another_process_still_writes(name: str) -> None:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=publish, args=(theirs, name))
    process.start()
    backend = open_backend(name)
    try:
        handle, generation = pipe.recv()
        local = backend.allocate(LAYOUT.region_bytes)
        source = RemoteSource(backend.open(handle), generation)
        with ThreadPoolExecutor(1) as pool:
            pulled = pool.submit(follow, backend, [source], local, whole(LAYOUT), deadline_seconds=60)
            for piece in GEOMETRY.pieces:
                pipe.send("go")
                begin = piece.slot.offset + piece.start
                expected = tensors(1)[piece.slot.name].tobytes()[piece.start : piece.start + piece.length]
                # It is here before the next one is written; a hang would be ended by the pull's deadline.
                while bytes(local.view[begin : begin + piece.length]) != expected and not pulled.done():
                    threading.Event().wait(0.001)
            report = pulled.result()
        assert report.fingerprint == pipe.recv() == fingerprint.of(local.view, LAYOUT, SLICE)
        assert (report.slices, len(report.checksums)) == (PIECES, PIECES)
        assert_holds(local.view, tensors(1))
    finally:
        process.kill()
        process.join()
        backend.close()


def test_a_publisher_killed_while_it_stages_ends_the_pull() -> None:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=publish, args=(theirs, "shm"))
    process.start()
    backend = WatchedShm()
    handle, generation = pipe.recv()
    pipe.send("go")
    with ThreadPoolExecutor(1) as pool:
        pulled = pool.submit(pull, backend, handle, generation, deadline_seconds=60)
        assert backend.data_read.wait(30)
        process.kill()
        with pytest.raises(PeerGone):
            pulled.result(30)
    process.join()
    backend.close()


def test_small_neighbours_are_read_at_once(arenas: PublisherArenas, backend: WatchedShm) -> None:
    staging = arenas.begin()
    staging.write(tensors(1))
    reads = []
    backend.before = lambda offset, length: reads.append((offset, length))
    report, view = pull(backend, staging.offer(), staging.generation)
    assert_holds(view, tensors(1))
    data = [length for offset, length in reads if offset >= GEOMETRY.tensors_offset]
    assert data == [LAYOUT.region_bytes]
    assert report.bytes == LAYOUT.region_bytes  # gaps of alignment included


def test_a_failed_staging_ends_readers_with_its_reason(arenas: PublisherArenas, backend: WatchedShm) -> None:
    def cast(part: Any, place: memoryview) -> None:
        if backend.data_read.wait(20):
            raise RuntimeError("the optimizer diverged")
        copy(part, place)

    staging = arenas.begin()
    first = arenas.begin()  # so that the reader has read something before the cast fails
    first.write(tensors(2))
    with ThreadPoolExecutor(1) as pool:
        pulled = pool.submit(pull, backend, staging.offer(), staging.generation)
        pull(backend, first.offer(), first.generation)
        with pytest.raises(RuntimeError, match="diverged"):
            staging.write(tensors(1), cast)
        with pytest.raises(GenerationGone, match="generation 1 is failed: RuntimeError: the optimizer diverged"):
            pulled.result(30)


def test_a_staging_that_is_left_unwritten_fails(arenas: PublisherArenas, backend: WatchedShm) -> None:
    with arenas.begin() as staging:
        handle = staging.offer()
    with pytest.raises(GenerationGone, match="nothing was written"):
        pull(backend, handle, staging.generation)


def test_a_generation_overwritten_while_it_is_read_is_gone_not_damaged(
    arenas: PublisherArenas, backend: WatchedShm
) -> None:
    first = arenas.begin()
    first.write(tensors(1))
    arenas.pin(arenas.begin().generation)

    def overwrite(offset: int, length: int) -> None:
        if offset >= GEOMETRY.tensors_offset:
            backend.before = lambda offset, length: None
            arenas.begin().write(tensors(3))

    backend.before = overwrite
    with pytest.raises(GenerationGone, match="generation 1 was overwritten by generation 3"):
        pull(backend, first.offer(), first.generation)


def test_a_generation_overwritten_between_its_header_and_its_checksums_is_gone_not_damaged(
    arenas: PublisherArenas, backend: WatchedShm
) -> None:
    """The reader looks a last time, sees it sealed, and reads the last checksums of the one that took the arena."""
    staging = arenas.begin()
    arenas.pin(arenas.begin().generation)
    sealed = threading.Event()
    pieces, taken = iter(GEOMETRY.pieces), []

    def cast(part: Any, place: memoryview) -> None:
        if next(pieces).slot.name != "big":
            assert backend.data_read.wait(20)
        copy(part, place)

    def before(offset: int, length: int) -> None:
        if backend.data_read.is_set() and offset == 0:
            sealed.wait(20)
        elif backend.data_read.is_set() and offset < GEOMETRY.rows_offset and not taken:
            taken.append(arenas.begin().write(tensors(3)))

    backend.before = before
    moves = [WholeTensor("big", *[LAYOUT.by_name["big"].offset] * 2, LAYOUT.by_name["big"].nbytes)]
    local, source = backend.allocate(LAYOUT.region_bytes), RemoteSource(backend.open(staging.offer()), 1)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(staging.write, tensors(1), cast).add_done_callback(lambda written: sealed.set())
        with pytest.raises(GenerationGone, match="generation 1 was overwritten by generation 3"):
            follow(backend, [source], local, moves, deadline_seconds=30)
    assert taken


def test_even_equal_bytes_of_another_generation_do_not_count(arenas: PublisherArenas, backend: WatchedShm) -> None:
    first = arenas.begin()
    first.write(tensors(1))
    arenas.pin(arenas.begin().generation)

    def overwrite(offset: int, length: int) -> None:
        if offset >= GEOMETRY.tensors_offset:
            backend.before = lambda offset, length: None
            arenas.begin().write(tensors(1))

    backend.before = overwrite
    with pytest.raises(GenerationGone, match="overwritten"):
        pull(backend, first.offer(), first.generation)


def test_a_handle_of_an_older_generation_is_refused_at_once(arenas: PublisherArenas, backend: WatchedShm) -> None:
    first = arenas.begin()
    first.write(tensors(1))
    with pytest.raises(GenerationGone, match="generation 9"):
        pull(backend, first.offer(), 9)
    assert not backend.data_bytes


@pytest.mark.parametrize("name", ["big", "scalar", "half", "last"])
def test_a_flipped_bit_names_the_tensor(arenas: PublisherArenas, backend: WatchedShm, name: str) -> None:
    staging = arenas.begin()
    staging.write(tensors(1))
    arenas.view(staging.generation)[LAYOUT.by_name[name].end - 1] ^= 0x10
    with pytest.raises(ChecksumMismatch, match=name) as caught:
        pull(backend, staging.offer(), staging.generation)
    assert caught.value.slice_name == name


def test_a_pull_ends_when_cancelled_or_late(arenas: PublisherArenas, backend: WatchedShm) -> None:
    staging = arenas.begin()
    with pytest.raises(ReadDeadlineExceeded, match="did not reach big in time"):
        pull(backend, staging.offer(), staging.generation, deadline_seconds=0.05)
    with pytest.raises(ReadCancelled, match="before big"):
        pull(backend, staging.offer(), staging.generation, cancelled=lambda: True)
    staging.write(tensors(1))
    with pytest.raises(ReadDeadlineExceeded):
        pull(backend, staging.offer(), staging.generation, deadline_seconds=-1)


def test_the_end_waits_for_the_seal(arenas: PublisherArenas, backend: WatchedShm) -> None:
    """All pieces have been pulled when the staging fails after all, in making a delta: the pull must fail, too."""
    waits_for_the_end = threading.Event()
    looks = []

    def looked(offset: int, length: int) -> None:
        if offset == 0 and backend.data_bytes >= LAYOUT.parameter_bytes:
            looks.append(offset)
            if len(looks) > 1:  # the first look after the last byte has seen that it is not sealed
                waits_for_the_end.set()

    def fingerprint_of_base(generation: int) -> int:
        assert waits_for_the_end.wait(20)
        raise RuntimeError("at the very end")

    backend.before, arenas.fingerprint = looked, fingerprint_of_base
    staging = arenas.begin()
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(staging.write, tensors(1), base=staging.generation)
        with pytest.raises(GenerationGone, match="at the very end"):
            pull(backend, staging.offer(), staging.generation)
        with pytest.raises(RuntimeError, match="at the very end"):
            written.result(20)


class Stuck(WatchedShm):
    """A read of tensors misses its deadline and holds every region that it knows of, as one of NIXL may."""

    def __init__(self) -> None:
        super().__init__()
        self.stuck, self.asked = False, list[int]()

    def read(self, remote: Any, remote_offset: int, local: Any, local_offset: int, length: int, seconds: float) -> None:
        if remote_offset >= GEOMETRY.tensors_offset:
            self.stuck = True
            raise ReadDeadlineExceeded("a transfer hangs")
        super().read(remote, remote_offset, local, local_offset, length, seconds)

    def unregister(self, region: Any) -> None:
        if self.stuck:
            self.asked.append(region.length)
            raise RegionBusy("a transfer may still write here")
        super().unregister(region)


def test_a_read_that_cannot_be_called_back_does_not_hide_its_error() -> None:
    backend = Stuck()
    staging = PublisherArenas(backend, LAYOUT, SLICE).begin()
    staging.write(tensors(1))
    local, source = backend.allocate(LAYOUT.region_bytes), RemoteSource(backend.open(staging.offer()), 1)
    part = WholeTensor("big", LAYOUT.by_name["big"].offset + 4, 0, 8)
    with pytest.raises(ReadDeadlineExceeded, match="a transfer hangs"):
        follow(backend, [source], local, [part], deadline_seconds=9)
    assert len(backend.asked) == 2  # the scratch memory of a piece, and that of the header
    backend.stuck = False
    backend.close()


def test_sources_are_given_once_and_all_of_them(arenas: PublisherArenas, backend: WatchedShm) -> None:
    staging = arenas.begin()
    staging.write(tensors(1))
    local = backend.allocate(LAYOUT.region_bytes)
    source = RemoteSource(backend.open(staging.offer()), staging.generation, rank=1)
    with pytest.raises(ValueError, match=r"missing are \[0\]"):
        follow(backend, [source], local, whole(LAYOUT), deadline_seconds=9)
    with pytest.raises(ValueError, match="once"):
        follow(backend, [source, source], local, [], deadline_seconds=9)


def test_sources_have_their_turns_in_the_order_of_the_transfers(backend: WatchedShm) -> None:
    """Both sources are damaged; the error names the tensor of the one that was read first."""
    sources = []
    for rank, name in enumerate("ab"):
        arenas = PublisherArenas(backend, Layout.from_shapes({name: ([100], "uint8")}))
        with arenas.begin() as staging:
            staging.write({name: np.ones(100, np.uint8)})
        arenas.view(1)[9] ^= 1
        sources.append(RemoteSource(backend.open(staging.offer()), 1, rank))
    local, moves = backend.allocate(200), [WholeTensor("a", 0, 0, 100), WholeTensor("b", 0, 100, 100, source_rank=1)]
    for ordered, first in ((moves, "a"), (moves[::-1], "b")):
        with pytest.raises(ChecksumMismatch, match=f"mismatch in {first}"):
            follow(backend, sources, local, ordered, deadline_seconds=9)


def test_tensors_may_lie_elsewhere_at_the_target(arenas: PublisherArenas, backend: WatchedShm) -> None:
    staging = arenas.begin()
    staging.write(tensors(1))
    slots = {slot.name: (slot.shape, slot.dtype) for slot in reversed(LAYOUT.slots)}
    target = Layout.from_shapes(slots)
    local = backend.allocate(target.region_bytes)
    source = RemoteSource(backend.open(staging.offer()), staging.generation)
    report = follow(backend, [source], local, whole(LAYOUT, target), deadline_seconds=9)
    for slot in target.slots:
        assert bytes(local.view[slot.offset : slot.end]) == tensors(1)[slot.name].tobytes()
    assert report.fingerprint == arenas.fingerprint(staging.generation)
    assert not report.checksums


def test_what_lies_between_two_pieces_is_kept(backend: WatchedShm) -> None:
    """Tensors that are not pulled, and bytes that another source has just filled."""
    layout = Layout.from_shapes({"a": ([100], "uint8"), "kept": ([1], "uint8"), "c": ([100], "uint8")})
    staging = PublisherArenas(backend, layout).begin()
    staging.write({name: np.full(slot.shape, 5, np.uint8) for name, slot in layout.by_name.items()})
    other = PublisherArenas(backend, Layout.from_shapes({"b": ([412], "uint8")})).begin()
    other.write({"b": np.full(412, 9, np.uint8)})
    local = backend.allocate(612)
    local.view[:] = bytes([7]) * 612
    first, second = (RemoteSource(backend.open(each.offer()), 1, rank) for rank, each in enumerate((other, staging)))
    moves = [WholeTensor(name, at, at, 100, source_rank=1) for name, at in (("a", 0), ("c", 512))]
    follow(backend, [second], local, moves, deadline_seconds=9)
    assert bytes(local.view) == bytes([5]) * 100 + bytes([7]) * 412 + bytes([5]) * 100
    follow(backend, [first, second], local, [WholeTensor("b", 0, 100, 412), *moves], deadline_seconds=9)
    assert bytes(local.view) == bytes([5]) * 100 + bytes([9]) * 412 + bytes([5]) * 100


def test_alignment_gaps_of_one_source_are_another_ones_bytes(backend: WatchedShm) -> None:
    layout = Layout.from_shapes({"a": ([100], "uint8"), "c": ([100], "uint8")})
    staging = PublisherArenas(backend, layout).begin()
    staging.write({name: np.full(100, 5, np.uint8) for name in layout.by_name})
    other = PublisherArenas(backend, Layout.from_shapes({"b": ([156], "uint8")})).begin()
    other.write({"b": np.full(156, 9, np.uint8)})
    local = backend.allocate(356)
    first, second = (RemoteSource(backend.open(each.offer()), 1, rank) for rank, each in enumerate((other, staging)))
    moves = [WholeTensor(name, at, at, 100, source_rank=1) for name, at in (("a", 0), ("c", 256))]
    follow(backend, [first, second], local, [WholeTensor("b", 0, 100, 156), *moves], deadline_seconds=9)
    assert bytes(local.view) == bytes([5]) * 100 + bytes([9]) * 156 + bytes([5]) * 100


def test_a_small_tensor_in_the_gap_of_its_neighbours_is_kept(backend: WatchedShm) -> None:
    layout = Layout.from_shapes({"d": ([50], "uint8"), "a": ([100], "uint8"), "c": ([100], "uint8")})
    staging = PublisherArenas(backend, layout).begin()
    staging.write({"d": np.full(50, 3, np.uint8), "a": np.full(100, 5, np.uint8), "c": np.full(100, 6, np.uint8)})
    local, source = backend.allocate(356), RemoteSource(backend.open(staging.offer()), 1)
    moves = [WholeTensor("d", 0, 100, 50), WholeTensor("a", 256, 0, 100), WholeTensor("c", 512, 256, 100)]
    follow(backend, [source], local, moves, deadline_seconds=9)
    assert bytes(local.view[:150]) == bytes([5]) * 100 + bytes([3]) * 50
