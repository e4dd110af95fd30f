"""The first page of an arena: what is no header, what was damaged, and in which order others see its words."""

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weights import GEOMETRY, LAYOUT, SLICE, WatchedShm, assert_holds, tensors

from reflux_transfer import fingerprint
from reflux_transfer.arenas.header import READ_BYTES, Header, OwnedHeader, version_of
from reflux_transfer.arenas.publisher import PublisherArenas
from reflux_transfer.arenas.staging import Staging
from reflux_transfer.errors import ChecksumMismatch, TransferError, WrongHandle
from reflux_transfer.pulling.difference import Base, follow_delta
from reflux_transfer.pulling.report import PullReport
from reflux_transfer.pulling.source import RemoteSource
from reflux_transfer.pulling.stream import follow
from reflux_transfer.pulling.whole import whole

WORD = {field.name: index for index, field in enumerate(fields(Header))}


@pytest.fixture
def backend() -> Iterator[WatchedShm]:
    opened = WatchedShm()
    yield opened
    opened.close()


@pytest.fixture
def arenas(backend: WatchedShm) -> PublisherArenas:
    return PublisherArenas(backend, LAYOUT, SLICE)


def test_a_region_without_a_header_is_no_arena(backend: WatchedShm) -> None:
    with pytest.raises(WrongHandle, match="no header"):
        Header.parse(memoryview(bytes(4096)))
    region = backend.allocate(8192)
    remote = backend.open(backend.describe(region))
    with pytest.raises(WrongHandle, match="no header"):
        follow(backend, [RemoteSource(remote, 1)], region, [], deadline_seconds=9)


def words(staging: Staging) -> np.ndarray:
    return np.frombuffer(staging._view[:READ_BYTES], "<u8")


def pull(backend: WatchedShm, staging: Staging, *, delta: bool = False) -> tuple[PullReport, memoryview]:
    local = backend.allocate(LAYOUT.region_bytes)
    source = RemoteSource(backend.open(staging.offer()), staging.generation)
    if delta:
        base = Base(LAYOUT, local.view, 0)
        return follow_delta(backend, source, local, base, deadline_seconds=9), local.view
    return follow(backend, [source], local, whole(LAYOUT), deadline_seconds=9), local.view


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(WORD)), st.integers(0, 63), st.booleans())
def test_any_flipped_bit_of_a_sealed_header_is_a_typed_error_or_changes_nothing(
    name: str, bit: int, delta: bool
) -> None:
    staging = SEALED.begin()
    expected = staging.write(tensors(1))
    words(staging)[WORD[name]] ^= np.uint64(1 << bit)
    try:
        report, view = pull(SHM, staging, delta=delta)
    except TransferError:
        return
    assert report.fingerprint == expected
    assert_holds(view, tensors(1))


SHM = WatchedShm()
SEALED = PublisherArenas(SHM, LAYOUT, SLICE)


@pytest.mark.parametrize("delta", [False, True])
def test_a_version_that_was_damaged_on_the_way_is_not_believed(
    arenas: PublisherArenas, backend: WatchedShm, delta: bool
) -> None:
    staging = arenas.begin()
    staging.write(tensors(1))
    words(staging)[WORD["version"]] = 0x1234
    with pytest.raises(ChecksumMismatch, match="the header"):
        pull(backend, staging, delta=delta)


def test_a_header_that_is_sealed_while_it_is_read_is_read_again(arenas: PublisherArenas, backend: WatchedShm) -> None:
    """A reader may get the state after the seal beside other words from before it."""
    staging = arenas.begin()
    expected = staging.write(tensors(1))
    backend.before = lambda offset, length: torn(length)
    page, kept = words(staging), words(staging).copy()
    looks = []

    def torn(length: int) -> None:
        if length == READ_BYTES:
            looks.append(length)
            page[:] = kept
            if len(looks) == 1:
                page[WORD["fingerprint"]] = 0

    report, view = pull(backend, staging)
    assert_holds(view, tensors(1))
    assert report.fingerprint == expected
    assert len(looks) > 2


