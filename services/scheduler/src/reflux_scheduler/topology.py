"""The tree cluster > block > rack (one NVLink domain) > node > GPU, as frozen values in topology order.

Every domain is a contiguous range of node indices, because nodes are numbered in the order of the tree. The id of a
domain is its path: two racks in different blocks may carry the same name.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from reflux_scheduler.errors import InvalidTopology

Level = Literal["node", "rack", "block", "cluster"]
LEVELS: tuple[Level, ...] = get_args(Level)
"""Levels, tightest first."""

UNLIMITED = 1 << 40
"""How often a demand of nothing fits anywhere."""


def tightness(level: Level) -> int:
    """Position of a level, 0 = tightest (node)."""
    return LEVELS.index(level)


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
        """Whether `room` holds this amount; a demand of nothing fits wherever work may go."""
        return self.copies_in(room) > 0

    def copies_in(self, room: "Resources") -> int:
        """Members of this size that `room` holds; UNLIMITED when they ask for nothing, 0 where it is UNAVAILABLE."""
        if room.gpus < 0:
            return 0
        copies = UNLIMITED
        if self.gpus:
            copies = min(copies, room.gpus // self.gpus)
        if self.millicpus:
            copies = min(copies, room.millicpus // self.millicpus)
        if self.memory_bytes:
            copies = min(copies, room.memory_bytes // self.memory_bytes)
        return copies


NOTHING = Resources()
UNAVAILABLE = Resources(-1, -1, -1)
"""Room of a node that takes no work; not even a member that asks for nothing fits."""


@dataclass(frozen=True, slots=True)
class Node:
    """One machine (a compute tray of an NVL72 rack, or this computer)."""

    name: str
    resources: Resources


@dataclass(frozen=True)
class Domain:
    """A part of the tree: the node indices `start` (included) to `stop` (excluded)."""

    level: Level
    path: tuple[str, ...]
    start: int
    stop: int
    children: tuple["Domain", ...] = ()

    @property
    def label(self) -> str:
        """The path as people write it."""
        return "/".join(self.path)

    @property
    def indices(self) -> range:
        """Indices of the nodes below this domain, in topology order."""
        return range(self.start, self.stop)


@dataclass(frozen=True)
class Topology:
    """A checked tree; build it with `TopologyBuilder`."""

    cluster: Domain
    nodes: tuple[Node, ...]

    @cached_property
    def _by_level(self) -> dict[Level, tuple[Domain, ...]]:
        found: dict[Level, list[Domain]] = {level: [] for level in LEVELS}
        for domain in _walk(self.cluster):
            found[domain.level].append(domain)
        return {level: tuple(domains) for level, domains in found.items()}

    @cached_property
    def _index(self) -> dict[str, int]:
        return {node.name: index for index, node in enumerate(self.nodes)}

    def domains(self, level: Level) -> tuple[Domain, ...]:
        """All domains of a level, in topology order."""
        return self._by_level[level]

    def index_of(self, node: str) -> int:
        """Index of a node; LookupError when the topology has no node of that name."""
        return self._index[node]

    def __contains__(self, node: object) -> bool:
        return node in self._index

    @cached_property
    def totals(self) -> tuple[Resources, ...]:
        """What each node has when nobody uses it."""
        return tuple(node.resources for node in self.nodes)


def _walk(domain: Domain) -> Iterator[Domain]:
    yield domain
    for child in domain.children:
        yield from _walk(child)


def total(rooms: Sequence[Resources], domain: Domain) -> Resources:
    """Sum of per-node amounts over the nodes of a domain that take work."""
    gpus = millicpus = memory_bytes = 0
    for index in domain.indices:
        room = rooms[index]
        if room.gpus >= 0:
            gpus += room.gpus
            millicpus += room.millicpus
            memory_bytes += room.memory_bytes
    return Resources(gpus, millicpus, memory_bytes)


class TopologyBuilder:
    """Collects blocks, racks and nodes in order and refuses what breaks the tree (InvalidTopology)."""

    def __init__(self, cluster: str) -> None:
        self._cluster = cluster
        self._tree: dict[str, dict[str, list[Node]]] = {}
        self._seen: dict[str, str] = {}

    def add_rack(self, block: str, rack: str, nodes: Sequence[Node]) -> None:
        """Adds one rack; its block is made when it is new."""
        racks = self._tree.setdefault(block, {})
        if rack in racks:
            raise InvalidTopology("rack", rack, f"block {block!r} has a rack of that name already")
        if not nodes:
            raise InvalidTopology("nodes", [], f"rack {block}/{rack} is empty; give it at least one node")
        for node in nodes:
            if node.name in self._seen:
                raise InvalidTopology(
                    "node", node.name, f"is in rack {self._seen[node.name]} already; node names are unique"
                )
            self._seen[node.name] = f"{block}/{rack}"
        racks[rack] = list(nodes)

    def build(self) -> Topology:
        """The finished tree."""
        nodes: list[Node] = []
        blocks: list[Domain] = []
        for block, racks in self._tree.items():
            first = len(nodes)
            children = tuple(self._rack((self._cluster, block, rack), held, nodes) for rack, held in racks.items())
            blocks.append(Domain("block", (self._cluster, block), first, len(nodes), children))
        if not blocks:
            raise InvalidTopology("block", [], f"cluster {self._cluster!r} is empty; give it at least one block")
        return Topology(Domain("cluster", (self._cluster,), 0, len(nodes), tuple(blocks)), tuple(nodes))

    @staticmethod
    def _rack(path: tuple[str, ...], held: Sequence[Node], nodes: list[Node]) -> Domain:
        first = len(nodes)
        nodes.extend(held)
        leaves = tuple(
            Domain("node", (*path, node.name), index, index + 1) for index, node in enumerate(held, start=first)
        )
        return Domain("rack", path, first, len(nodes), leaves)
