"""Turns moves into steps, each of which is verified by one checksum of the source. Pure."""

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from reflux_transfer.arenas.geometry import NOT_PACKED
from reflux_transfer.errors import LayoutError, PlanNotStaged
from reflux_transfer.pulling.whole import Move
from reflux_weightplan.sides import ALIGNMENT_BYTES


@dataclass(slots=True)
class Direct:
    """A whole piece that is read straight into its place. `joins`: nothing else lies between the places of this one and
    the one before it, so that both may be read at once.
    """

    piece: int
    tensor: str
    remote_offset: int
    local_offset: int
    length: int
    joins: bool = False


@dataclass(slots=True)
class Runs:
    """An extra that is read where it lies: runs under one checksum."""

    extra: int
    tensor: str
    remote_offset: int
    remote_pitch: int
    local_offset: int
    local_pitch: int
    run_bytes: int
    runs: int


@dataclass(slots=True)
class Packed:
    """A packed extra: one range of the pack area, read into scratch memory and scattered from there."""

    extra: int
    tensor: str
    place: int
    length: int
    moves: list[tuple[int, Move]] = field(default_factory=list)
    """Where the bytes of a move begin in the range."""


@dataclass(slots=True)
class Cover:
    """A piece of which only parts are wanted and that has no checksum for them: it is read whole into scratch memory.

    `copies` are (offset inside the piece, local offset, length).
    """

    piece: int
    tensor: str
    remote_offset: int
    length: int
    copies: list[tuple[int, int, int]] = field(default_factory=list)


Main = Direct | Cover
More = Runs | Packed


@dataclass(frozen=True)
class Steps:
    """What to read from a source, in the order in which it becomes ready: pieces, and extras beside them."""

    pieces: list[Main]
    extras: list[More]


def steps(
    rows: np.ndarray, pieces: int, moves: Iterable[Move], pack_base: int | None = None, only_source: bool = False
) -> Steps:
    """The steps of a source with these `rows` (see `Geometry.rows`); `pack_base` is where its share of the pack area
    begins. With an `only_source` gaps of alignment between tensors may be overwritten, which saves reads.

    Raises `LayoutError` naming a tensor whose bytes lie in no piece, and `PlanNotStaged` for packed moves that the
    source does not pack.
    """
    found = _Planner(rows, pieces, pack_base).steps(moves)
    gaps = only_source and not found.extras and all(isinstance(step, Direct) for step in found.pieces)
    _join(found.pieces, ALIGNMENT_BYTES if gaps else 1)
    return found


class _Planner:
    def __init__(self, rows: np.ndarray, pieces: int, pack_base: int | None) -> None:
        table = rows.tolist()
        self._main, self._extras, self._pack_base = table[:pieces], table[pieces:], pack_base
        self._order = sorted(range(pieces), key=lambda index: self._main[index][0])
        self._starts = [self._main[index][0] for index in self._order]
        self._by_key = {tuple(row): index for index, row in enumerate(self._extras) if row[4] == NOT_PACKED}
        self._packed = sorted((row[4], index) for index, row in enumerate(self._extras) if row[4] != NOT_PACKED)
        self._covers: dict[int, Cover] = {}
        self._packs: dict[int, Packed] = {}

    def steps(self, moves: Iterable[Move]) -> Steps:
        """All moves."""
        main: list[Main] = []
        more: list[More] = []
        for move in moves:
            if move.packed:
                self._pack(move)
                continue
            pitch = move.source_pitch if move.runs > 1 else 0
            extra = self._by_key.get((move.source_offset, move.run_bytes, move.runs, pitch, NOT_PACKED))
            if extra is not None:
                more.append(Runs(extra, move.tensor, move.source_offset, pitch, move.target_offset, move.target_pitch,
                                 move.run_bytes, move.runs))  # fmt: skip
                continue
            for run in range(move.runs):
                remote = move.source_offset + run * move.source_pitch
                local = move.target_offset + run * move.target_pitch
                main.extend(self._contiguous(move.tensor, remote, local, move.run_bytes))
        more.extend(self._packs.values())
        main.extend(self._covers.values())
        main.sort(key=lambda step: step.piece)
        return Steps(main, sorted(more, key=lambda step: step.extra))

    def _pack(self, move: Move) -> None:
        position = (self._pack_base or 0) + move.source_offset
        at = bisect.bisect_right(self._packed, (position, len(self._extras))) - 1
        if self._pack_base is None or at < 0:
            raise PlanNotStaged(f"{move.tensor}: the source has packed nothing for this plan")
        place, extra = self._packed[at]
        length = self._extras[extra][1]
        if position + move.run_bytes * move.runs > place + length:
            raise PlanNotStaged(f"{move.tensor}: the source has packed other bytes for this plan")
        step = self._packs.setdefault(extra, Packed(extra, move.tensor, place, length))
        step.moves.append((position - place, move))

    def _contiguous(self, tensor: str, remote: int, local: int, length: int) -> list[Main]:
        found: list[Main] = []
        done = 0
        while done < length:
            piece = self._at(remote + done, tensor)
            offset, size = self._main[piece][:2]
            skip = remote + done - offset
            count = min(size - skip, length - done)
            if count == size:
                found.append(Direct(piece, tensor, offset, local + done, size))
            else:
                cover = self._covers.setdefault(piece, Cover(piece, tensor, offset, size))
                cover.copies.append((skip, local + done, count))
            done += count
        return found

    def _at(self, position: int, tensor: str) -> int:
        """The piece that holds a byte of the tensors area."""
        place = bisect.bisect_right(self._starts, position) - 1
        if place >= 0:
            piece = self._order[place]
            offset, size = self._main[piece][:2]
            if position < offset + size:
                return piece
        raise LayoutError(f"{tensor}: byte {position} of the source lies in none of its pieces")


def _join(found: list[Main], gap: int) -> None:
    """Marks neighbours less than `gap` bytes apart, never across bytes of another step."""
    places = sorted(range(len(found)), key=lambda index: _first_byte(found[index]))
    before = dict(zip(places[1:], places, strict=False))
    for index, step in enumerate(found):
        previous = found[index - 1] if index and before.get(index) == index - 1 else None
        if isinstance(step, Direct) and isinstance(previous, Direct):
            between = step.local_offset - previous.local_offset - previous.length
            same_shift = step.remote_offset - previous.remote_offset == step.local_offset - previous.local_offset
            step.joins = same_shift and 0 <= between < gap


def _first_byte(step: Main) -> int:
    return min(copy[1] for copy in step.copies) if isinstance(step, Cover) else step.local_offset
