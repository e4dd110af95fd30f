"""Owns the measure of fragmentation: free GPUs that the usual requests cannot use.

After FGD (Weng et al., ATC'23, "Beware of Fragmentation"), carried from single tasks to gangs: for a request class m
that comes with share p_m, usable_m is the number of free GPUs that gangs of class m could take if as many as possible
were placed, each inside the tightest level whose empty domains could hold it. F = sum_m p_m * (free - usable_m).
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from reflux_placement.gang import GangDemand
from reflux_placement.topology import UNLIMITED, Ints, Resources, Topology

MAX_CLASSES = 24


@dataclass(frozen=True, slots=True)
class RequestClass:
    """Requests of one shape: `count` members of size `each` that stay together (a segment, or a whole role), rounded up
    to a power of two."""

    each: Resources
    count: int
    share: float
    level: int
    """Tightest level with a domain that holds such a gang when empty."""


def slots(free_NR: Ints, each: Resources) -> Ints:
    """How many members of a size each node holds: the least over the resources of floor(free / each)."""
    parts = [free_NR[:, column] // amount for column, amount in enumerate(each.row) if amount]
    slots_N = np.minimum.reduce(parts) if parts else np.full(len(free_NR), UNLIMITED)
    return np.maximum(slots_N, 0)


def request_mix(topology: Topology, gangs: Iterable[GangDemand]) -> tuple[RequestClass, ...]:
    """The most frequent shapes among the roles with GPUs, as shares that sum to 1."""
    shapes: Counter[tuple[int, int]] = Counter()
    amounts: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for gang in gangs:
        for role in gang.roles:
            if role.each.gpus and role.count:
                together = role.segment_size or role.count
                shape = (role.each.gpus, 1 << (together - 1).bit_length())
                shapes[shape] += 1
                amounts.setdefault(shape, []).append(role.each.row)
    common = shapes.most_common(MAX_CLASSES)
    total = sum(times for _, times in common)
    mix = []
    for shape, times in common:
        _, millicpus, memory = np.median(np.array(amounts[shape]), axis=0).astype(int).tolist()
        each = Resources(shape[0], millicpus, memory)
        slots_N = slots(topology.capacity_NR, each)
        fits = [at for at in range(len(topology.levels)) if topology.sums(slots_N, at).max(initial=0) >= shape[1]]
        mix.append(RequestClass(each, shape[1], times / total, fits[0] if fits else len(topology.levels) - 1))
    return tuple(mix)


def fragmented_gpus(topology: Topology, usable_NR: Ints, mix: tuple[RequestClass, ...]) -> float:
    """F of the module's formula, in GPUs. `usable_NR` is Room.usable_NR(): -1 where a node takes no work."""
    free = float(np.maximum(usable_NR[:, 0], 0).sum())
    lost, known = 0.0, {}
    for each in mix:
        if each.each not in known:
            known[each.each] = slots(usable_NR, each.each)
        gangs = topology.sums(known[each.each], each.level) // each.count
        lost += each.share * (free - float(gangs.sum()) * each.count * each.each.gpus)
    return lost
