"""Owns the topology as nested partitions of the node indices, so that every step of a search is array arithmetic.

Level l cuts the nodes into contiguous parts, and every part of level l lies inside one part of level l + 1. A node
without a label at a level has no domain there; it forms a part of its own at that level (`real` is False), which
never satisfies a constraint at the level but takes unconstrained members.
"""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from reflux_placement.topology import NO_DOMAIN, Ints, Topology

Bools = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Layer:
    """One level of the tree: P parts."""

    name: str
    starts_P: Ints
    stops_P: Ints
    real_P: Bools
    """Whether the part is a domain of this level; False for nodes without a label."""

    part_N: Ints
    """Part of every node."""

    first_child_P: Ints
    """Index of the first part of the level below; zeros at the node level."""

    num_children_P: Ints
    """Parts of the level below; zeros at the node level."""

    parent_P: Ints
    """Part of the level above; zeros at the cluster level."""

    domain_P: Ints
    """Index of the domain in `Topology.domains_by_level`; NO_DOMAIN where not real."""

    @property
    def num_parts(self) -> int:
        """P."""
        return len(self.starts_P)

    def sums(self, values_C: Ints) -> Ints:
        """Sums of a figure of the level below over the parts of this level. The node level gives it back."""
        return np.add.reduceat(values_C, self.first_child_P) if self.first_child_P.size else values_C


@dataclass(frozen=True, eq=False)
class Tree:
    """All layers, tightest first: layers[0] are the nodes, layers[-1] is the cluster."""

    layers: tuple[Layer, ...]


_trees: "WeakKeyDictionary[Topology, Tree]" = WeakKeyDictionary()


def tree_of(topology: Topology) -> Tree:
    """The tree of a topology; built once per topology object."""
    tree = _trees.get(topology)
    if tree is None:
        tree = _trees[topology] = _build(topology)
    return tree


def _build(topology: Topology) -> Tree:
    num_nodes = topology.num_nodes
    key_N = np.arange(num_nodes, dtype=np.int64)
    keys = [key_N]
    for position in range(1, len(topology.levels)):
        domain_N = topology.domain_LN[position]
        # Labelled nodes share the key of their domain; the others keep the part that they have one level below.
        key_N = np.where(domain_N == NO_DOMAIN, keys[-1], domain_N + (position + 1) * (num_nodes + 1))
        keys.append(key_N)
    layers: list[Layer] = []
    bounds = [_starts(key) for key in keys]
    for position, starts_P in enumerate(bounds):
        stops_P = np.append(starts_P[1:], num_nodes)
        part_N = np.repeat(np.arange(len(starts_P)), stops_P - starts_P)
        below = layers[-1].part_N[starts_P] if position else np.zeros(0, dtype=np.int64)
        above = keys[position + 1] if position + 1 < len(keys) else np.zeros(num_nodes, dtype=np.int64)
        above_part_N = np.cumsum(np.concatenate(([0], (np.diff(above) != 0).astype(np.int64))))
        domain_P = topology.domain_LN[position][starts_P]
        layers.append(
            Layer(
                topology.levels[position],
                starts_P,
                stops_P,
                domain_P != NO_DOMAIN,
                part_N,
                below,
                np.diff(np.append(below, layers[-1].num_parts)) if position else np.zeros(0, dtype=np.int64),
                above_part_N[starts_P],
                domain_P,
            )
        )
    return Tree(tuple(layers))


def _starts(key_N: Ints) -> Ints:
    return np.concatenate(([0], np.flatnonzero(np.diff(key_N)) + 1)).astype(np.int64)
