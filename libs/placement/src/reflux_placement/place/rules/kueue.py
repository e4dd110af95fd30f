"""Kueue's topology-aware scheduling: BestFit and LeastFreeCapacity.

Phase 1, upwards: a host holds min over resources of floor(free / request) pods; sums upwards; at the slice level the
sum is divided by the slice size and rounded down, then summed. Phase 2, downwards: a required level is that level only;
a preferred one climbs until one domain fits, and uses several at the top. Order of domains: BestFit has slices
descending, pods ascending, name; LeastFreeCapacity has slices ascending, pods ascending, name. If one domain fits it is
the smallest that does; else domains are filled in order, with the best fit for the last one. Then each is descended.
Required and preferred levels use BestFit, pods without a level LeastFreeCapacity. (KEP-2724 and its documentation.)

Slices may lie inside slices, up to three layers (`podset-slice-required-topology-constraints`). Then a domain counts
what its children hold in whole slices of the layer below, and the descent deals out slices of that layer.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from reflux_placement.gang import Assignment, GangDemand
from reflux_placement.place.capacity import Capacity
from reflux_placement.place.fill import Keys, Slice
from reflux_placement.place.misfit import Misfit
from reflux_placement.place.role import RolePlan, capacity_in, fill_part, holds_all
from reflux_placement.place.rules.base import Rule, by_roles, take_in_order
from reflux_placement.room import Room
from reflux_placement.topology import Ints


def kueue_best_fit(room: Room, gang: GangDemand) -> Assignment | Misfit:
    """Every role with a preferred level: BestFit."""
    return by_roles(room, gang, best_fit)


def kueue_least_free(room: Room, gang: GangDemand) -> Assignment | Misfit:
    """Every role without a level of its own: LeastFreeCapacity over hosts."""
    return by_roles(room, gang, least_free)


def kueue_layers(inner: Sequence[tuple[int, str]]) -> Rule:
    """BestFit where the segments of every role are made of smaller slices again.

    Args:
        inner: size and level of these slices, the larger ones first; every size divides the one before, every level is
            tighter than the one before.
    """

    def layered(view: Slice, plan: RolePlan, copies_N: Ints, level: int) -> Ints | None:
        position = {layer.name: at for at, layer in enumerate(view.tree.layers)}
        shape = replace(plan.shape, inner_segments=tuple((size, position[name]) for size, name in inner))
        # Kueue refuses a level below that of the outermost slices.
        return best_fit(view, replace(plan, shape=shape), copies_N, max(level, shape.segment_level))

    return lambda room, gang: by_roles(room, gang, layered)


def best_fit(view: Slice, plan: RolePlan, copies_N: Ints, level: int) -> Ints | None:
    """Members per node by BestFit, from a preferred level up to the required one."""
    capacity = capacity_in(view, plan, copies_N)
    keys = _pods(view, copies_N)
    required = min(plan.shape.required, view.top)
    for at in range(min(level, required), required + 1):
        found = holds_all(view, plan, capacity, at)
        if len(found):
            units, pods = capacity.units[at][found], keys.free[at][found]
            part = int(found[np.lexsort([found, pods, units])[0]])
            return fill_part(view, plan.plain(), capacity, keys, at, part)
    return None


def least_free(view: Slice, plan: RolePlan, copies_N: Ints, _level: int) -> Ints | None:
    """Members per node by LeastFreeCapacity: the parts of the slice level, or hosts, with the least room first."""
    capacity = capacity_in(view, plan, copies_N)
    keys = _pods(view, copies_N)
    required = min(plan.shape.required, view.top)
    found = holds_all(view, plan, capacity, required)
    if not len(found):
        return None
    layer, low = view.tree.layers[required], view.bounds(required)[0]
    inside_N = np.zeros(len(copies_N), dtype=bool)
    first, last = int(layer.starts_P[low + found[0]]), int(layer.stops_P[low + found[0]])
    inside_N[first - view.first : last - view.first] = True
    at = plan.shape.segment_level if plan.shape.segment_level <= required else 0
    starts = view.tree.layers[at].starts_P[slice(*view.bounds(at))] - view.first
    units_P = np.where(inside_N[starts], capacity.units[at], 0)
    order = np.lexsort([np.arange(len(units_P)), keys.free[at], units_P])
    want_P = np.zeros(len(units_P), dtype=np.int64)
    want_P[order] = take_in_order(units_P[order], plan.want(at))
    want_P = plan.shape.members(at, want_P)
    return want_P if at == 0 else _hosts(view, capacity, at, want_P)


def _hosts(view: Slice, capacity: Capacity, level: int, want_P: Ints) -> Ints:
    """Hosts below the slice level, with the least room first."""
    copies_N = capacity.units[0]
    part_N = view.tree.layers[level].part_N[view.first : view.last] - view.bounds(level)[0]
    order = np.lexsort([np.arange(len(copies_N)), copies_N, part_N])
    units_X, part_X = copies_N[order], part_N[order]
    before_X = np.cumsum(units_X) - units_X
    begin = np.flatnonzero(np.concatenate(([True], np.diff(part_X) != 0)))
    before_X = before_X - np.repeat(before_X[begin], np.diff(np.append(begin, len(part_X))))
    count_N = np.zeros(len(copies_N), dtype=np.int64)
    count_N[order] = np.clip(want_P[part_X] - before_X, 0, units_X)
    return count_N


def _pods(view: Slice, copies_N: Ints) -> Keys:
    """Pods that every part holds, per level: the second key of both orders."""
    pods = [copies_N]
    for level in range(1, view.top + 1):
        pods.append(np.add.reduceat(pods[-1], view.child_starts(level)))
    return Keys(tuple(pods))
