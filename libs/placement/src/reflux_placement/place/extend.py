"""Owns new room for some members of a gang that has others: replaced, added, or fewer than before.

Members that stay keep rank and node. A new member goes into the domains that its constraints demand: the rack of its
segment, the domain of its role and of its gang, the domain of its peers. Where there is no room the answer is a misfit,
never a part of a gang and never an empty place.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from reflux_placement.gang import Assignment, GangDemand, Relation, RoleDemand
from reflux_placement.place.capacity import Shape, copies_per_node
from reflux_placement.place.check import constraint_broken
from reflux_placement.place.cost import DEFAULT_WEIGHTS, Weights
from reflux_placement.place.diagnose import made
from reflux_placement.place.fill import Slice, keys_of
from reflux_placement.place.misfit import Misfit
from reflux_placement.place.pack import Question, prepare, pull_of
from reflux_placement.place.role import RolePlan, capacity_in, place_role
from reflux_placement.place.search import DEFAULT, Limits, assignment_of, find_place
from reflux_placement.room import Room
from reflux_placement.topology import Ints

MAX_ORDERS = 24
UNPLACED = -1


@dataclass(frozen=True, slots=True)
class _Slot:
    """Ranks of one role that must go into the same part."""

    role: str
    ranks: tuple[int, ...]
    level: int
    part: int
    whole_segments: bool = False


def extend(
    room: Room,
    gang: GangDemand,
    kept: Mapping[str, Mapping[int, int]],
    counts: Mapping[str, int],
    *,
    extra_nodes: frozenset[int] = frozenset(),
    limits: Limits = DEFAULT,
    weights: Weights = DEFAULT_WEIGHTS,
) -> Assignment | Misfit:
    """The gang at new counts with every kept member where it is. Books nothing.

    Args:
        room: what is free; it does not hold the gang.
        gang: what was asked.
        kept: node index of every rank that stays, per role. Ranks at or above the wanted count give their room back.
        counts: members wanted per role; roles that are left out get the ranks that they keep.
        extra_nodes: closed nodes, such as spares, that may be used all the same.
        limits: how hard to look when nothing is kept.
        weights: figures of the cost; new members go where their traffic is.

    Returns:
        Ranks 0 .. count - 1 of every role, or what is missing where.

    Raises:
        UnknownLevel: a constraint at a level that the topology does not have.
    """
    gang.check_levels(room.topology)
    wanted = {d.role: counts.get(d.role, 1 + max(kept.get(d.role, {}), default=-1)) for d in gang.roles}
    nodes = {d.role: _ranks(kept.get(d.role, {}), wanted[d.role]) for d in gang.roles}
    if not any((ranks >= 0).any() for ranks in nodes.values()):
        return _anew(room, gang, wanted, extra_nodes, limits, weights)
    question = prepare(room.topology, gang, wanted, weights)
    return _Extension(question, _usable(room, gang, nodes, extra_nodes)).run(nodes)


def _ranks(kept: Mapping[int, int], count: int) -> Ints:
    ranks = np.full(count, UNPLACED, dtype=np.int64)
    for rank, node in kept.items():
        if rank < count:
            ranks[rank] = node
    return ranks


def _anew(
    room: Room,
    gang: GangDemand,
    wanted: Mapping[str, int],
    extra_nodes: frozenset[int],
    limits: Limits,
    weights: Weights,
) -> Assignment | Misfit:
    """Nobody stays: a place as for a new gang at exactly the wanted counts."""
    opened = room.copy()
    opened.open_N[list(extra_nodes)] = True
    roles = tuple(replace(d, count=wanted[d.role], min_count=None, max_count=None) for d in gang.roles)
    return find_place(opened, replace(gang, roles=roles), limits=limits, weights=weights)


def _usable(room: Room, gang: GangDemand, nodes: Mapping[str, Ints], extra_nodes: frozenset[int]) -> Ints:
    """Room for new members: open and extra nodes, less what the kept members hold."""
    left_NR = room.free_NR.copy()
    for demand in gang.roles:
        ranks = nodes[demand.role]
        np.subtract.at(left_NR, ranks[ranks >= 0], np.array(demand.each.row, dtype=np.int64))
    open_N = room.open_N.copy()
    open_N[list(extra_nodes)] = True
    return np.where(open_N[:, None], np.maximum(left_NR, 0), -1)


class _Extension:
    """One question, with the room that is left beside the kept members."""

    def __init__(self, question: Question, left_NR: Ints) -> None:
        self._question = question
        self._topology, self._tree = question.topology, question.tree
        self._left_NR = left_NR

    def run(self, nodes: dict[str, Ints]) -> Assignment | Misfit:
        stuck: Misfit | None = None
        for order in itertools.islice(self._orders(nodes), MAX_ORDERS):
            trial = {role: ranks.copy() for role, ranks in nodes.items()}
            found = self._fill(trial, self._left_NR.copy(), order)
            if found is None:
                return assignment_of(self._topology, self._tree, trial)
            stuck = stuck or found
        assert stuck is not None, "there is at least one order of roles"
        return stuck

    def _orders(self, nodes: Mapping[str, Ints]) -> Iterator[tuple[RolePlan, ...]]:
        """The usual order of the roles that miss a rank first; the others for the case that one took the only room of
        another."""
        missing = [plan for plan in self._question.plans if (nodes[plan.demand.role] < 0).any()]
        return itertools.permutations(missing)

    def _fill(self, nodes: dict[str, Ints], left_NR: Ints, order: tuple[RolePlan, ...]) -> Misfit | None:
        """Places all missing ranks; a misfit when a slot has no room or the kept members break a demand already."""
        for plan in order:
            # A placed slot may bind the others (to its rack, say), so they are looked at anew.
            while slots := self._slots(plan, nodes):
                slot = slots[0]
                found = self._place(plan, slot, nodes, left_NR)
                if found is None:
                    return self._stuck(plan, slot, nodes, left_NR)
                ranks = np.array(slot.ranks, dtype=np.int64)
                nodes[slot.role][ranks] = found
                np.subtract.at(left_NR, found, np.array(plan.demand.each.row, dtype=np.int64))
        complaint = constraint_broken(self._topology, self._tree, self._question.gang, nodes)
        if complaint is None:
            return None
        return Misfit(
            role="", constraint="stay", level="cluster", resource="gpus", needed=0, available=0, note=complaint
        )

    def _slots(self, plan: RolePlan, nodes: dict[str, Ints]) -> list[_Slot]:
        """Missing ranks by the part that they must go to, the narrowest first."""
        demand, ranks = plan.demand, nodes[plan.demand.role]
        base = self._base(demand, nodes)
        groups: dict[tuple[int, int, bool], list[int]] = {}
        size = demand.segment_size or 1
        for first in (np.unique(np.flatnonzero(ranks < 0) // size) * size).tolist():
            missing = [rank for rank in range(first, first + size) if ranks[rank] < 0]
            where = {rank: self._by_peers(plan, rank, nodes, base) for rank in missing}
            whole = False
            if demand.segment_size:
                common, whole = self._segment_part(demand, ranks[first : first + size], list(where.values()))
                where = {rank: common if whole else self._narrower(common, found) for rank, found in where.items()}
            for rank, (level, part) in where.items():
                groups.setdefault((level, part, whole), []).append(rank)
        slots = [_Slot(demand.role, tuple(of), *key[:2], key[2]) for key, of in groups.items()]
        return sorted(slots, key=lambda slot: (slot.level, slot.whole_segments, slot.ranks))

    def _segment_part(
        self, demand: RoleDemand, mates: Ints, wanted: list[tuple[int, int]]
    ) -> tuple[tuple[int, int], bool]:
        """The part that a segment is bound to, and whether it is still free to choose its domain inside that part."""
        position = self._topology.tightness(demand.segment_level)
        placed = mates[mates >= 0]
        if len(placed):
            return (position, self._part(position, int(placed[0]))), False
        level, part = min(wanted)
        if level <= position:
            return (position, self._part(position, int(self._tree.layers[level].starts_P[part]))), False
        return (level, part), True

    def _base(self, demand: RoleDemand, nodes: dict[str, Ints]) -> tuple[int, int]:
        """The part that the gang's and the role's required levels leave, given who is placed."""
        gang = self._question.gang
        found = (len(self._tree.layers) - 1, 0)
        for level, members in (
            (gang.required_level, list(nodes.values())),
            (demand.required_level, [nodes[demand.role]]),
        ):
            placed = np.concatenate(members)
            placed = placed[placed >= 0]
            if len(placed):
                position = self._topology.tightness(level)
                found = self._narrower(found, (position, self._part(position, int(placed[0]))))
        return found

    def _by_peers(self, plan: RolePlan, rank: int, nodes: dict[str, Ints], found: tuple[int, int]) -> tuple[int, int]:
        """The narrower part that a placed peer or follower of a rank calls for."""
        for relation in self._question.relations:
            if relation.level and relation.required and plan.demand.role in (relation.role, relation.near):
                for node in _partners(relation, plan.demand.role, rank, nodes):
                    level = self._topology.tightness(relation.level)
                    found = self._narrower(found, (level, self._part(level, node)))
        return found

    def _part(self, level: int, node: int) -> int:
        return int(self._tree.layers[level].part_N[node])

    @staticmethod
    def _narrower(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
        return other if other[0] < one[0] else one

    def _place(self, plan: RolePlan, slot: _Slot, nodes: dict[str, Ints], left_NR: Ints) -> Ints | None:
        """Nodes for the ranks of a slot, ascending; None when they do not fit."""
        some_placed = bool((nodes[slot.role] >= 0).any())
        if plan.spread >= 0 and some_placed and len(slot.ranks) > 1 and not slot.whole_segments:
            return self._one_by_one(plan, slot, nodes, left_NR)
        view, own, copies_N = self._slot_question(plan, slot, nodes, left_NR)
        if plan.spread >= 0:
            prefer_N = -np.bincount(nodes[slot.role][nodes[slot.role] >= 0], minlength=len(left_NR))
        else:
            placed = {role: ranks[ranks >= 0] for role, ranks in nodes.items()}
            prefer_N = pull_of(self._question, slot.role, placed)
        free_N = np.maximum(left_NR[view.first : view.last, 0], 0)
        count_N = place_role(view, own, copies_N, keys_of(view, free_N, prefer_N[view.first : view.last]))
        return None if count_N is None else np.repeat(np.arange(view.first, view.last), count_N)

    def _one_by_one(self, plan: RolePlan, slot: _Slot, nodes: dict[str, Ints], left_NR: Ints) -> Ints | None:
        """A role that is spread: each member goes where the fewest of its kind are."""
        trial, left_NR = {**nodes, slot.role: nodes[slot.role].copy()}, left_NR.copy()
        for rank in slot.ranks:
            found = self._place(plan, replace(slot, ranks=(rank,)), trial, left_NR)
            if found is None:
                return None
            trial[slot.role][rank] = found[0]
            left_NR[found[0]] -= np.array(plan.demand.each.row, dtype=np.int64)
        return np.sort(trial[slot.role][list(slot.ranks)])

    def _slot_question(
        self, plan: RolePlan, slot: _Slot, nodes: dict[str, Ints], left_NR: Ints
    ) -> tuple[Slice, RolePlan, Ints]:
        """The slot as a role of its own inside its part: what it may use of every node."""
        layer = self._tree.layers[slot.level]
        view = Slice(self._tree, slot.level, int(layer.starts_P[slot.part]), int(layer.stops_P[slot.part]))
        shape, demand = plan.shape, plan.demand
        copies_N = copies_per_node(left_NR, demand.each)
        for level in shape.special_levels:
            above = self._tree.layers[level]
            copies_N = np.where(above.real_P[above.part_N], copies_N, 0)
        limit: tuple[int, Ints] | None = None
        if shape.cap:
            above = self._tree.layers[shape.cap_level]
            placed = nodes[slot.role][nodes[slot.role] >= 0]
            left_P = shape.cap - np.bincount(above.part_N[placed], minlength=above.num_parts)
            limit = (shape.cap_level, np.maximum(left_P, 0))
            if shape.cap_level > slot.level and left_P[above.part_N[view.first]] < len(slot.ranks):
                copies_N = np.zeros_like(copies_N)
        own_shape = Shape(
            required=shape.required,
            segment_size=shape.segment_size if slot.whole_segments else 1,
            segment_level=shape.segment_level if slot.whole_segments else 0,
            limit=limit,
        )
        own = RolePlan(demand=demand, count=len(slot.ranks), shape=own_shape, preferred=0)
        if plan.spread >= 0 and not (nodes[slot.role] >= 0).any():
            own = replace(own, spread=plan.spread, preferred=plan.preferred, lowest=plan.lowest)
        return view, own, copies_N[view.first : view.last]

    def _stuck(self, plan: RolePlan, slot: _Slot, nodes: dict[str, Ints], left_NR: Ints) -> Misfit:
        """What is missing in the part that the ranks of a slot must go to."""
        view, own, copies_N = self._slot_question(plan, slot, nodes, left_NR)
        row = plan.demand.each.row
        column = next((column for column in range(3) if row[column]), 0)
        fits = int(capacity_in(view, own, copies_N).members(view.top).sum())
        needed = len(slot.ranks)
        found = made(
            self._question, plan, "stay", slot.level, slot.part, column, needed * row[column],
            min(fits, needed - 1) * row[column],
        )  # fmt: skip
        return replace(found, fragmented=fits >= needed)


def _partners(relation: Relation, role: str, rank: int, nodes: Mapping[str, Ints]) -> list[int]:
    """Nodes of the placed members of the other role that share a domain with a rank."""
    role_M, near_M = nodes[relation.role], nodes[relation.near]
    if role == relation.role:
        node = int(near_M[rank * len(near_M) // len(role_M)])
        return [node] if node >= 0 else []
    followers = np.flatnonzero(np.arange(len(role_M)) * len(near_M) // len(role_M) == rank)
    placed = role_M[followers]
    return placed[placed >= 0][:1].tolist()
