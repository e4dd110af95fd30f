"""Owns the descent: how the units of one role, wanted in a part of the tree, are dealt out to its children.

Largest children are filled first and the last piece goes to the tightest child that holds it. That uses the least
number of children, and of all ways to fill them it makes the sum of squares largest: the fewest pairs are apart.
"""

from dataclasses import dataclass

import numpy as np

from reflux_placement.place.capacity import Capacity, parts_within
from reflux_placement.place.tree import Tree
from reflux_placement.topology import Ints


@dataclass(frozen=True, eq=False)
class Slice:
    """The part of the tree that a search looks at: nodes first..last, all of one part at level `top`."""

    tree: Tree
    top: int
    first: int
    last: int

    def bounds(self, level: int) -> tuple[int, int]:
        """Index range of its parts at a level."""
        return parts_within(self.tree, level, self.first, self.last)

    def child_starts(self, level: int) -> Ints:
        """For every part of `level` here, where its children begin among the parts of the level below here."""
        low, high = self.bounds(level)
        return self.tree.layers[level].first_child_P[low:high] - self.bounds(level - 1)[0]


@dataclass(frozen=True, eq=False)
class Keys:
    """Order among children, per level, for the parts of one slice. Lower goes first."""

    free: tuple[Ints, ...]
    """Free GPUs: among children that hold the same, the one with less room goes first."""

    prefer: tuple[Ints, ...] | None = None
    """Comes before everything else, for example the domains where related roles are."""


def keys_of(view: Slice, free_gpus_N: Ints, prefer_N: Ints | None = None) -> Keys:
    """Sums of the free GPUs (and of the preference, negated: more is better) of a slice's nodes for all levels."""
    free, prefer = [free_gpus_N], [] if prefer_N is None else [-prefer_N]
    for level in range(1, view.top + 1):
        starts = view.child_starts(level)
        free.append(np.add.reduceat(free[-1], starts))
        if prefer_N is not None:
            prefer.append(np.add.reduceat(prefer[-1], starts))
    return Keys(tuple(free), tuple(prefer) if prefer_N is not None else None)


def descend(view: Slice, capacity: Capacity, keys: Keys, level: int, want_P: Ints) -> Ints:
    """Deals `want_P` units (of the parts at `level`) out to nodes; every want must be within capacity.

    Units turn from whole segments into members below the segment level.
    """
    shape = capacity.shape
    while level > 0:
        level -= 1
        want_P = _deal(view, capacity.units[level], keys, level, shape.members(level + 1, want_P))
    return shape.members(0, want_P)


def spread_evenly(view: Slice, capacity: Capacity, keys: Keys, want: int, level: int) -> Ints:
    """Wants per part of `level`, as even as the capacities allow: over as many parts as possible, none above the rest.

    All parts get min(capacity, t - 1) for the smallest t that suffices; what is left goes, one each, to parts that
    have more room, chosen compactly.
    """
    units_P = capacity.units[level]
    below, above = 0, int(min(want, units_P.max(initial=0)))
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (below, middle) if int(np.minimum(units_P, middle).sum()) >= want else (middle, above)
    base_P = np.minimum(units_P, above - 1)
    extra_P = np.minimum(units_P, above) - base_P
    left = want - int(base_P.sum())
    levels = [extra_P]
    for upper in range(level + 1, view.top + 1):
        levels.append(np.add.reduceat(levels[-1], view.child_starts(upper)))
    extra = Capacity(capacity.shape, tuple([extra_P] * level + levels))
    want_P = np.array([left])
    for lower in range(view.top - 1, level - 1, -1):
        want_P = _deal(view, extra.units[lower], keys, lower, want_P)
    return base_P + (want_P if view.top > level else left)


def _deal(view: Slice, units_C: Ints, keys: Keys, level: int, want_P: Ints) -> Ints:
    """Wants of the children at `level`, given those of their parents."""
    low, high = view.bounds(level + 1)
    layer = view.tree.layers[level + 1]
    wanted_W = np.flatnonzero(want_P)
    size_W = layer.num_children_P[low:high][wanted_W]
    begin_W = np.cumsum(size_W) - size_W
    first_W = layer.first_child_P[low:high][wanted_W] - view.bounds(level)[0]
    # Children of the parents that want something, parent by parent.
    child_X = np.repeat(first_W - begin_W, size_W) + np.arange(int(size_W.sum()))
    units_X = units_C[child_X]
    full_W = np.add.reduceat(units_X, begin_W) == want_P[wanted_W] if len(wanted_W) else np.zeros(0, dtype=bool)
    given_C = np.zeros(len(units_C), dtype=np.int64)
    full_X = np.repeat(full_W, size_W)
    given_C[child_X[full_X]] = units_X[full_X]
    open_X = ~full_X & (units_X > 0)
    if not open_X.any():
        return given_C
    parent_X = np.repeat(wanted_W, size_W)[open_X]
    child_X = child_X[open_X]
    order = _order(units_C, keys, level, child_X, parent_X)
    child_X, parent_X = child_X[order], parent_X[order]
    units_X = units_C[child_X]
    before_X = np.cumsum(units_X) - units_X
    begin_X = np.flatnonzero(np.concatenate(([True], parent_X[1:] != parent_X[:-1])))
    before_X = before_X - np.repeat(before_X[begin_X], np.diff(np.append(begin_X, len(child_X))))
    take_X = np.clip(want_P[parent_X] - before_X, 0, units_X)
    given_C[child_X] = take_X
    closing_X = np.flatnonzero((take_X > 0) & (take_X < units_X))
    for at in closing_X.tolist():
        _close(units_C, keys, level, child_X, parent_X, at, int(take_X[at]), given_C)
    return given_C


def _order(units_C: Ints, keys: Keys, level: int, child_X: Ints, parent_X: Ints) -> Ints:
    by = [child_X, keys.free[level][child_X], -units_C[child_X]]
    if keys.prefer is not None:
        by.append(keys.prefer[level][child_X])
    return np.lexsort([*by, parent_X])


def _close(
    units_C: Ints, keys: Keys, level: int, child_X: Ints, parent_X: Ints, at: int, rest: int, given_C: Ints
) -> None:
    """Moves the last piece of a parent to the tightest of its unused children that hold it."""
    stop = int(np.searchsorted(parent_X, parent_X[at], side="right"))
    others_X = child_X[at:stop]
    fits = units_C[others_X] >= rest
    if keys.prefer is not None:
        fits &= keys.prefer[level][others_X] == keys.prefer[level][others_X[0]]
    others_X = others_X[fits]
    best = others_X[np.lexsort([others_X, keys.free[level][others_X], units_C[others_X]])[0]]
    given_C[child_X[at]] = 0
    given_C[best] = rest
