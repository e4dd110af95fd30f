"""Owns the search for a migration: clears domains, one after another, until a gang has its slots.

What the gang needs whole is a list of slots (`defrag_bound.slots_of`). Domains that miss least are cleared first. The
pieces that leave one are chosen to be few GPUs and go, largest first, where they fit tightest without breaking a slot.
A piece that fits nowhere may push smaller ones out of its way (ejection chains, a few deep).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from reflux_placement.gang import GangDemand, RoleDemand
from reflux_placement.place.capacity import copies_per_node
from reflux_placement.place.search import assignment_of
from reflux_placement.place.tree import tree_of
from reflux_placement.policy.defrag_bound import Slot, slots_of
from reflux_placement.policy.defrag_yard import ANY_SIZE, ONE_GPU, Yard
from reflux_placement.policy.pieces import Piece
from reflux_placement.policy.view import Live
from reflux_placement.room import Room
from reflux_placement.topology import CLUSTER, NODE, Ints

PLACEHOLDER = "\0slots of "


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How far a search goes; counts, not seconds, so that the outcome does not depend on the machine."""

    moves: int = 4000
    """Moves of pieces in one trial."""

    attempts: int = 4000
    """Domains that all trials of a search try to clear, on the way of a chain too, and groups that they try to move
    whole. This bounds its time."""

    scopes: int = 12
    """Domains of the gang's required level that are tried."""

    depth: int = 2
    """Longest chain of pieces that push smaller ones out."""

    destinations: int = 3
    """Domains that are tried for one piece, and for each step of a chain twice as many."""

    polish: int = 24
    """Plans with at most this many moves are searched for moves that can be left out."""


