"""Clusters and gangs for the tests of placement: named builders, random small ones, and a search by brute force."""

import itertools
from collections.abc import Iterator, Mapping

import numpy as np
from hypothesis import strategies as st

from reflux_placement.gang import Assignment, GangDemand, Relation, RoleDemand
from reflux_placement.place.check import broken
from reflux_placement.room import Room
from reflux_placement.topology import CLUSTER, Node, Resources, Topology, build_topology

GIB = 1 << 30


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


@st.composite
def small_worlds(draw: st.DrawFn, max_racks: int = 4, max_trays: int = 3) -> tuple[Room, GangDemand]:
    """At most `max_racks` racks in two blocks, some nodes unlabelled, random occupancy, one to three roles."""
    racks = draw(st.lists(st.integers(1, max_trays), min_size=1, max_size=max_racks))
    nodes = [
        tray(f"n{r}-{i}", f"r{r}", "b0" if r < 2 else "b1", 2) for r, count in enumerate(racks) for i in range(count)
    ]
    nodes += [tray(f"u{i}", "", "", draw(st.integers(0, 2))) for i in range(draw(st.integers(0, 2)))]
    topology = build_topology("tiny", nodes)
    free = [draw(st.integers(0, int(capacity))) for capacity in topology.capacity_NR[:, 0]]
    room = room_with(topology, free)
    for node in range(topology.num_nodes):
        if draw(st.integers(0, 9)) == 0:
            room.open_N[node] = False
    levels = [CLUSTER, *topology.levels[1:-1]]
    roles = []
    for name in ["a", "b", "c"][: draw(st.integers(1, 3))]:
        segment = draw(st.sampled_from([0, 0, 2]))
        cap = draw(st.sampled_from([0, 0, 0, 1, 2]))
        roles.append(
            RoleDemand(
                role=name,
                count=draw(st.integers(0 if name != "a" else 1, 2)) * max(1, segment),
                each=Resources(gpus=draw(st.integers(0, 2)), millicpus=draw(st.sampled_from([1000, 8000]))),
                required_level=draw(st.sampled_from([CLUSTER, *levels])),
                segment_size=segment,
                segment_level=draw(st.sampled_from(levels)),
                max_per_domain=cap,
                spread_level=draw(st.sampled_from([*levels, "node"])) if cap else draw(st.sampled_from(["", *levels])),
                preferred_level=draw(st.sampled_from(["", *levels])),
            )
        )
    relations = []
    for one, other in itertools.pairwise(roles):
        if draw(st.integers(0, 2)) == 0:
            level, hard = draw(st.sampled_from(levels)), draw(st.booleans())
            relations.append(Relation(role=other.role, near=one.role, level=level, required=hard, traffic=1e9))
    required = draw(st.sampled_from([CLUSTER, *levels]))
    preferred = draw(st.sampled_from(["", *levels]))
    return room, GangDemand(
        roles=tuple(roles), required_level=required, preferred_level=preferred, relations=tuple(relations)
    )


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
