"""Golden vectors of other schedulers' placement rules, and how many of them our versions of the rules fail.

Sources: Kueue's topology-aware scheduling (KEP-2724, its documentation and unit tests), KAI's topology plug-in,
Slurm's block topology and topograph's BlockSizes. A vector gives the free pods of every host, racks as inner lists,
and the pods that each host gets. The last line of output is JSON.
"""

import json
from dataclasses import dataclass

import numpy as np

from reflux_placement.gang import Assignment, GangDemand, RoleDemand
from reflux_placement.place.rules.balanced import kueue_balanced
from reflux_placement.place.rules.base import Rule
from reflux_placement.place.rules.kai import kai
from reflux_placement.place.rules.kueue import kueue_best_fit, kueue_layers, kueue_least_free
from reflux_placement.place.rules.slurm import aggregation_level, block_sizes, nested_block_sizes, slurm_block
from reflux_placement.place.search import find_place
from reflux_placement.room import Room
from reflux_placement.topology import Node, Resources, build_topology


@dataclass(frozen=True, kw_only=True)
class Vector:
    """Blocks of racks of hosts with their free pods; `expected` pods per host, flat."""

    name: str
    rules: tuple[Rule, ...]
    free: list[list[list[int]]]
    pods: int
    expected: list[int]
    slice_size: int = 0
    slice_level: str = "node"
    preferred: str = ""
    sorted_only: bool = False
    """Which of two equal hosts gets what is open: the counts are compared without order."""


def find_place_rule(room: Room, gang: GangDemand) -> Assignment | object:
    """Our own search, for vectors about compactness that it shares."""
    return find_place(room, gang)


OURS: Rule = find_place_rule  # pyright: ignore[reportAssignmentType]

VECTORS = (
    Vector(
        name="BestFit, the last host is the tightest that holds the rest",
        rules=(kueue_best_fit, OURS), free=[[[3, 3, 2, 1]]], pods=7, expected=[3, 3, 0, 1],
    ),
    Vector(
        name="LeastFreeCapacity",
        rules=(kueue_least_free,), free=[[[1, 2, 3, 3]]], pods=7, expected=[1, 1, 2, 3], sorted_only=True,
    ),
    Vector(
        name="BestFit with slices of 2 per host",
        rules=(kueue_best_fit,), free=[[[6, 5, 4, 3, 2]]], pods=12, slice_size=2, expected=[6, 0, 4, 0, 2],
    ),
    Vector(
        name="LeastFreeCapacity with slices of 2 per host",
        rules=(kueue_least_free,), free=[[[6, 5, 4, 3, 2]]], pods=10, slice_size=2, expected=[0, 2, 4, 2, 2],
    ),
    Vector(
        name="slices of 16 per rack inside slices of 32 per block fill a block of two racks",
        rules=(kueue_layers([(16, "rack")]),), free=[[[8] * 4, [8] * 4]], pods=64, slice_size=32, slice_level="block",
        expected=[8] * 8,
    ),
    Vector(
        name="slices of 16 per rack fill a block of two racks",
        rules=(kueue_best_fit, OURS), free=[[[8] * 4, [8] * 4]], pods=64, slice_size=16, slice_level="rack",
        expected=[8] * 8,
    ),
    Vector(
        name="Balanced over two racks",
        rules=(kueue_balanced,), free=[[[15], [15]]], pods=25, preferred="rack", expected=[13, 12],
    ),
    Vector(
        name="Balanced over the fewest hosts of a rack",
        rules=(kueue_balanced,), free=[[[15, 13, 10]]], pods=23, preferred="rack", expected=[12, 11, 0],
    ),
    Vector(
        name="Balanced takes the rack whose hosts share evenly",
        rules=(kueue_balanced,), free=[[[20, 10], [15, 15]]], pods=22, preferred="rack", expected=[0, 0, 11, 11],
    ),
    Vector(
        name="Balanced on one host where one suffices",
        rules=(kueue_balanced,), free=[[[20, 10], [15, 15]]], pods=20, preferred="rack", expected=[20, 0, 0, 0],
    ),
    Vector(
        name="Balanced takes the most even of equal thresholds",
        rules=(kueue_balanced,), free=[[[10, 5], [5, 5, 5]]], pods=15, preferred="rack", expected=[0, 0, 5, 5, 5],
    ),
    Vector(
        name="Balanced prefers a rack that holds all over a block that does",
        rules=(kueue_balanced,), free=[[[15], [15]], [[15, 15]]], pods=25, preferred="rack", expected=[0, 0, 13, 12],
    ),
    Vector(
        name="Balanced in slices of 5",
        rules=(kueue_balanced,), free=[[[15], [15], [15, 15]]], pods=25, slice_size=5, preferred="rack",
        expected=[0, 0, 15, 10],
    ),
    Vector(
        name="KAI: the tightest zone, in it the racks with most room",
        rules=(kai, OURS), free=[[[2], [1], [1], [1]], [[2], [2], [2]]], pods=3, preferred="block",
        expected=[2, 1, 0, 0, 0, 0, 0],
    ),
    Vector(
        name="Slurm: smallest sufficient aggregated block",
        rules=(slurm_block,), free=[[[1] * 4, [1, 1, 1, 0], [1] * 4, [1] * 4]], pods=7,
        expected=[1] * 4 + [1, 1, 1, 0] + [0] * 8,
    ),
    Vector(
        name="Slurm: the last base block is a best fit",
        rules=(slurm_block,), free=[[[1] * 4, [1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0]]], pods=9,
        expected=[1] * 4 + [1, 1, 1, 0] + [0] * 4 + [1, 1, 0, 0],
    ),
    Vector(
        name="Slurm: every segment in a base block, the tightest first",
        rules=(slurm_block,), free=[[[1] * 4, [1, 1, 0, 0], [1, 1, 1, 0]]], pods=4, slice_size=2, slice_level="rack",
        expected=[0, 0, 0, 0, 1, 1, 0, 0, 1, 1, 0, 0],
    ),
)  # fmt: skip


