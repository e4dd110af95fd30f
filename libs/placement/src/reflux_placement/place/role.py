"""Owns where one role goes inside one part of the tree: its root domain, then the descent to nodes."""

from dataclasses import dataclass, replace

import numpy as np

from reflux_placement.gang import RoleDemand
from reflux_placement.place.capacity import Capacity, Shape, capacity_of, copies_per_node
from reflux_placement.place.fill import Keys, Slice, descend, keys_of, spread_evenly
from reflux_placement.topology import Ints, Topology

MANY_PARTS = 64
"""With more parts than this, wants are dealt out by one descent instead of a search in each part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolePlan:
    """A role's limits and wishes as positions of levels."""

    demand: RoleDemand
    count: int
    shape: Shape
    preferred: int
    """Level to try first."""

    lowest: int = 0
    """Tightest level whose domain may hold the whole role."""

    spread: int = -1
    """Level over whose parts it is spread as evenly as possible; -1 for none."""

    def want(self, level: int) -> int:
        """Units wanted at a level."""
        return self.count // self.shape.unit(level)

    def plain(self) -> "RolePlan":
        """The plan without wishes: neither spread nor searched for a tighter root inside its domain."""
        return replace(self, preferred=0, lowest=0, spread=-1)

    def inside(self, required: int, gang_preferred: str, topology: Topology) -> "RolePlan":
        """The plan when the role is the whole gang: the gang's levels count as its own."""
        required = min(required, self.shape.required)
        preferred = self.preferred
        lowest = min(self.lowest, required)
        if self.spread >= 0 and gang_preferred and not self.demand.preferred_level:
            preferred = lowest = min(required, max(self.spread + 1, topology.tightness(gang_preferred)))
        if gang_preferred and not self.demand.preferred_level:
            preferred = max(preferred, topology.tightness(gang_preferred))
        shape = replace(self.shape, required=required)
        return replace(self, shape=shape, preferred=min(preferred, required), lowest=lowest)


def plan_of(topology: Topology, demand: RoleDemand, shape: Shape, count: int) -> RolePlan:
    """The plan of a role at a count. Raises UnknownLevel."""
    spread = topology.tightness(demand.spread_level) if demand.spread_level and not demand.max_per_domain else -1
    preferred = topology.tightness(demand.preferred_level) if demand.preferred_level else 0
    preferred = min(preferred, shape.required)
    lowest = 0
    if spread >= 0:
        # As many domains as possible, so all of the widest root that it may have, unless a tighter one is preferred.
        lowest = preferred if demand.preferred_level else shape.required
        lowest = preferred = min(max(lowest, spread + 1), shape.required)
    return RolePlan(demand=demand, count=count, shape=shape, preferred=preferred, lowest=lowest, spread=spread)


def capacity_in(view: Slice, plan: RolePlan, copies_N: Ints) -> Capacity:
    """The role's capacity in every part of a slice; `copies_N` are the slice's nodes."""
    return capacity_of(view.tree, copies_N, plan.shape, view.top, view.first, view.last)


def holds_all(view: Slice, plan: RolePlan, capacity: Capacity, level: int) -> Ints:
    """Parts of a level (indices inside the slice) that hold the whole role as far as the slice can tell."""
    layer = view.tree.layers[level]
    low, _ = view.bounds(level)
    found = np.flatnonzero(capacity.units[level] >= plan.want(level))
    if not len(found):
        return found
    found = found[layer.real_P[found + low]]
    for upper in plan.shape.checked_levels:
        if level < upper <= view.top:
            above = view.tree.layers[upper].part_N[layer.starts_P[found + low]] - view.bounds(upper)[0]
            found = found[capacity.units[upper][above] >= plan.want(upper)]
    return found


def place_role(view: Slice, plan: RolePlan, copies_N: Ints, keys: Keys) -> Ints | None:
    """Members per node of the slice: in the tightest domain that holds them all, from the preferred level up.

    Returns:
        None when no domain up to the required level (or the slice) holds the role.
    """
    capacity = capacity_in(view, plan, copies_N)
    for level in range(min(plan.preferred, view.top), min(plan.shape.required, view.top) + 1):
        part = _tightest(view, plan, capacity, keys, level)
        if part is not None:
            return fill_part(view, plan, capacity, keys, level, part)
    return None