@pytest.mark.parametrize(
    ("word", "value", "text"),
    [
        ("pieces", 1 << 40, "checksums, descriptions of pieces outside"),
        ("extras", (1 << 64) - 1, "checksums, descriptions of pieces outside"),
        ("table_offset", 1 << 62, "checksums outside"),
        ("rows_offset", GEOMETRY.region_bytes - 8 * len(GEOMETRY.rows), "descriptions of pieces outside"),
        ("pack_offset", 1 << 62, "packed runs outside"),
        ("delta_bytes", 1 << 50, "delta outside"),
        ("delta_offset", 1 << 62, "delta outside"),
        ("tensors_offset", 1 << 62, "tensors outside"),
        ("packings", 17, "counts that cannot be"),
        ("ready_pieces", len(GEOMETRY.pieces) + 1, "counts that cannot be"),
        ("ready_extras", 1, "counts that cannot be"),
        ("pieces", 0, "counts that cannot be"),
        ("slice_bytes", 0, "counts that cannot be"),
    ],
)
def test_a_header_is_not_believed_beyond_its_region(
    arenas: PublisherArenas, backend: WatchedShm, word: str, value: int, text: str
) -> None:
    """Also while nothing is sealed, and before anything of that size is allocated."""
    staging = arenas.begin()
    words(staging)[WORD[word]] = value
    with pytest.raises(WrongHandle, match=text):
        pull(backend, staging)


def test_damaged_descriptions_of_pieces_are_not_believed(arenas: PublisherArenas, backend: WatchedShm) -> None:
    staging = arenas.begin()
    staging.write(tensors(1))
    rows = np.frombuffer(staging._view[GEOMETRY.rows_offset :][: GEOMETRY.rows.nbytes], "<u8")
    rows[1] ^= np.uint64(1 << 56)  # bytes of the first piece
    with pytest.raises(ChecksumMismatch, match="descriptions of pieces"):
        pull(backend, staging)


@pytest.mark.parametrize(("word", "value"), [("delta_bytes", 1 << 50), ("pieces", len(GEOMETRY.pieces) - 1)])
def test_a_header_that_is_damaged_later_is_not_believed_either(
    arenas: PublisherArenas, backend: WatchedShm, word: str, value: int
) -> None:
    staging = arenas.begin()

    def damage(offset: int, length: int) -> None:
        if length == READ_BYTES:
            words(staging)[WORD[word]] = value

    backend.before = damage
    with pytest.raises(WrongHandle):
        pull(backend, staging)


def test_the_version_of_several_ranks_is_what_all_name_or_made_of_theirs(arenas: PublisherArenas) -> None:
    staging = arenas.begin()
    own = staging.write(tensors(1))
    header = Header.parse(staging._view)
    assert version_of([header]) == own
    named = replace(header, version=7)
    assert version_of([named]) == version_of([named, named]) == 7
    for several in ([header, header], [named, header], [named, replace(header, version=8)]):
        assert version_of(several) == fingerprint.tree([own, own])


class Fence:
    """A lock that notes what the memory was whenever it was entered or left."""

    def __init__(self, look: Any) -> None:
        self.look, self.seen = look, []

    def __enter__(self) -> None:
        self.seen.append(("in", self.look()))

    def __exit__(self, *error: object) -> None:
        self.seen.append(("out", self.look()))


def test_what_a_word_announces_is_released_before_the_word_is_stored() -> None:
    """Leaving a lock orders what was stored before it, entering one what is stored after: ARM needs both."""
    memory = memoryview(bytearray(GEOMETRY.region_bytes))
    header = OwnedHeader(memory, GEOMETRY)
    header.claim(1)
    fence = Fence(lambda: (int(header._table[0]), Header.parse(memory).ready_pieces))
    header._fence = fence
    header.ready(0, 77)
    released, entered = fence.seen.index(("out", (77, 0))), fence.seen.index(("out", (77, 1)))
    assert ("in", (77, 0)) in fence.seen[released:entered]
