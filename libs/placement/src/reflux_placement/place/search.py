"""Owns the search for room: a whole gang or the reason why not, in the tightest domains that hold all of it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from reflux_placement.gang import Assignment, GangDemand
from reflux_placement.place.capacity import copies_per_node
from reflux_placement.place.cost import DEFAULT_WEIGHTS, Weights, cost_of_nodes
from reflux_placement.place.diagnose import diagnose, largest_that_fits, with_holders
from reflux_placement.place.exhaust import Budget, Exhaustive
from reflux_placement.place.fill import Slice
from reflux_placement.place.improve import MAX_CELLS, improve
from reflux_placement.place.misfit import Misfit
from reflux_placement.place.pack import Packer, Question, prepare
from reflux_placement.place.role import capacity_in, holds_all, place_alone
from reflux_placement.place.tree import Tree
from reflux_placement.room import Room
from reflux_placement.topology import CLUSTER, Ints, Topology

Nodes = dict[str, Ints]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How hard to look; none of them depends on time, so that answers repeat."""

    attempts: int = 8
    """Domains of one level in which a gang of several roles is packed before the next level is tried."""

    successes: int = 4
    """Packings of one level that are compared."""

    wide_nodes: int = 1_024
    """In a cluster of at most this many nodes wider levels are compared too, though a tighter one holds the gang."""

    exhaust_steps: int = 4_000
    """Steps of the complete search behind the packing; about 20 ms. A gang that needs more counts as a misfit."""

    improve_steps: int = 400
    """Steps of the local search for gangs that span several of the tightest named domains, about 0.1 ms each. 0 keeps
    the cheapest packing."""

    improve_members: int = 96
    """Largest gang that it looks at."""

    improve_starts: int = 3
    """Packings that it starts from."""

    exhaust_nodes: int = 64
    """Largest domain, in nodes, that is searched completely."""


DEFAULT = Limits()


def find_place(
    room: Room,
    gang: GangDemand,
    *,
    limits: Limits = DEFAULT,
    weights: Weights = DEFAULT_WEIGHTS,
    holders: bool = False,
) -> Assignment | Misfit:
    """Where the whole gang goes now, at its desired counts or, when elastic, at the largest that fit. Books nothing.

    Args:
        room: what is free; closed nodes take no part.
        gang: what to place.
        limits: how hard to look.
        weights: figures of the cost.
        holders: whether a misfit names the jobs that hold what is missing; costs time linear in all holdings.

    Raises:
        UnknownLevel: a constraint at a level that the topology does not have.
    """
    gang.check_levels(room.topology)
    free_NR = room.usable_NR()
    found = _at_counts(room.topology, free_NR, gang, _desired(gang), limits, weights)
    if found is None and any(demand.least < demand.count for demand in gang.roles):
        found = _smaller(room.topology, free_NR, gang, limits, weights)
    if found is not None:
        return found
    least = {demand.role: demand.least for demand in gang.roles}
    misfit = diagnose(prepare(room.topology, gang, least, weights), free_NR)
    return with_holders(misfit, room) if holders else misfit


def fits_ever(topology: Topology, gang: GangDemand, *, limits: Limits = DEFAULT) -> Misfit | None:
    """None when the gang (elastic roles at their least) fits on the empty cluster; else why not and what would fit.

    Raises:
        UnknownLevel: a constraint at a level that the topology does not have.
    """
    gang.check_levels(topology)
    least = {demand.role: demand.least for demand in gang.roles}

    def fits(counts: Mapping[str, int]) -> bool:
        return _at_counts(topology, topology.capacity_NR, gang, counts, limits, DEFAULT_WEIGHTS) is not None

    if not any(least.values()) or fits(least):
        return None
    misfit = diagnose(prepare(topology, gang, least), topology.capacity_NR)
    return largest_that_fits(misfit, gang, least, fits)