def _tightest(view: Slice, plan: RolePlan, capacity: Capacity, keys: Keys, level: int) -> int | None:
    """The domain of a level (index inside the slice) that holds the whole role with the least room left."""
    found = holds_all(view, plan, capacity, level)
    if not len(found):
        return None
    least = [*([keys.prefer[level]] if keys.prefer is not None else []), capacity.units[level], keys.free[level]]
    for values_P in least:
        values = values_P[found]
        found = found[values == values.min()]
    first_P = view.tree.layers[level].starts_P[found + view.bounds(level)[0]]
    for upper in range(level + 1, view.top):
        # Equal parts differ in what they would break: the one in the fullest rack, then in the fullest block.
        above = view.tree.layers[upper].part_N[first_P] - view.bounds(upper)[0]
        values = keys.free[upper][above]
        found, first_P = found[values == values.min()], first_P[values == values.min()]
    return int(found[0])


def fill_part(view: Slice, plan: RolePlan, capacity: Capacity, keys: Keys, level: int, part: int) -> Ints:
    """Members per node of the slice when the whole role goes into one part (index inside the slice)."""
    inner, cut = inner_slice(view, level, part)
    capacity = replace(capacity, units=_cut(capacity.units, cut))
    keys = Keys(_cut(keys.free, cut), None if keys.prefer is None else _cut(keys.prefer, cut))
    for lower in range(plan.lowest, level if plan.preferred > plan.lowest else 0):
        tighter = _tightest(inner, plan, capacity, keys, lower)
        if tighter is not None:
            own = replace(plan, preferred=plan.lowest)
            count_N = np.zeros(view.last - view.first, dtype=np.int64)
            count_N[cut[0]] = fill_part(inner, own, capacity, keys, lower, tighter)
            return count_N
    start, want_P = level, np.array([plan.want(level)], dtype=np.int64)
    if plan.shape.segment_level <= plan.spread < level:
        start, want_P = plan.spread, spread_evenly(inner, capacity, keys, plan.want(level), plan.spread)
    count_N = np.zeros(view.last - view.first, dtype=np.int64)
    count_N[cut[0]] = descend(inner, capacity, keys, start, want_P)
    return count_N


def fill_wants(view: Slice, plan: RolePlan, copies_N: Ints, keys: Keys, level: int, want_P: Ints) -> Ints | None:
    """Members per node when the members wanted in every part of a level are given; None when they do not fit."""
    used = np.flatnonzero(want_P)
    if plan.shape.required < level and len(used) > 1:
        return None
    size = plan.shape.segment_size if level >= plan.shape.segment_level else 1
    capacity = capacity_in(view, plan, copies_N)
    if (want_P % size).any() or (want_P // size > capacity.units[level]).any():
        return None
    if len(used) > MANY_PARTS:
        return descend(view, capacity, keys, level, want_P // size)
    count_N = np.zeros(view.last - view.first, dtype=np.int64)
    for part in used.tolist():
        inner, cut = inner_slice(view, level, part)
        own = replace(plan, count=int(want_P[part]))
        own_keys = Keys(_cut(keys.free, cut), None if keys.prefer is None else _cut(keys.prefer, cut))
        found_N = place_role(inner, own, copies_N[cut[0]], own_keys)
        if found_N is None:
            return None
        count_N[cut[0]] = found_N
    return count_N


def inner_slice(view: Slice, level: int, part: int) -> tuple[Slice, list[slice]]:
    """The slice of one part (index inside `view`), and where its parts lie among those of `view`, per level."""
    layer = view.tree.layers[level]
    part += view.bounds(level)[0]
    inner = Slice(view.tree, level, int(layer.starts_P[part]), int(layer.stops_P[part]))
    return inner, [slice(*(each - view.bounds(at)[0] for each in inner.bounds(at))) for at in range(level + 1)]


def _cut(arrays: tuple[Ints, ...], cut: list[slice]) -> tuple[Ints, ...]:
    return tuple(array[where] for array, where in zip(arrays, cut, strict=False))


def place_alone(view: Slice, plan: RolePlan, free_NR: Ints) -> Ints | None:
    """`place_role` by the room of the slice's nodes. A role that needs no GPU tries nodes without free ones first."""
    copies_N = copies_per_node(free_NR, plan.demand.each)
    free_gpus_N = np.maximum(free_NR[:, 0], 0)
    keys = keys_of(view, free_gpus_N)
    if not plan.demand.each.gpus and free_gpus_N.any():
        count_N = place_role(view, plan, np.where(free_gpus_N > 0, 0, copies_N), keys)
        if count_N is not None:
            return count_N
    return place_role(view, plan, copies_N, keys)
