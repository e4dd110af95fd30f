"""Owns where everything lies in an arena: header, checksums, descriptions of pieces, packed runs, delta, tensors."""

import bisect
import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import xxhash

from reflux_transfer.errors import LayoutError
from reflux_transfer.layout import SLICE_BYTES, Layout, Piece, TensorSlot, aligned

HEADER_BYTES = 4096
ROW_WORDS = 5
NOT_PACKED = (1 << 64) - 1
MAX_PACKINGS = 16


def plan_tag(plan_hash: str) -> int:
    """A plan's hash as a word."""
    return xxhash.xxh3_64_intdigest(plan_hash.encode())


@dataclass(frozen=True, slots=True)
class Gather:
    """Runs of one tensor: run i begins at `offset + i * pitch`, counted from the start of the tensors area."""

    offset: int
    run_bytes: int
    runs: int = 1
    pitch: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all runs."""
        return self.run_bytes * self.runs

    @property
    def end(self) -> int:
        """One past its last byte in the tensors area."""
        return self.offset + self.pitch * (self.runs - 1) + self.run_bytes


@dataclass(frozen=True, slots=True)
class Extra:
    """What somebody reads as one piece of its own, with one checksum: the bytes of its gathers one after the other.

    With a `place` in the pack area they are copied there side by side, so that a reader gets them by one read; without
    one it is a single gather that is read where it lies.
    """

    gathers: tuple[Gather, ...]
    place: int = NOT_PACKED

    @property
    def nbytes(self) -> int:
        """Bytes of all gathers."""
        return sum(gather.nbytes for gather in self.gathers)


@dataclass(frozen=True)
class Packing:
    """The extras of one plan, named by its hash; places count from the start of its share of the pack area."""

    plan: str
    extras: tuple[Extra, ...]
    pack_bytes: int = 0

    @property
    def tag(self) -> int:
        """How an arena's header names the plan."""
        return plan_tag(self.plan)


@dataclass(frozen=True)
class Geometry:
    """The parts of an arena of one layout; offsets are bytes inside the region.

    Pieces are the layout's tensors cut at `slice_bytes`, in layout order; they alone make the fingerprint. Extras are
    further pieces for readers of other layouts, in the order in which staging completes them.
    """

    layout: Layout
    slice_bytes: int = SLICE_BYTES
    packings: tuple[Packing, ...] = ()
    delta_capacity: int = 0

    def __post_init__(self) -> None:
        if len(self.packings) > MAX_PACKINGS:
            raise LayoutError(f"an arena packs for {MAX_PACKINGS} plans at most, not {len(self.packings)}")

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The layout's pieces."""
        return tuple(self.layout.pieces(self.slice_bytes))

    @cached_property
    def pack_bases(self) -> tuple[int, ...]:
        """Where the share of each packing begins in the pack area."""
        sizes = [aligned(packing.pack_bytes) for packing in self.packings]
        return tuple(itertools.accumulate(sizes, initial=0))[:-1]

    @cached_property
    def extras(self) -> tuple[Extra, ...]:
        """The extras of all packings without repetitions, by the piece that completes them; places in the pack area."""
        found = {
            extra if extra.place == NOT_PACKED else Extra(extra.gathers, base + extra.place): None
            for packing, base in zip(self.packings, self.pack_bases, strict=True)
            for extra in packing.extras
        }
        return tuple(sorted(found, key=self._completing))

    @cached_property
    def due(self) -> dict[int, range]:
        """Index of a piece -> indices of the extras that are complete once it is staged."""
        found: dict[int, range] = {}
        for index, extra in enumerate(self.extras):
            piece = self._completing(extra)
            found[piece] = range(found[piece].start if piece in found else index, index + 1)
        return found

    @cached_property
    def rows(self) -> np.ndarray:
        """uint64 [pieces + extras, ROW_WORDS]: offset, bytes per run, runs, pitch, place in the pack area.

        Of a packed one only bytes and place are told.
        """
        rows = [(piece.slot.offset + piece.start, piece.length, 1, 0, NOT_PACKED) for piece in self.pieces]
        for extra in self.extras:
            first = extra.gathers[0] if extra.place == NOT_PACKED else Gather(0, extra.nbytes)
            rows.append((first.offset, first.run_bytes, first.runs, first.pitch, extra.place))
        return np.array(rows, "<u8").reshape(-1, ROW_WORDS)

    @property
    def table_offset(self) -> int:
        """Where the checksums begin: u64 per piece, then per extra."""
        return HEADER_BYTES

    @cached_property
    def rows_offset(self) -> int:
        """Where `rows` lie."""
        return self.table_offset + 8 * len(self.rows)

    @cached_property
    def pack_offset(self) -> int:
        """Where packed runs begin."""
        return aligned(self.rows_offset + self.rows.nbytes)

    @cached_property
    def delta_offset(self) -> int:
        """Where an encoded delta begins."""
        return self.pack_offset + sum(aligned(packing.pack_bytes) for packing in self.packings)

    @cached_property
    def tensors_offset(self) -> int:
        """Where the tensors begin; on a page of its own."""
        return -(-(self.delta_offset + self.delta_capacity) // HEADER_BYTES) * HEADER_BYTES

    @cached_property
    def region_bytes(self) -> int:
        """Length of the arena's region."""
        return self.tensors_offset + self.layout.region_bytes

    def _completing(self, extra: Extra) -> int:
        return max(self._last_piece(gather) for gather in extra.gathers)

    def _last_piece(self, gather: Gather) -> int:
        last = gather.end - 1
        at = bisect.bisect_right(self._by_offset, gather.offset, key=lambda slot: slot.offset) - 1
        if at < 0 or last >= self._by_offset[at].end or gather.runs < 1 or gather.run_bytes < 1:
            raise LayoutError(f"bytes [{gather.offset}, {gather.end}) do not lie inside one tensor")
        slot = self._by_offset[at]
        return self._first_pieces[slot.name] + (last - slot.offset) // self.slice_bytes

    @cached_property
    def _by_offset(self) -> list[TensorSlot]:
        return sorted(self.layout.slots, key=lambda slot: slot.offset)

    @cached_property
    def _first_pieces(self) -> dict[str, int]:
        first: dict[str, int] = {}
        for index, piece in enumerate(self.pieces):
            first.setdefault(piece.slot.name, index)
        return first
