"""Turns moves into steps, each of which is verified by one checksum of the source. Pure."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from reflux_transfer.arenas.geometry import NOT_PACKED
from reflux_transfer.errors import LayoutError
from reflux_transfer.layout import ALIGNMENT_BYTES
from reflux_transfer.pulling.whole import Move


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
    """An extra: runs under one checksum, packed at the source or not. `piece` is the one that completes it there."""

    piece: int
    extra: int
    tensor: str
    remote_offset: int
    remote_pitch: int
    packed_at: int
    local_offset: int
    local_pitch: int
    run_bytes: int
    runs: int


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


Step = Direct | Runs | Cover


def steps(rows: np.ndarray, pieces: int, moves: Sequence[Move]) -> list[Step]:
    """What to read from a source with these `rows` (see `Geometry.rows`), in the order in which it becomes ready.

    Raises `LayoutError` naming a tensor whose bytes lie in no piece.
    """
    return _Planner(rows, pieces).steps(moves)


class _Planner:
    def __init__(self, rows: np.ndarray, pieces: int) -> None:
        table = rows.tolist()
        self._main, self._extras = table[:pieces], table[pieces:]
        self._order = sorted(range(pieces), key=lambda index: self._main[index][0])
        self._starts = [self._main[index][0] for index in self._order]
        self._by_key = {
            (offset, run_bytes, runs, pitch if runs > 1 else 0, place != NOT_PACKED): index
            for index, (offset, run_bytes, runs, pitch, place) in enumerate(self._extras)
        }

    def steps(self, moves: Sequence[Move]) -> list[Step]:
        found: list[Step] = []
        covers: dict[int, Cover] = {}
        for move in moves:
            pitch = move.source_pitch if move.runs > 1 else 0
            extra = self._by_key.get((move.source_offset, move.run_bytes, move.runs, pitch, move.packed))
            if extra is not None:
                found.append(self._runs(extra, move))
                continue
            for run in range(move.runs):
                remote = move.source_offset + run * move.source_pitch
                local = move.target_offset + run * move.target_pitch
                found.extend(self._contiguous(move.tensor, remote, local, move.run_bytes, covers))
        found.extend(covers.values())
        found.sort(key=lambda step: (step.piece, isinstance(step, Runs)))
        _join(found)
        return found

    def _runs(self, extra: int, move: Move) -> Runs:
        offset, run_bytes, runs, pitch, packed_at = self._extras[extra]
        piece = self._at(offset + pitch * (runs - 1) + run_bytes - 1, move.tensor)
        return Runs(piece, extra, move.tensor, offset, pitch, packed_at, move.target_offset, move.target_pitch,
                    run_bytes, runs)  # fmt: skip

    def _contiguous(self, tensor: str, remote: int, local: int, length: int, covers: dict[int, Cover]) -> list[Step]:
        found: list[Step] = []
        done = 0
        while done < length:
            piece = self._at(remote + done, tensor)
            offset, size = self._main[piece][:2]
            skip = remote + done - offset
            count = min(size - skip, length - done)
            if count == size:
                found.append(Direct(piece, tensor, offset, local + done, size))
            else:
                cover = covers.setdefault(piece, Cover(piece, tensor, offset, size))
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


def _join(found: list[Step]) -> None:
    """Marks neighbours. Alignment gaps may be overwritten, but never bytes of another step: where runs are scattered,
    a gap may be theirs.
    """
    gap = ALIGNMENT_BYTES if all(isinstance(step, Direct) for step in found) else 1
    places = sorted(range(len(found)), key=lambda index: _first_byte(found[index]))
    before = dict(zip(places[1:], places, strict=False))
    for index, step in enumerate(found):
        previous = found[index - 1] if index and before.get(index) == index - 1 else None
        if isinstance(step, Direct) and isinstance(previous, Direct):
            between = step.local_offset - previous.local_offset - previous.length
            same_shift = step.remote_offset - previous.remote_offset == step.local_offset - previous.local_offset
            step.joins = same_shift and 0 <= between < gap


def _first_byte(step: Step) -> int:
    return min(copy[1] for copy in step.copies) if isinstance(step, Cover) else step.local_offset
