"""First fit: nodes in the order of their numbers, topology only where a hard demand names a level."""

import numpy as np

from reflux_placement.gang import Assignment, GangDemand
from reflux_placement.place.fill import Slice
from reflux_placement.place.misfit import Misfit
from reflux_placement.place.role import RolePlan, capacity_in, holds_all
from reflux_placement.place.rules.base import by_roles, take_in_order
from reflux_placement.room import Room
from reflux_placement.topology import Ints


def first_fit(room: Room, gang: GangDemand) -> Assignment | Misfit:
    """The first nodes that do: roles one after another, segments in the first domains that hold one."""
    return by_roles(room, gang, _fill, wide=True)


def _fill(view: Slice, plan: RolePlan, copies_N: Ints, _level: int) -> Ints | None:
    capacity = capacity_in(view, plan, copies_N)
    level = min(plan.shape.required, view.top)
    found = holds_all(view, plan, capacity, level)
    if not len(found):
        return None
    low = view.bounds(level)[0]
    layer = view.tree.layers[level]
    first, last = (int(bound[low + int(found[0])]) - view.first for bound in (layer.starts_P, layer.stops_P))
    # Sums turn into places at the level where parts may hold less than their children: there, in order of numbers.
    special = max((at for at in plan.shape.special_levels if at < level), default=0)
    begin, end = (int(view.tree.layers[special].part_N[view.first + at]) for at in (first, last - 1))
    begin, end = begin - view.bounds(special)[0], end + 1 - view.bounds(special)[0]
    want_P = np.zeros(len(capacity.units[special]), dtype=np.int64)
    want_P[begin:end] = take_in_order(capacity.units[special][begin:end], plan.want(special))
    return _down(view, plan, capacity.units, special, want_P)


def _down(view: Slice, plan: RolePlan, units: tuple[Ints, ...], level: int, want_P: Ints) -> Ints:
    """Children in the order of their numbers."""
    while level > 0:
        want_P = plan.shape.members(level, want_P)
        starts_P = view.child_starts(level)
        level -= 1
        size_P = np.diff(np.append(starts_P, len(units[level])))
        before_C = np.cumsum(units[level]) - units[level]
        before_C = before_C - np.repeat(before_C[starts_P], size_P)
        want_P = np.clip(np.repeat(want_P, size_P) - before_C, 0, units[level])
    return plan.shape.members(0, want_P)
