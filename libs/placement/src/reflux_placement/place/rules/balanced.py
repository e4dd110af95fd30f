"""Kueue's Balanced placement: as few domains as suffice, all of them as equally loaded as possible.

For the children of a domain, taken by room, k is the least number that holds W units, and

    T = min(floor(W / k), room of the k-th child)

is what each of them gets at least. Among domains that hold W the one with the highest T is taken; of equals the one
whose shares are most even (highest entropy), then the first. Each of the k children gets T, then what is left goes to
the children with room, evenly, the first ones first; each child is descended the same way. Levels as for BestFit.
"""

import math

import numpy as np

from reflux_placement.gang import Assignment, GangDemand
from reflux_placement.place.fill import Slice
from reflux_placement.place.misfit import Misfit
from reflux_placement.place.role import RolePlan, capacity_in, holds_all
from reflux_placement.place.rules.base import by_roles
from reflux_placement.room import Room
from reflux_placement.topology import Ints


def kueue_balanced(room: Room, gang: GangDemand) -> Assignment | Misfit:
    """Every role balanced over the fewest domains."""
    return by_roles(room, gang, _fill)


def _fill(view: Slice, plan: RolePlan, copies_N: Ints, level: int) -> Ints | None:
    units = capacity_in(view, plan, copies_N).units
    required = min(plan.shape.required, view.top)
    for at in range(min(level, required), required + 1):
        found = holds_all(view, plan, capacity_in(view, plan, copies_N), at).tolist()
        if found:
            want = plan.want(max(at - 1, 0))
            shares = {part: _shares(_children(view, units, at, part), want) for part in found}
            part = max(found, key=lambda each: (shares[each][0], _entropy(shares[each][1]), -each))
            return _down(view, plan, units, at, part)
    return None


def _children(view: Slice, units: tuple[Ints, ...], level: int, part: int) -> Ints:
    """Room of the children of a part (index inside the slice)."""
    if level == 0:
        return units[0][part : part + 1]
    starts = np.append(view.child_starts(level), len(units[level - 1]))
    return units[level - 1][starts[part] : starts[part + 1]]


def _shares(room_C: Ints, want: int) -> tuple[int, Ints]:
    """(T, units per child) of `want` units over children that hold them."""
    order = np.lexsort([np.arange(len(room_C)), -room_C])
    held = np.cumsum(room_C[order])
    k = int(np.searchsorted(held, want)) + 1
    chosen = order[:k]
    least = min(want // k, int(room_C[chosen[-1]]))
    share_C = np.zeros(len(room_C), dtype=np.int64)
    share_C[chosen] = least
    left = want - least * k
    while left:
        open_X = chosen[share_C[chosen] < room_C[chosen]]
        step = max(1, left // len(open_X))
        for child in open_X[: max(1, left // step)].tolist():
            given = min(step, left, int(room_C[child] - share_C[child]))
            share_C[child] += given
            left -= given
    return least, share_C


def _entropy(share_C: Ints) -> float:
    total = int(share_C.sum())
    return round(-sum(each / total * math.log(each / total) for each in share_C.tolist() if each), 9)


def _down(view: Slice, plan: RolePlan, units: tuple[Ints, ...], level: int, part: int) -> Ints:
    want_P = np.zeros(len(units[level]), dtype=np.int64)
    want_P[part] = plan.want(level)
    while level > 0:
        given_C = np.zeros(len(units[level - 1]), dtype=np.int64)
        starts = view.child_starts(level)
        want_P = plan.shape.members(level, want_P)
        for parent in np.flatnonzero(want_P).tolist():
            room_C = _children(view, units, level, parent)
            given_C[starts[parent] : starts[parent] + len(room_C)] = _shares(room_C, int(want_P[parent]))[1]
        want_P, level = given_C, level - 1
    return plan.shape.members(0, want_P)