def solve(vector: Vector, rule: Rule) -> list[int] | None:
    """Pods per host as a rule places them; None for a misfit."""
    nodes = [
        Node(f"h{b}-{r}-{i}", Resources(gpus=max(pods, 1)), {"block": f"b{b}", "rack": f"r{r}"})
        for b, racks in enumerate(vector.free)
        for r, hosts in enumerate(racks)
        for i, pods in enumerate(hosts)
    ]
    room = Room(build_topology("golden", nodes))
    full = [host for racks in vector.free for hosts in racks for host in hosts]
    room.open_N[:] = [pods > 0 for pods in full]
    role = RoleDemand(
        role="pod", count=vector.pods, each=Resources(gpus=1), segment_size=vector.slice_size,
        segment_level=vector.slice_level, preferred_level=vector.preferred,
    )  # fmt: skip
    answer = rule(room, GangDemand(roles=(role,)))
    return np.bincount(answer.nodes["pod"], minlength=len(full)).tolist() if isinstance(answer, Assignment) else None


def failures() -> list[str]:
    """Every vector that a rule fails, with what came out instead."""
    found: list[str] = []
    for vector in VECTORS:
        for rule in vector.rules:
            got = solve(vector, rule)
            same = got is not None and (
                sorted(got) == sorted(vector.expected) if vector.sorted_only else got == vector.expected
            )
            if not same:
                found.append(f"{vector.name} ({getattr(rule, '__name__', rule)}): {got}, not {vector.expected}")
    for got, expected in (
        (block_sizes(8, 4), [8, 16, 32]),
        (nested_block_sizes([9, 135]), [9, 144]),
        ([aggregation_level(nodes, 18) for nodes in (1, 18, 19, 36, 37, 72, 73, 144)], [0, 0, 1, 1, 2, 2, 3, 3]),
    ):
        if got != expected:
            found.append(f"block sizes: {got}, not {expected}")
    return found


def golden_failed() -> int:
    """How many golden vectors fail; the bar is 0."""
    return len(failures())


if __name__ == "__main__":
    print("\n".join(failures()) or f"all {len(VECTORS)} golden vectors hold")
    print(json.dumps({"golden_failed": golden_failed()}))
