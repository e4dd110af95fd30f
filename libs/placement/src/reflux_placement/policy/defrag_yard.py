"""Owns a trial migration: a copy of the room, the pieces in every part of one level, and the moves made so far.

Every move goes into room that is free at that moment, so that the journal, read from the start, can be executed.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reflux_placement.gang import Assignment
from reflux_placement.place.capacity import copies_per_node
from reflux_placement.place.check import constraint_broken
from reflux_placement.place.extend import extend
from reflux_placement.place.search import assignment_of
from reflux_placement.place.tree import tree_of
from reflux_placement.policy.pieces import Piece, allowed_nodes, pieces_of
from reflux_placement.policy.view import Live
from reflux_placement.room import Holding, Room
from reflux_placement.topology import UNLIMITED, Ints, Resources, Topology

Row = tuple[int, int, int]

ONE_GPU: Row = (1, 0, 0)
ANY_SIZE = 1 << 40
"""More GPUs than any piece has."""


@dataclass(frozen=True, eq=False)
class Move:
    """One piece went from where `before` had it to where `after` has it; the rest of the job stayed."""

    job: str
    before: Holding
    after: Holding
    old: Piece
    new: Piece


class Yard:
    """The trial; `undo` goes back to any earlier length of the journal."""

    def __init__(self, room: Room, live: Mapping[str, Live]) -> None:
        self.room = room.copy()
        self.topology = room.topology
        self.journal: list[Move] = []
        self.level = 0
        self.layer = tree_of(room.topology).layers[0]
        self._cut_at = 0
        self.pieces: dict[int, list[Piece]] = {}
        self._movable = [job for job, each in live.items() if each.movable and job in room.holdings]
        self._copies: dict[Row, Ints] = {}
        self._fits: dict[Row, Ints] = {}
        self._below: dict[int, Ints] = {}

    def cut(self, level: int) -> None:
        """Cuts the movable jobs into pieces at a level (position); pieces on closed nodes are left where they are."""
        self.level = level
        self.layer = tree_of(self.topology).layers[level]
        self._cut_at = len(self.journal)
        self.pieces = {}
        self._fits.clear()
        self._copies.clear()
        self._below.clear()
        for job in self._movable:
            for piece in pieces_of(self.topology, job, self.room.holdings[job], level):
                if self.room.open_N[piece.node_K].all():
                    self.pieces.setdefault(piece.part, []).append(piece)

    def fit_P(self, each: Row) -> Ints:
        """How many members of a size fit into every part of the level now, on open nodes."""
        if each not in self._fits:
            if each not in self._copies:
                self._copies[each] = copies_per_node(self.room.usable_NR(), Resources(*each))
            self._fits[each] = np.add.reduceat(self._copies[each], self.layer.starts_P)
        return self._fits[each]

    def reach_P(self, gpus: int) -> Ints:
        """Free GPUs per part if its movable pieces of fewer than `gpus` GPUs were gone."""
        return self.fit_P(ONE_GPU) + self.below_P(gpus)

    def below_P(self, gpus: int) -> Ints:
        """GPUs of the movable pieces of fewer than `gpus` GPUs, per part."""
        if gpus not in self._below:
            below_P = self._below[gpus] = np.zeros(self.layer.num_parts, dtype=np.int64)
            for part, pieces in self.pieces.items():
                below_P[part] = sum(piece.gpus for piece in pieces if piece.gpus < gpus)
        return self._below[gpus]

    def smaller_sets(self, part: int, each: Row, target: int, below_gpus: int = ANY_SIZE) -> list[list[Piece]]:
        """Sets of pieces (each of fewer GPUs than `below_gpus`) without which `target` members fit into a part;
        few GPUs first. Three ways to choose: smallest first, largest that still fits first, one alone."""
        local = sorted((p for p in self.pieces.get(part, ()) if p.gpus < below_gpus), key=lambda p: p.gpus)
        now = int(self.fit_P(each)[part])
        copies_N, free_NR = self._copies[each], self.room.free_NR

        def fits(gone: Collection[Piece]) -> bool:
            """Counts nodes with pieces anew (they are open), member by member: arrays cost more for so few."""
            after: dict[int, list[int]] = {}
            for piece in gone:
                for node, need in piece.rows:
                    row = after.get(node)
                    if row is None:
                        row = after[node] = free_NR[node].tolist()
                    for kind in range(3):
                        row[kind] += need[kind]
            gained = sum(_copies(row, each) - int(copies_N[node]) for node, row in after.items())
            return now + gained >= target

        if not fits(local):
            return []
        missing = target * each[0] - int(self.fit_P(ONE_GPU)[part])
        found = [_grown(local, fits), _grown(_largest_fitting(local, missing), fits)]
        found += [[piece] for piece in local if piece.gpus >= missing and fits([piece])][:1]
        unique = {frozenset(id(piece) for piece in pieces): pieces for pieces in found}
        return sorted(unique.values(), key=lambda pieces: (sum(p.gpus for p in pieces), len(pieces)))

    def allowed_P(self, piece: Piece) -> NDArray[np.bool_]:
        """Parts of the level that the constraints of the piece's job allow while the rest of the job stays."""
        first, last = allowed_nodes(self.topology, self.room.holdings[piece.job], piece, self.level)
        return (self.layer.starts_P >= first) & (self.layer.stops_P <= last)

    def place(self, piece: Piece, part: int) -> bool:
        """Moves a piece into a part if it fits there and its job's constraints allow it."""
        holding = self.room.holdings[piece.job]
        start, stop = self._range(part)
        nodes = self._first_fit(piece, start, stop)
        if nodes is None:
            return False
        assignment = _moved(self.topology, holding, piece, nodes)
        if constraint_broken(self.topology, tree_of(self.topology), holding.demand, assignment.nodes):
            searched = self._search(holding, piece, start, stop)
            if searched is None:
                return False
            assignment = searched
        before = self.room.holdings[piece.job]
        self.room.release(piece.job)
        after = self.room.take(piece.job, before.demand, assignment, keep=before)
        node_K = np.array([assignment.nodes[role][rank] for role, rank in piece.members], dtype=np.int64)
        new = Piece(piece.job, part, piece.members, node_K, piece.need_KR)
        self._swap(piece, new)
        self.journal.append(Move(piece.job, before, after, piece, new))
        return True

    def undo(self, length: int) -> None:
        """Takes moves back until the journal has this length."""
        while len(self.journal) > length:
            move = self.journal.pop()
            self.room.release(move.job)
            self.room.restore(move.job, move.before)
            if len(self.journal) >= self._cut_at:
                self._swap(move.new, move.old)
        if length < self._cut_at:
            self.cut(self.level)

    def _range(self, part: int) -> tuple[int, int]:
        return int(self.layer.starts_P[part]), int(self.layer.stops_P[part])

    def _first_fit(self, piece: Piece, start: int, stop: int) -> Ints | None:
        """A node for every member, filling nodes in order; None when some member finds none."""
        usable = self.room.open_N[start:stop]
        free_NR = self.room.free_NR[start:stop].copy()
        node_K = np.full(len(piece.node_K), -1, dtype=np.int64)
        for row in {tuple(row) for row in piece.need_KR.tolist()}:
            which = np.flatnonzero((piece.need_KR == row).all(axis=1))
            copies_N = np.where(usable, copies_per_node(free_NR, Resources(*row)), 0)
            copies_N = np.minimum(copies_N, len(which))
            spots = np.repeat(np.arange(stop - start), copies_N)[: len(which)]
            if len(spots) < len(which):
                return None
            np.subtract.at(free_NR, spots, np.array(row))
            node_K[which] = spots + start
        return node_K

    def _search(self, holding: Holding, piece: Piece, start: int, stop: int) -> Assignment | None:
        """The same by the full search, for pieces with constraints tighter than the level."""
        moving = set(piece.members)
        ranks = {demand.role: holding.assignment.nodes.get(demand.role, ()) for demand in holding.demand.roles}
        kept = {
            role: {rank: int(node) for rank, node in enumerate(nodes) if (role, rank) not in moving}
            for role, nodes in ranks.items()
        }
        trial = self.room.copy()
        trial.release(piece.job)
        trial.open_N[:start] = False
        trial.open_N[stop:] = False
        found = extend(trial, holding.demand, kept, {role: len(nodes) for role, nodes in ranks.items()})
        return found if isinstance(found, Assignment) else None

    def _swap(self, old: Piece, new: Piece) -> None:
        """Books that `old` became `new` in the tables."""
        here = self.pieces[old.part]
        del here[next(index for index, piece in enumerate(here) if piece is old)]
        self.pieces.setdefault(new.part, []).append(new)
        for gpus, below_P in self._below.items():
            if old.gpus < gpus:
                below_P[old.part] -= old.gpus
                below_P[new.part] += old.gpus
        touched = np.unique(np.concatenate((old.node_K, new.node_K)))
        usable_TR = np.where(self.room.open_N[touched, None], self.room.free_NR[touched], -1)
        for each, copies_N in self._copies.items():
            now_T = copies_per_node(usable_TR, Resources(*each))
            if each in self._fits:
                np.add.at(self._fits[each], self.layer.part_N[touched], now_T - copies_N[touched])
            copies_N[touched] = now_T


