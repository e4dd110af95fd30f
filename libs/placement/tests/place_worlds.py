"""Clusters and gangs for the tests of placement: named builders, random small ones, and a search by brute force."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np

from reflux_placement.gang import Assignment, GangDemand, Relation, RoleDemand
from reflux_placement.place.check import broken
from reflux_placement.room import Room
from reflux_placement.topology import CLUSTER, Node, Resources, Topology, build_topology

GIB = 1 << 30
T = TypeVar("T")


def tray(name: str, rack: str = "", block: str = "", gpus: int = 4, cpus: int = 16) -> Node:
    labels = {level: label for level, label in (("rack", rack), ("block", block)) if label}
    return Node(name, Resources(gpus=gpus, millicpus=cpus * 1000, memory_bytes=cpus * GIB), labels)


def cluster(blocks: list[list[int]], gpus: int = 4) -> Topology:
    """blocks[b][r] trays in rack r of block b."""
    nodes = [
        tray(f"b{b}r{r}n{i}", f"r{r}", f"b{b}", gpus)
        for b, racks in enumerate(blocks)
        for r, count in enumerate(racks)
        for i in range(count)
    ]
    return build_topology("gb", nodes)


def room_with(topology: Topology, free_gpus: list[int]) -> Room:
    """A room in which node i has this many GPUs left; the rest is held by job "other"."""
    room = Room(topology)
    held = topology.capacity_NR[:, 0] - np.array(free_gpus)
    each = RoleDemand(role="busy", count=int(held.sum()), each=Resources(gpus=1))
    if each.count:
        ranks = np.repeat(np.arange(topology.num_nodes), held)
        room.take("other", GangDemand(roles=(each,)), Assignment("cluster", 0, {"busy": ranks}))
    return room


def role(name: str, count: int, gpus: int = 4, **more: object) -> RoleDemand:
    return RoleDemand(role=name, count=count, each=Resources(gpus=gpus), **more)  # pyright: ignore[reportArgumentType]


def gang(*roles: RoleDemand, **more: object) -> GangDemand:
    return GangDemand(roles=roles, **more)  # pyright: ignore[reportArgumentType]


def gpus_per_node(topology: Topology, demand: GangDemand, assignment: Assignment) -> list[int]:
    taken = np.zeros(topology.num_nodes, dtype=np.int64)
    for each in demand.roles:
        np.add.at(taken, assignment.nodes[each.role], each.each.gpus)
    return taken.tolist()


def random_world(seed: int) -> tuple[Room, GangDemand]:
    """At most four racks in two blocks, some nodes unlabelled or closed, random occupancy, one to three roles with
    constraints of every kind."""
    draw = Draw(seed)
    racks = [draw.between(1, 3) for _ in range(draw.between(1, 4))]
    nodes = [
        tray(f"n{r}-{i}", f"r{r}", "b0" if r < 2 else "b1", 2) for r, count in enumerate(racks) for i in range(count)
    ]
    nodes += [tray(f"u{i}", "", draw.one_of(["", "b0"]), draw.between(0, 2)) for i in range(draw.between(0, 2))]
    topology = build_topology("tiny", nodes)
    room = room_with(topology, [draw.between(0, int(most)) for most in topology.capacity_NR[:, 0]])
    for node in range(topology.num_nodes):
        if draw.between(0, 9) == 0:
            room.open_N[node] = False
    levels = [CLUSTER, *topology.levels[1:-1]]
    roles = tuple(draw.role(name, levels) for name in "abc"[: draw.between(1, 3)])
    relations = tuple(
        Relation(
            role=one.role,
            near=other.role,
            level=draw.one_of([*levels, "node"]),
            required=bool(draw.between(0, 1)),
            traffic=1e9,
        )
        for one, other in itertools.permutations(roles, 2)
        if draw.between(0, 4) == 0
    )
    return room, GangDemand(
        roles=roles,
        required_level=draw.one_of([CLUSTER, *levels]),
        preferred_level=draw.one_of(["", *levels]),
        relations=relations,
    )


class Draw:
    """Random choices from one seed."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def between(self, low: int, high: int) -> int:
        return int(self._rng.integers(low, high + 1))

    def one_of(self, choices: Sequence[T]) -> T:
        return choices[self.between(0, len(choices) - 1)]

    def role(self, name: str, levels: list[str]) -> RoleDemand:
        segment = self.one_of([0, 0, 2])
        bound = self.one_of([0, 0, 0, 1, 2])
        return RoleDemand(
            role=name,
            count=self.between(1 if name == "a" else 0, 2) * max(1, segment),
            each=Resources(gpus=self.between(0, 2), millicpus=self.one_of([1000, 8000])),
            required_level=self.one_of([CLUSTER, *levels]),
            preferred_level=self.one_of(["", *levels]),
            segment_size=segment,
            segment_level=self.one_of([*levels, "node"]),
            max_per_domain=bound,
            spread_level=self.one_of([*levels, "node"]) if bound else self.one_of(["", *levels]),
        )


def combinations(room: Room, demand: GangDemand) -> int:
    """How many ways a search by brute force would have to look at."""
    return math.prod(math.comb(room.topology.num_nodes + each.count - 1, each.count) for each in demand.roles)


def exists(room: Room, demand: GangDemand) -> bool:
    """Whether any way to put the gang on nodes keeps every demand: tries all of them, ranks in topology order."""
    counts = {each.role: each.count for each in demand.roles}
    free_NR = room.usable_NR()
    return any(
        broken(room.topology, free_NR, demand, Assignment("cluster", 0, nodes), counts) is None
        for nodes in _all(room, demand, 0, free_NR)
    )


def _all(room: Room, demand: GangDemand, index: int, free_NR: np.ndarray) -> Iterator[dict[str, np.ndarray]]:
    if index == len(demand.roles):
        yield {}
        return
    each = demand.roles[index]
    row = np.array(each.each.row)
    for ranks in itertools.combinations_with_replacement(range(room.topology.num_nodes), each.count):
        left = free_NR.copy()
        np.subtract.at(left, list(ranks), row)
        if (left[list(ranks)] >= 0).all():
            for rest in _all(room, demand, index + 1, left):
                yield {each.role: np.array(ranks, dtype=np.int64), **rest}


def counts_of(assignment: Assignment) -> Mapping[str, int]:
    return {name: len(ranks) for name, ranks in assignment.nodes.items()}
