"""Owns the tree cluster > ... > block > rack (one NVLink domain) > node, as arrays in topology order.

Every domain is a contiguous range of node indices, because nodes are numbered in the order of the tree. The id of a
domain is its path: two racks in different blocks may carry the same name (facts: two blocks, one rack label). A node
without a label at a level belongs to no domain of that level: it sorts last inside its parent and never satisfies a
constraint at that level.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from reflux_placement.errors import InvalidTopology, UnknownLevel

Ints = NDArray[np.int64]

NODE = "node"
CLUSTER = "cluster"
DEFAULT_LEVELS = ("rack", "block", "zone")
"""Named levels between node and cluster, tightest first."""

NO_DOMAIN = -1
UNLIMITED = 1 << 40
"""How often a demand of nothing fits anywhere."""


@dataclass(frozen=True, slots=True)
class Resources:
    """An amount of what a node has. CPUs are counted in thousandths, so that sums stay exact."""

    gpus: int = 0
    millicpus: int = 0
    memory_bytes: int = 0

    def __add__(self, other: "Resources") -> "Resources":
        return Resources(
            self.gpus + other.gpus, self.millicpus + other.millicpus, self.memory_bytes + other.memory_bytes
        )

    def __sub__(self, other: "Resources") -> "Resources":
        return self + other.times(-1)

    def times(self, count: int) -> "Resources":
        """The amount that `count` members of this size need."""
        return Resources(self.gpus * count, self.millicpus * count, self.memory_bytes * count)

    def fits_in(self, room: "Resources") -> bool:
        """Whether `room` holds this amount."""
        return self.gpus <= room.gpus and self.millicpus <= room.millicpus and self.memory_bytes <= room.memory_bytes

    @property
    def row(self) -> tuple[int, int, int]:
        """As a row of the arrays: GPUs, thousandths of a CPU, bytes."""
        return (self.gpus, self.millicpus, self.memory_bytes)


NOTHING = Resources()


@dataclass(frozen=True, slots=True)
class Node:
    """One machine (a compute tray of an NVL72 rack). `labels` gives its domain name per level, tightest first or any
    order; a level without a label means that the node belongs to no domain there. `rails` names its NICs: GPU i uses
    rail i * len(rails) // gpus."""

    name: str
    resources: Resources
    labels: Mapping[str, str] = field(default_factory=dict)
    rails: tuple[str, ...] = ()


@dataclass(frozen=True)
class Domain:
    """A part of the tree: node indices `start` (included) to `stop` (excluded). `index` counts within its level."""

    level: str
    index: int
    path: tuple[str, ...]
    start: int
    stop: int

    @property
    def label(self) -> str:
        """The path as people write it, for example "gb200/block-1/rack-3"."""
        return "/".join(self.path)

    @property
    def indices(self) -> range:
        """Indices of the nodes below this domain, in topology order."""
        return range(self.start, self.stop)


@dataclass(frozen=True, eq=False)
class Topology:
    """A checked tree; build it with `build_topology`.

    Arrays: N nodes in topology order, L levels tightest first (levels[0] is "node", levels[-1] is "cluster").
    """

    name: str
    levels: tuple[str, ...]
    nodes: tuple[Node, ...]
    capacity_NR: Ints
    """GPUs, thousandths of a CPU, bytes of memory per node."""

    domain_LN: Ints
    """Index of each node's domain per level; NO_DOMAIN where it has none."""

    domains_by_level: tuple[tuple[Domain, ...], ...]

    @property
    def num_nodes(self) -> int:
        """N."""
        return len(self.nodes)

    @cached_property
    def _index(self) -> dict[str, int]:
        return {node.name: index for index, node in enumerate(self.nodes)}

    @cached_property
    def starts(self) -> tuple[Ints, ...]:
        """First node index of every domain, per level."""
        return tuple(np.array([d.start for d in domains], dtype=np.int64) for domains in self.domains_by_level)

    @cached_property
    def stops(self) -> tuple[Ints, ...]:
        """Node index behind the last one of every domain, per level."""
        return tuple(np.array([d.stop for d in domains], dtype=np.int64) for domains in self.domains_by_level)

    def tightness(self, level: str) -> int:
        """Position of a level, 0 = node. Raises UnknownLevel."""
        try:
            return self.levels.index(level)
        except ValueError:
            known = ", ".join(self.levels)
            raise UnknownLevel("level", level, f"the topology has no such level; it has {known}") from None

    def domains(self, level: str) -> tuple[Domain, ...]:
        """All domains of a level, in topology order. Raises UnknownLevel."""
        return self.domains_by_level[self.tightness(level)]

    def index_of(self, node: str) -> int:
        """Index of a node by name; LookupError when the topology has none of that name."""
        return self._index[node]

    def __contains__(self, node: object) -> bool:
        return node in self._index

    def sums(self, values_N: Ints, level: int) -> Ints:
        """Sum of a per-node figure over every domain of a level (position, 0 = node)."""
        running = np.concatenate(([0], np.cumsum(values_N)))
        return running[self.stops[level]] - running[self.starts[level]]

    def domain_of(self, level: str, node: int) -> Domain | None:
        """The domain of a node index at a level."""
        position = self.tightness(level)
        index = int(self.domain_LN[position, node])
        return None if index == NO_DOMAIN else self.domains_by_level[position][index]

    def path(self, node: int) -> str:
        """Full path of a node index."""
        return self.domains_by_level[0][node].label