def _copies(free: list[int], each: Row) -> int:
    """Members of a size on one open node (`copies_per_node`)."""
    return max(0, min((have // amount for have, amount in zip(free, each, strict=True) if amount), default=UNLIMITED))


def _grown(pieces: list[Piece], fits: Callable[[Collection[Piece]], bool]) -> list[Piece]:
    """The shortest prefix that fits, without the pieces it can spare, the largest tried first."""
    chosen: list[Piece] = []
    for piece in pieces:
        chosen.append(piece)
        if fits(chosen):
            break
    for piece in sorted(chosen, key=lambda p: -p.gpus):
        rest = [each for each in chosen if each is not piece]
        if fits(rest):
            chosen = rest
    return chosen


def _largest_fitting(ascending: list[Piece], missing_gpus: int) -> list[Piece]:
    """Largest first as long as the sum stays within what is missing, then the others, smallest first."""
    taken, left = [], missing_gpus
    for piece in reversed(ascending):
        if piece.gpus <= left:
            taken.append(piece)
            left -= piece.gpus
    held = {id(piece) for piece in taken}
    return taken + [piece for piece in ascending if id(piece) not in held]


def _moved(topology: Topology, holding: Holding, piece: Piece, node_K: Ints) -> Assignment:
    """The assignment of the job with the piece's members on other nodes."""
    nodes = {role: ranks.copy() for role, ranks in holding.assignment.nodes.items()}
    for (role, rank), node in zip(piece.members, node_K.tolist(), strict=True):
        nodes[role][rank] = node
    return assignment_of(topology, tree_of(topology), nodes)