class Trial:
    """One attempt to clear slots for a gang inside a range of nodes."""

    def __init__(self, room: Room, live: Mapping[str, Live], limits: Limits) -> None:
        self.yard = Yard(room, live)
        self.limits = limits
        self.attempts = 0
        self.slot: Slot | None = None
        self.inside_P = np.zeros(0, dtype=bool)

    def clear(self, gang: GangDemand, first: int, last: int) -> bool:
        """Frees the slots of every role; those of earlier roles are held by placeholders meanwhile."""
        topology = self.yard.topology
        held: list[str] = []
        slots = slots_of(topology, gang)
        for slot in slots:
            self.yard.cut(topology.tightness(slot.level))
            if not self._clear_role(slot, first, last):
                return False
            if slot is not slots[-1]:
                held.append(self._hold(slot))
        self.yard.room.release_all(held)
        return True

    @property
    def _is_spent(self) -> bool:
        """Whether nothing is left of the budget."""
        return self.attempts >= self.limits.attempts or len(self.yard.journal) > self.limits.moves

    def _spend(self) -> bool:
        """Takes one attempt from the budget; False when nothing is left of it."""
        if self._is_spent:
            return False
        self.attempts += 1
        return True

    def _clear_role(self, slot: Slot, first: int, last: int) -> bool:
        """Frees the slots of one role inside a range of nodes, in one domain of the slot's scope."""
        topology = self.yard.topology
        ranges = [(first, last)]
        if slot.scope not in (CLUSTER, slot.level):
            inside = [d for d in topology.domains(slot.scope) if first <= d.start and d.stop <= last]
            free_N = np.maximum(self.yard.room.usable_NR()[:, 0], 0)
            inside.sort(key=lambda d: -int(free_N[d.start : d.stop].sum()))
            ranges = [(d.start, d.stop) for d in inside[: self.limits.scopes]]
        length = len(self.yard.journal)
        for low, high in ranges:
            if (
                self._at_any_depth(slot, low, high)
                or self._join_splinters(slot, low, high)
                or self._move_groups(slot, low, high)
            ):
                return True
            self.yard.undo(length)
        return False

    def _at_any_depth(self, slot: Slot, first: int, last: int) -> bool:
        return any(self._clear_range(slot, first, last, depth) for depth in range(self.limits.depth + 1))

    def _join_splinters(self, slot: Slot, first: int, last: int) -> bool:
        """For free amounts that lie in parts too small for a member inside a domain: clears nodes there instead of the
        domain, a few domains at a time."""
        level, each = self.yard.level, slot.each.row
        for _ in range(self.limits.scopes):
            fit_P = self.yard.fit_P(each)
            lots_P = fit_P // slot.members
            before = int(lots_P[self.inside_P].sum())
            if before >= slot.needed:
                return True
            target_P = (lots_P + 1) * slot.members
            hope_P = self.inside_P & (self.yard.reach_P(ANY_SIZE) >= target_P * each[0])
            hope_P &= self.yard.fit_P(ONE_GPU) > fit_P * each[0]
            order = np.flatnonzero(hope_P)
            order = order[np.argsort((target_P - fit_P)[order], kind="stable")][: self.limits.scopes]
            if level == 0 or not any(self._clear_nodes(slot, int(part), int(target_P[part])) for part in order):
                return False
            self.inside_P = self._inside(first, last)
        return False

    def _move_groups(self, slot: Slot, first: int, last: int) -> bool:
        """For domains that hold only a part of members which must stay together at a wider level: moves these whole."""
        yard, level = self.yard, self.yard.level
        if self._is_spent:
            return False  # A cut at another level costs as much as many attempts.
        for wider in range(level + 1, len(yard.topology.levels) - 1):
            if self._is_spent:
                break
            yard.cut(wider)
            self.slot, self.inside_P = slot, np.zeros(yard.layer.num_parts, dtype=bool)
            groups = [piece for pieces in yard.pieces.values() for piece in pieces if len(piece.members) > 1]
            for piece in sorted(groups, key=lambda piece: piece.gpus)[: 8 * self.limits.scopes]:
                lots = self._lots(slot, first, last)
                if lots >= slot.needed or not self._spend():
                    break
                length = len(yard.journal)
                current = any(piece is each for each in yard.pieces[piece.part])
                moved = current and self._relocate(piece, frozenset({piece.part}), self.limits.depth)
                if moved and self._lots(slot, first, last) <= lots:
                    yard.undo(length)
        yard.cut(level)
        self.inside_P = self._inside(first, last)
        return self._lots(slot, first, last) >= slot.needed

    def _lots(self, slot: Slot, first: int, last: int) -> int:
        """Slots that are free inside a range of nodes."""
        layer = tree_of(self.yard.topology).layers[self.yard.topology.tightness(slot.level)]
        copies_N = copies_per_node(self.yard.room.usable_NR(), slot.each)
        lots_P = np.add.reduceat(copies_N, layer.starts_P) // slot.members
        return int(lots_P[layer.real_P & (layer.starts_P >= first) & (layer.stops_P <= last)].sum())

    def _inside(self, first: int, last: int) -> NDArray[np.bool_]:
        """Parts of the level that are domains inside a range of nodes."""
        layer = self.yard.layer
        return layer.real_P & (layer.starts_P >= first) & (layer.stops_P <= last)

    def _clear_nodes(self, slot: Slot, part: int, target: int) -> bool:
        """Room for `target` members in one domain, node by node; all or nothing, and no slot elsewhere is lost."""
        if not self._spend():
            return False
        yard, level = self.yard, self.yard.level
        length = len(yard.journal)
        lots = self._lots(slot, 0, yard.topology.num_nodes)
        first, last = int(yard.layer.starts_P[part]), int(yard.layer.stops_P[part])
        yard.cut(0)
        cleared = self._at_any_depth(replace(slot, members=1, needed=target, level=NODE, scope=CLUSTER), first, last)
        yard.cut(level)
        if cleared and self._lots(slot, 0, yard.topology.num_nodes) > lots:
            return True
        yard.undo(length)
        return False

    def _clear_range(self, slot: Slot, first: int, last: int, depth: int) -> bool:
        """Clears one domain after another, those that miss least first, until there are enough slots."""
        each = slot.each.row
        self.inside_P = self._inside(first, last)
        self.slot = slot
        tried_P = ~self.inside_P
        while True:
            fit_P = self.yard.fit_P(each)
            lots_P = fit_P // slot.members
            if int(lots_P[self.inside_P].sum()) >= slot.needed:
                return True
            missing_P = (lots_P + 1) * slot.members - fit_P
            tried_P |= self.yard.reach_P(ANY_SIZE) < (lots_P + 1) * slot.members * each[0]
            for part in np.argsort(missing_P, kind="stable").tolist():
                if tried_P[part]:
                    continue
                if not self._spend():
                    return False
                tried_P[part] = True
                if self._empty(part, each, int(lots_P[part] + 1) * slot.members, frozenset(), depth):
                    tried_P[part] = False
                    break
            else:
                return False

    def _empty(
        self,
        part: int,
        each: tuple[int, int, int],
        target: int,
        avoid: frozenset[int],
        depth: int,
        below: int = ANY_SIZE,
    ) -> bool:
        """Moves pieces (smaller than `below` GPUs) out of a domain until `target` members fit; all or nothing."""
        length = len(self.yard.journal)
        for pieces in self.yard.smaller_sets(part, each, target, below):
            largest_first = sorted(pieces, key=lambda piece: -piece.gpus)
            if all(self._relocate(piece, avoid | {part}, depth) for piece in largest_first):
                return True
            self.yard.undo(length)
        return False

    def _relocate(self, piece: Piece, avoid: frozenset[int], depth: int) -> bool:
        """Moves a piece to the domain where it fits tightest without breaking a slot; pushes smaller ones out if it
        must and may."""
        assert self.slot is not None
        room_P, each, count = self._room_for(piece)
        room_P[list(avoid)] = -1
        fitting = np.flatnonzero(room_P >= count)
        for part in fitting[np.argsort(room_P[fitting], kind="stable")][: self.limits.destinations].tolist():
            if self._put(piece, part):
                return True
        if depth == 0:
            return False
        within_reach_P = (self.yard.reach_P(piece.gpus) >= count * each[0]) & ~self._slotted()
        close = np.flatnonzero((room_P >= 0) & (room_P < count) & within_reach_P)
        length = len(self.yard.journal)
        for part in close[np.argsort(-room_P[close], kind="stable")][: 2 * self.limits.destinations].tolist():
            if not self._spend():
                return False
            if self._empty(part, each, count, avoid, depth - 1, piece.gpus) and self._put(piece, part):
                return True
            self.yard.undo(length)
        return False

    def _room_for(self, piece: Piece) -> tuple[Ints, tuple[int, int, int], int]:
        """Per part, how many members of the piece's largest kind fit without breaking a slot (-1 where it may not
        go), that kind, and how many of it there are."""
        each, count = piece.largest_kind
        room_P = self.yard.fit_P(each).copy()
        slot = self.slot
        assert slot is not None
        fit_P = self.yard.fit_P(slot.each.row)
        slack_P = fit_P % slot.members * slot.each.gpus
        slotted_P = self._slotted()
        if slot.each.gpus and each[0]:
            room_P = np.where(slotted_P, np.minimum(room_P, slack_P // each[0]), room_P)
        room_P[~self.yard.allowed_P(piece)] = -1
        return room_P, each, count

    def _slotted(self) -> NDArray[np.bool_]:
        """Parts that hold a slot already."""
        assert self.slot is not None
        return self.inside_P & (self.yard.fit_P(self.slot.each.row) >= self.slot.members)

    def _put(self, piece: Piece, part: int) -> bool:
        """One move, unless it would cost a slot."""
        assert self.slot is not None
        each, members = self.slot.each.row, self.slot.members
        lots = int(self.yard.fit_P(each)[part]) // members
        if not self.yard.place(piece, part):
            return False
        if self.inside_P[part] and int(self.yard.fit_P(each)[part]) // members < lots:
            self.yard.undo(len(self.yard.journal) - 1)
            return False
        return True

    def _hold(self, slot: Slot) -> str:
        """Books the cleared slots of a role, so that the next role looks for other ones."""
        topology, layer = self.yard.topology, self.yard.layer
        copies_N = np.minimum(copies_per_node(self.yard.room.usable_NR(), slot.each), slot.members * slot.needed)
        nodes: list[int] = []
        for part in np.flatnonzero(self.inside_P).tolist():
            span = np.arange(layer.starts_P[part], layer.stops_P[part])
            spots = np.repeat(span, copies_N[span])
            nodes += spots[: len(spots) // slot.members * slot.members].tolist()
        nodes = nodes[: slot.members * slot.needed]
        demand = GangDemand(roles=(RoleDemand(role=slot.role, count=len(nodes), each=slot.each),))
        name = PLACEHOLDER + slot.role
        held = assignment_of(topology, tree_of(topology), {slot.role: np.array(nodes, dtype=np.int64)})
        self.yard.room.take(name, demand, held)
        return name
