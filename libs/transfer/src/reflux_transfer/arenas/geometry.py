"""Owns where everything lies in an arena: header, checksums, descriptions of pieces, packed runs, delta, tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from reflux_transfer.errors import LayoutError
from reflux_transfer.layout import ALIGNMENT_BYTES, SLICE_BYTES, Layout, Piece

HEADER_BYTES = 4096
ROW_WORDS = 5
NOT_PACKED = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Extra:
    """Runs of a tensor that somebody reads as one piece of its own, with one checksum over all of them.

    `offset` counts from the start of the tensors area, run i begins at `offset + i * pitch`. Packed ones are gathered
    into the pack area, so that a reader gets them by one read. A `runs` of 1 is a part of a tensor at odd borders.
    """

    offset: int
    run_bytes: int
    runs: int = 1
    pitch: int = 0
    packed: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all runs."""
        return self.run_bytes * self.runs

    @property
    def end(self) -> int:
        """One past its last byte in the tensors area."""
        return self.offset + self.pitch * (self.runs - 1) + self.run_bytes


@dataclass(frozen=True)
class Geometry:
    """The parts of an arena of one layout; offsets are bytes inside the region.

    Pieces are the layout's tensors cut at `slice_bytes`, in layout order; they alone make the fingerprint. Extras are
    further pieces for readers that want other cuts; a Geometry keeps them in the order in which staging completes them.
    """

    layout: Layout
    slice_bytes: int = SLICE_BYTES
    wanted: Sequence[Extra] = ()
    delta_capacity: int = 0

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The layout's pieces."""
        return tuple(self.layout.pieces(self.slice_bytes))

    @cached_property
    def extras(self) -> tuple[Extra, ...]:
        """The wanted extras without repetitions, by the piece that completes them."""
        return tuple(sorted(dict.fromkeys(self.wanted), key=self._completing))

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
        """uint64 [pieces + extras, ROW_WORDS]: offset, bytes per run, runs, pitch, place in the pack area."""
        rows = [(piece.slot.offset + piece.start, piece.length, 1, 0, NOT_PACKED) for piece in self.pieces]
        packed_at = 0
        for extra in self.extras:
            place = packed_at if extra.packed else NOT_PACKED
            rows.append((extra.offset, extra.run_bytes, extra.runs, extra.pitch, place))
            packed_at += _aligned(extra.nbytes) if extra.packed else 0
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
        return _aligned(self.rows_offset + self.rows.nbytes)

    @cached_property
    def delta_offset(self) -> int:
        """Where an encoded delta begins."""
        return self.pack_offset + sum(_aligned(extra.nbytes) for extra in self.extras if extra.packed)

    @cached_property
    def tensors_offset(self) -> int:
        """Where the tensors begin; on a page of its own."""
        return -(-(self.delta_offset + self.delta_capacity) // HEADER_BYTES) * HEADER_BYTES

    @cached_property
    def region_bytes(self) -> int:
        """Length of the arena's region."""
        return self.tensors_offset + self.layout.region_bytes

    def _completing(self, extra: Extra) -> int:
        last = extra.end - 1
        for slot in self._by_offset:
            if slot.offset <= extra.offset and last < slot.end and extra.runs >= 1 and extra.run_bytes >= 1:
                return self._first_pieces[slot.name] + (last - slot.offset) // self.slice_bytes
        raise LayoutError(f"bytes [{extra.offset}, {extra.end}) do not lie inside one tensor")

    @cached_property
    def _by_offset(self) -> list:
        return sorted(self.layout.slots, key=lambda slot: slot.offset)

    @cached_property
    def _first_pieces(self) -> dict[str, int]:
        first: dict[str, int] = {}
        for index, piece in enumerate(self.pieces):
            first.setdefault(piece.slot.name, index)
        return first


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