def build_topology(name: str, nodes: Sequence[Node], levels: Sequence[str] = DEFAULT_LEVELS) -> Topology:
    """Sorts the nodes into a tree; domains and nodes keep the order in which they first appear.

    Args:
        name: the cluster's name, root of every path.
        nodes: all nodes, names unique.
        levels: named levels between node and cluster, tightest first; levels that no node is labelled with are dropped.

    Raises:
        InvalidTopology: no node, a name twice, a label of an unknown level, an amount below zero, or a domain that
            would contain itself (a level named twice).
    """
    _check(name, nodes, levels)
    used = [level for level in levels if any(level in node.labels for node in nodes)]
    outer_first = list(reversed(used))
    order = _order(nodes, outer_first)
    placed = [nodes[index] for index in order]
    all_levels = (NODE, *used, CLUSTER)
    domain_LN = np.full((len(all_levels), len(placed)), NO_DOMAIN, dtype=np.int64)
    by_level: list[tuple[Domain, ...]] = []
    for position, level in enumerate(all_levels):
        by_level.append(_level_domains(name, level, outer_first, placed, domain_LN[position]))
    capacity_NR = np.array([node.resources.row for node in placed], dtype=np.int64).reshape(len(placed), 3)
    return Topology(name, all_levels, tuple(placed), capacity_NR, domain_LN, tuple(by_level))


def _check(name: str, nodes: Sequence[Node], levels: Sequence[str]) -> None:
    if not name:
        raise InvalidTopology("name", name, "a cluster has a name")
    if not nodes:
        raise InvalidTopology("nodes", [], f"cluster {name!r} is empty; give it at least one node")
    for level in levels:
        if level in (NODE, CLUSTER) or list(levels).count(level) > 1:
            raise InvalidTopology("levels", level, "level names are unique, 'node' and 'cluster' are there already")
    seen: set[str] = set()
    for node in nodes:
        if node.name in seen:
            raise InvalidTopology("node", node.name, "is there twice; node names are unique")
        seen.add(node.name)
        if min(node.resources.row) < 0:
            raise InvalidTopology(f"node {node.name}", node.resources, "an amount is below zero")
        for level, domain in node.labels.items():
            if level not in levels:
                raise InvalidTopology(f"node {node.name}", level, f"is not a level; levels are {', '.join(levels)}")
            if not domain:
                raise InvalidTopology(f"node {node.name}.{level}", domain, "is empty; leave the label out instead")


def _order(nodes: Sequence[Node], outer_first: Sequence[str]) -> list[int]:
    """Indices in topology order: domains by first appearance, unlabelled nodes behind the labelled ones."""
    first_seen: dict[tuple[str | None, ...], int] = {}
    keys: list[tuple[int, ...]] = []
    for index, node in enumerate(nodes):
        path = tuple(node.labels.get(level) for level in outer_first)
        key: list[int] = []
        for depth in range(len(path)):
            rank = first_seen.setdefault(path[: depth + 1], index)
            key.append(rank if path[depth] is not None else len(nodes))
        keys.append((*key, index))
    return sorted(range(len(nodes)), key=lambda index: keys[index])


def _level_domains(
    name: str, level: str, outer_first: Sequence[str], placed: Sequence[Node], domain_N: Ints
) -> tuple[Domain, ...]:
    """The domains of one level over nodes in topology order; fills `domain_N` with their indices."""
    depth = len(outer_first) if level == NODE else 0 if level == CLUSTER else outer_first.index(level) + 1
    domains: list[Domain] = []
    start = 0
    path: tuple[str, ...] | None = None
    for index in range(len(placed) + 1):
        here = _path_at(name, level, outer_first[:depth], placed[index]) if index < len(placed) else None
        if here != path or (level == NODE and index > 0):
            if path is not None:
                domains.append(Domain(level, len(domains), path, start, index))
                domain_N[start:index] = len(domains) - 1
            start, path = index, here
    return tuple(domains)


def _path_at(name: str, level: str, outer: Sequence[str], node: Node) -> tuple[str, ...] | None:
    """Path of the node's domain at a level; None when the node has no label there. A missing outer label is left out
    of the path of a node or of an inner domain."""
    if level == NODE:
        return (name, *(node.labels[each] for each in outer if each in node.labels), node.name)
    if level != CLUSTER and level not in node.labels:
        return None
    return (name, *(node.labels[each] for each in outer if each in node.labels))
