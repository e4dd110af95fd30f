"""Owns what all rules share: roles one after another inside the domains that the gang's levels allow, or nothing."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from reflux_placement.gang import Assignment, GangDemand
from reflux_placement.place.capacity import copies_per_node
from reflux_placement.place.check import constraint_broken
from reflux_placement.place.fill import Slice
from reflux_placement.place.misfit import Misfit
from reflux_placement.place.pack import Question, prepare, wanted_by_peers
from reflux_placement.place.role import RolePlan, inner_slice
from reflux_placement.place.search import assignment_of
from reflux_placement.place.tree import tree_of
from reflux_placement.room import Room
from reflux_placement.topology import CLUSTER, NODE, Ints

Rule = Callable[[Room, GangDemand], Assignment | Misfit]
"""A rival of `find_place`: the whole gang at its desired counts, or a misfit. Books nothing."""

Fill = Callable[[Slice, RolePlan, Ints, int], Ints | None]
"""Members per node of a slice for one role: (slice, plan, members that each node holds, level to try first)."""

MAX_TRIES = 8


def by_roles(room: Room, gang: GangDemand, fill: Fill, *, wide: bool = False) -> Assignment | Misfit:
    """Places a gang role by role with a rule for one role.

    The level tried first is the role's preferred one, else the gang's, else the tightest named level (the setting that
    is best for gangs). A gang whose own level is below the cluster goes into one domain there, the fullest first.

    Args:
        room: what is free.
        gang: what to place.
        fill: the rule.
        wide: whether to look at the gang's required level only, without climbing to it.

    Raises:
        UnknownLevel: a constraint at a level that the topology does not have.
    """
    gang.check_levels(room.topology)
    topology, free_NR = room.topology, room.usable_NR()
    question = prepare(topology, gang, {demand.role: demand.count for demand in gang.roles})
    named = topology.levels[1] if len(topology.levels) > 2 else NODE
    stuck = question.plans[0].demand.role
    for view in _slices(room, gang, free_NR, question.need, wide):
        nodes: dict[str, Ints] = {}
        left_NR = free_NR[view.first : view.last].copy()
        for plan in question.plans:
            level = topology.tightness(plan.demand.preferred_level or gang.preferred_level or named)
            count_N = _one_role(question, view, plan, left_NR, nodes, fill, level)
            if count_N is None:
                stuck = plan.demand.role
                break
            used = np.flatnonzero(count_N)
            left_NR[used] -= count_N[used, None] * np.array(plan.demand.each.row, dtype=np.int64)
            nodes[plan.demand.role] = np.repeat(used + view.first, count_N[used])
        if len(nodes) == len(question.plans) and not constraint_broken(topology, question.tree, gang, nodes):
            every = {demand.role: nodes.get(demand.role, np.zeros(0, dtype=np.int64)) for demand in gang.roles}
            return assignment_of(topology, question.tree, every)
    needed = int(question.need[0])
    return Misfit(role=stuck, constraint="shape", level=CLUSTER, resource="gpus", needed=needed, available=0)


def _one_role(
    question: Question, view: Slice, plan: RolePlan, left_NR: Ints, nodes: dict[str, Ints], fill: Fill, level: int
) -> Ints | None:
    """Members per node of one role, beside its peers where a hard relation calls for them."""
    copies_N = copies_per_node(left_NR, plan.demand.each)
    wanted = wanted_by_peers(question, view, plan, nodes)
    if wanted is None:
        return fill(view, plan, copies_N, min(level, view.top))
    return _beside_peers(view, plan, copies_N, fill, *wanted)


def _beside_peers(view: Slice, plan: RolePlan, copies_N: Ints, fill: Fill, level: int, want_P: Ints) -> Ints | None:
    """The rule inside every domain that a hard relation calls for, at the counts that it calls for."""
    count_N = np.zeros_like(copies_N)
    for part in np.flatnonzero(want_P).tolist():
        inner, cut = inner_slice(view, level, part)
        found_N = fill(inner, replace(plan, count=int(want_P[part])), copies_N[cut[0]], 0)
        if found_N is None or int(want_P[part]) % plan.shape.segment_size:
            return None
        count_N[cut[0]] = found_N
    return count_N


def _slices(room: Room, gang: GangDemand, free_NR: Ints, need: Ints, wide: bool) -> Iterator[Slice]:
    """Domains for the whole gang, from its preferred level up to the required one, the fullest that could do first."""
    topology, tree = room.topology, tree_of(room.topology)
    required = topology.tightness(gang.required_level)
    first = required if wide or not gang.preferred_level else topology.tightness(gang.preferred_level)
    for level in range(min(first, required), required + 1):
        layer = tree.layers[level]
        if layer.num_parts == 1:
            yield Slice(tree, level, 0, topology.num_nodes)
            continue
        sums_PR = np.add.reduceat(np.maximum(free_NR, 0), layer.starts_P, axis=0)
        fits = np.flatnonzero((sums_PR >= need).all(axis=1) & layer.real_P)
        order = fits if wide else fits[np.lexsort([fits, sums_PR[fits, 0]])]
        for part in order[:MAX_TRIES].tolist():
            yield Slice(tree, level, int(layer.starts_P[part]), int(layer.stops_P[part]))


def take_in_order(units_X: Ints, want: int) -> Ints:
    """Fills places in the given order until `want` units are dealt out."""
    before_X = np.cumsum(units_X) - units_X
    return np.clip(want - before_X, 0, units_X)
