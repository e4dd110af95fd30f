"""KAI: the tightest domain first, sub-domains with more room first inside it.

Ratio of a domain = max over resources of (request / free); above 1 it is unfit; the highest ratio goes first, then the
id; candidates from the preferred level up to the required one. Inside the chosen domain the score of nodes puts
sub-domains with more free room first.
"""

import numpy as np

from reflux_placement.gang import Assignment, GangDemand
from reflux_placement.place.fill import Slice
from reflux_placement.place.misfit import Misfit
from reflux_placement.place.role import RolePlan, capacity_in, holds_all
from reflux_placement.place.rules.base import by_roles
from reflux_placement.room import Room
from reflux_placement.topology import Ints


def kai(room: Room, gang: GangDemand) -> Assignment | Misfit:
    """Every role in the tightest domain, its members where there is most room."""
    return by_roles(room, gang, _fill)


def _fill(view: Slice, plan: RolePlan, copies_N: Ints, level: int) -> Ints | None:
    capacity = capacity_in(view, plan, copies_N)
    required = min(plan.shape.required, view.top)
    for at in range(min(level, required), required + 1):
        found = holds_all(view, plan, capacity, at)
        if len(found):
            # One role: the ratio is highest where the fewest members fit.
            part = int(found[np.lexsort([found, capacity.units[at][found]])[0]])
            want_P = np.zeros(len(capacity.units[at]), dtype=np.int64)
            want_P[part] = plan.want(at)
            return _down(view, plan, capacity.units, at, want_P)
    return None


def _down(view: Slice, plan: RolePlan, units: tuple[Ints, ...], level: int, want_P: Ints) -> Ints:
    """Children with the most room first."""
    while level > 0:
        want_P = plan.shape.members(level, want_P)
        starts_P = view.child_starts(level)
        level -= 1
        units_C = units[level]
        size_P = np.diff(np.append(starts_P, len(units_C)))
        parent_C = np.repeat(np.arange(len(want_P)), size_P)
        order = np.lexsort([np.arange(len(units_C)), -units_C, parent_C])
        before_X = np.cumsum(units_C[order]) - units_C[order]
        before_X = before_X - np.repeat(before_X[starts_P], size_P)
        given_C = np.zeros(len(units_C), dtype=np.int64)
        given_C[order] = np.clip(want_P[parent_C[order]] - before_X, 0, units_C[order])
        want_P = given_C
    return plan.shape.members(0, want_P)
