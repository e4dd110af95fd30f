"""Owns how many members of a role every part of the tree holds, with segments and anti-affinity taken into account."""

from dataclasses import dataclass

import numpy as np

from reflux_placement.gang import RoleDemand
from reflux_placement.place.tree import Tree
from reflux_placement.topology import UNLIMITED, Ints, Resources, Topology


def copies_per_node(free_NR: Ints, each: Resources) -> Ints:
    """How many members of a size every node holds; closed nodes (rows of -1) hold none. Shape [N]."""
    copies_N: Ints | None = None
    for column, amount in enumerate(each.row):
        if amount == 0:
            continue
        fits_N = free_NR[:, column] if amount == 1 else free_NR[:, column] // amount
        copies_N = fits_N if copies_N is None else np.minimum(copies_N, fits_N)
    if copies_N is None:
        return np.where(free_NR[:, 0] >= 0, UNLIMITED, 0)
    return np.maximum(copies_N, 0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shape:
    """What limits a role, as positions of levels in the tree."""

    required: int
    segment_size: int = 1
    segment_level: int = 0
    inner_segments: tuple[tuple[int, int], ...] = ()
    """Segments inside segments, the larger ones first: size, which divides that of the one around it, and level, which
    is tighter. No demand of ours has them; Kueue's rule does (`rules/kueue.py`)."""

    cap: int = 0
    """At most this many members in one part of `cap_level`; 0 is no bound."""

    cap_level: int = 0
    near_levels: tuple[int, ...] = ()
    """Levels of hard relations: every member lies inside a domain there."""

    limit: tuple[int, Ints] | None = None
    """A level and the most members that each of its parts may take, all parts of the topology."""

    def unit(self, level: int) -> int:
        """Members in one unit of a level: the size of the segments there."""
        if level >= self.segment_level:
            return self.segment_size
        return next((size for size, at in self.inner_segments if level >= at), 1)

    def parts(self, level: int) -> int:
        """Units of the level below in one unit of a level: more than one at a segment level."""
        if level != self.segment_level and not self.inner_segments:
            return 1
        return self.unit(level) // self.unit(level - 1)

    def members(self, level: int, units: Ints) -> Ints:
        """Units of a level as units of the level below: at a segment level whole segments turn into their parts."""
        parts = self.parts(level)
        return units * parts if parts > 1 else units

    @property
    def special_levels(self) -> tuple[int, ...]:
        """Levels at which every member must lie inside a domain, ascending."""
        found = {self.required, *self.near_levels}
        if self.segment_size > 1:
            found.update((self.segment_level, *(level for _, level in self.inner_segments)))
        if self.cap:
            found.add(self.cap_level)
        return tuple(sorted(found))

    @property
    def checked_levels(self) -> tuple[int, ...]:
        """Levels whose parts may hold less than the sum of their children."""
        levels = self.special_levels
        return levels if self.limit is None else (*levels, self.limit[0])


def shape_of(topology: Topology, demand: RoleDemand, near_levels: tuple[int, ...] = ()) -> Shape:
    """The shape of a role. Raises UnknownLevel."""
    return Shape(
        required=topology.tightness(demand.required_level),
        segment_size=max(1, demand.segment_size),
        segment_level=topology.tightness(demand.segment_level) if demand.segment_size else 0,
        cap=demand.max_per_domain,
        cap_level=topology.tightness(demand.spread_level) if demand.max_per_domain else 0,
        near_levels=near_levels,
    )


@dataclass(frozen=True, eq=False)
class Capacity:
    """Units of one role that every part holds, for every level (`Shape.unit`): members below the segment level, whole
    segments from there up."""

    shape: Shape
    units: tuple[Ints, ...]
    """Per level [P]."""

    def members(self, level: int) -> Ints:
        """Members that every part of a level holds when each part is filled on its own, in whole segments."""
        return self.units[level] * self.shape.unit(level)


def capacity_of(
    tree: Tree, copies_N: Ints, shape: Shape, top: int, first: int = 0, last: int | None = None
) -> Capacity:
    """Capacities from the node level up to level `top`, inside the part of that level with nodes first..last.

    Args:
        tree: the tree; the figures are of its parts.
        copies_N: members that every node holds, all nodes of the topology (or the slice first..last).
        shape: the role's limits.
        top: highest level wanted.
        first: index of the first node looked at.
        last: index behind the last one; None is all.
    """
    units: list[Ints] = []
    here = np.minimum(copies_N, UNLIMITED)
    for level in range(top + 1):
        layer = tree.layers[level]
        low, high = parts_within(tree, level, first, last)
        if level:
            here = np.add.reduceat(here, layer.first_child_P[low:high] - parts_within(tree, level - 1, first, last)[0])
        if level in shape.special_levels:
            here = np.where(layer.real_P[low:high], here, 0)
        if shape.segment_size > 1 and (parts := shape.parts(level)) > 1:
            here = here // parts
        if shape.cap and level == shape.cap_level:
            in_segments = shape.segment_size > 1 and level >= shape.segment_level
            here = np.minimum(here, shape.cap // shape.segment_size if in_segments else shape.cap)
        if shape.limit is not None and level == shape.limit[0]:
            in_segments = shape.segment_size > 1 and level >= shape.segment_level
            here = np.minimum(here, shape.limit[1][low:high] // (shape.segment_size if in_segments else 1))
        units.append(here)
    return Capacity(shape, tuple(units))


def parts_within(tree: Tree, level: int, first: int, last: int | None) -> tuple[int, int]:
    """Index range of the parts of a level that cover nodes first..last."""
    layer = tree.layers[level]
    if last is None:
        return int(layer.part_N[first]), layer.num_parts
    return int(layer.part_N[first]), int(layer.part_N[last - 1]) + 1