def assignment_of(topology: Topology, tree: Tree, nodes: Nodes) -> Assignment:
    """The ranks with the tightest domain that holds all of them."""
    used = np.concatenate([ranks for ranks in nodes.values() if len(ranks)])
    low, high = int(used.min()), int(used.max())
    for layer in tree.layers:
        part = layer.part_N[low]
        if part == layer.part_N[high] and layer.real_P[part]:
            return Assignment(layer.name, int(layer.domain_P[part]), nodes)
    raise AssertionError("every node lies inside the cluster")


def _desired(gang: GangDemand) -> dict[str, int]:
    return {demand.role: demand.count for demand in gang.roles}


def _at_counts(
    topology: Topology, free_NR: Ints, gang: GangDemand, counts: Mapping[str, int], limits: Limits, weights: Weights
) -> Assignment | None:
    question = prepare(topology, gang, counts, weights)
    nodes = _search(question, free_NR, limits)
    if nodes is None:
        return None
    every = {demand.role: nodes.get(demand.role, np.zeros(0, dtype=np.int64)) for demand in gang.roles}
    return assignment_of(topology, question.tree, every)


def _smaller(
    topology: Topology, free_NR: Ints, gang: GangDemand, limits: Limits, weights: Weights
) -> Assignment | None:
    """The largest counts that fit: all elastic roles shrunk in step, then each grown again as far as it goes."""
    units = {demand.role: max(1, demand.segment_size) for demand in gang.roles}
    steps = {demand.role: (demand.count - demand.least) // units[demand.role] for demand in gang.roles}
    most = max(steps.values())

    def counts_at(step: int) -> dict[str, int]:
        return {
            demand.role: demand.least + units[demand.role] * (steps[demand.role] * step // most)
            for demand in gang.roles
        }

    def place(counts: Mapping[str, int]) -> Assignment | None:
        return _at_counts(topology, free_NR, gang, counts, limits, weights) if any(counts.values()) else None

    best = place(counts_at(0))
    if best is None:
        return None
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        found = place(counts_at(middle))
        low, high, best = (middle, high, found) if found is not None else (low, middle, best)
    counts = counts_at(low)
    for demand in gang.roles:
        below, above = counts[demand.role] // units[demand.role], demand.count // units[demand.role] + 1
        while above - below > 1:
            middle = (below + above) // 2
            found = place({**counts, demand.role: middle * units[demand.role]})
            below, above, best = (middle, above, found) if found is not None else (below, middle, best)
        counts[demand.role] = below * units[demand.role]
    return best


def _search(question: Question, free_NR: Ints, limits: Limits) -> Nodes | None:
    """Ranks per role, or None when no arrangement was found."""
    gang, topology = question.gang, question.topology
    required = topology.tightness(gang.required_level)
    preferred = topology.tightness(gang.preferred_level or CLUSTER)
    view = Slice(question.tree, len(topology.levels) - 1, 0, topology.num_nodes)
    if len(question.plans) == 1:
        return _single(question, view, free_NR, required)
    start = min(preferred, required) if gang.preferred_level else 0
    found: list[tuple[float, Nodes]] = []
    budget = Budget(limits.exhaust_steps)
    for level in range(start, required + 1):
        held = 0
        for inner in _candidates(question, view, free_NR, level, limits):
            nodes = Packer(question, inner, free_NR).pack()
            if nodes is None and not found and inner.last - inner.first <= limits.exhaust_nodes:
                nodes = Exhaustive(question, inner, free_NR, budget).first()
            if nodes is not None:
                found.append((_price(question, free_NR, nodes), nodes))
                held += 1
            if held == limits.successes:
                break
        narrow = gang.preferred_level or level <= question.prices.fast or topology.num_nodes > limits.wide_nodes
        if found and narrow and not any(level <= plan.spread < required for plan in question.plans):
            break
    if not found:
        return None
    found.sort(key=lambda each: each[0])
    return _improved(question, free_NR, [nodes for _, nodes in found[: limits.improve_starts]], limits)


def _improved(question: Question, free_NR: Ints, starts: list[Nodes], limits: Limits) -> Nodes:
    """The cheapest arrangement; searched on when it spans several fast domains, but few enough to look at."""
    if sum(plan.count for plan in question.plans) > limits.improve_members:
        return starts[0]
    part_N = question.tree.layers[question.prices.fast].part_N
    spanned = len(np.unique(np.concatenate([part_N[ranks] for ranks in starts[0].values()])))
    if not limits.improve_steps or not 1 < spanned <= MAX_CELLS:
        return starts[0]
    return improve(question, free_NR, starts, limits.improve_steps)


def _single(question: Question, view: Slice, free_NR: Ints, required: int) -> Nodes | None:
    """One role: sums over domains are all that matters, so the answer is exact."""
    plan = question.plans[0]
    plan = plan.inside(required, question.gang.preferred_level, question.topology)
    count_N = place_alone(view, plan, free_NR)
    if count_N is None:
        return None
    used = np.flatnonzero(count_N)
    return {plan.demand.role: np.repeat(used, count_N[used])}


def _price(question: Question, free_NR: Ints, nodes: Nodes) -> float:
    free_N = np.maximum(free_NR[:, 0], 0)
    return cost_of_nodes(
        question.topology, question.tree, question.gang, nodes, free_N, question.prices, question.weights
    ).total


def _candidates(question: Question, view: Slice, free_NR: Ints, level: int, limits: Limits) -> Iterator[Slice]:
    """Domains of a level that could hold the whole gang, the one with the least room first."""
    tree = question.tree
    layer = tree.layers[level]
    fits_P = layer.real_P & _above_is_real(question, level)
    free_NR = np.maximum(free_NR, 0)
    need = question.need
    sums = [_sums(free_NR[:, column], layer.starts_P) for column in range(3)]
    for column in range(3):
        fits_P &= sums[column] >= need[column]
    for plan in question.plans:
        if not fits_P.any():
            return
        capacity = capacity_in(view, plan, copies_per_node(free_NR, plan.demand.each))
        role_level = min(plan.shape.required, level)
        held = np.zeros(tree.layers[role_level].num_parts, dtype=bool)
        held[holds_all(view, plan, capacity, role_level)] = True
        inside = layer.part_N[tree.layers[role_level].starts_P[held]]
        fits_P &= np.isin(np.arange(layer.num_parts), inside)
    found = np.flatnonzero(fits_P)
    order = np.lexsort([found, *_room_above(question, free_NR, level, found), sums[1][found], sums[0][found]])
    for part in found[order][: limits.attempts].tolist():
        yield Slice(tree, level, int(layer.starts_P[part]), int(layer.stops_P[part]))


def _room_above(question: Question, free_NR: Ints, level: int, found: Ints) -> list[Ints]:
    """Free GPUs of the domains above some parts, the widest first: of equal parts the fullest rack is best."""
    starts = question.tree.layers[level].starts_P[found]
    keys: list[Ints] = []
    for upper in range(len(question.tree.layers) - 2, level, -1):
        layer = question.tree.layers[upper]
        keys.append(_sums(free_NR[:, 0], layer.starts_P)[layer.part_N[starts]])
    return keys


def _above_is_real(question: Question, level: int) -> Ints:
    """Parts of a level that lie inside a domain of every level above it at which something is demanded."""
    topology, tree = question.topology, question.tree
    levels = {topology.tightness(question.gang.required_level)}
    for plan in question.plans:
        levels |= {plan.shape.required, *plan.shape.special_levels}
    starts_P = tree.layers[level].starts_P
    fits_P = np.ones(len(starts_P), dtype=bool)
    for upper in levels:
        if upper > level:
            above = tree.layers[upper]
            fits_P &= above.real_P[above.part_N[starts_P]]
    return fits_P


def _sums(values_N: Ints, starts_P: Ints) -> Ints:
    return np.add.reduceat(values_N, starts_P)
