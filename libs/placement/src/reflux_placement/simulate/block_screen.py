"""Owns a quick proof that Slurm's block rule refuses a gang, from sums over racks; it saves calls and changes none.

`place/rules/slurm.py` asks for one aggregated block: 2^w neighbouring racks, w = ceil(log2(ceil(N / B))) for N nodes on
racks of B nodes. Here the most members that any aggregated block of each size holds are worked out once per member
size, and a gang of one plain role is compared with them. A gang that passes may still be refused by the rule.
"""

import math
from collections.abc import Callable

import numpy as np

from reflux_placement.place.rules.slurm import aggregation_level
from reflux_placement.topology import NO_DOMAIN, Ints, Topology

Check = Callable[[int], bool]
"""Whether a gang of so many members could fit; False is a proof that it does not."""

_RACK, _BLOCK = 1, 2


def block_screen(topology: Topology, copies_N: Ints) -> Check | None:
    """The check for members of which node n holds copies_N[n] now. None if the topology is not plainly nodes in racks
    in blocks: then the rule itself has to say."""
    if len(topology.levels) != 4 or (topology.domain_LN[_RACK : _BLOCK + 1] == NO_DOMAIN).any():
        return None
    views = [_View(topology, copies_N, block) for block in range(len(topology.domains_by_level[_BLOCK]))]
    most_in_rack = max(view.most_by_level[0] for view in views)
    per_node, size = max(view.per_node for view in views), max(view.size for view in views)
    largest, total = max(view.largest for view in views), int(copies_N.sum())

    def check(count: int) -> bool:
        if most_in_rack >= count or any(view.could_hold(count) for view in views):
            return True
        wanted = aggregation_level(math.ceil(count / per_node), size)
        return total >= count if wanted > largest else any(view.most(wanted) >= count for view in views)

    return check


class _View:
    """One block: racks, and the most members in 2^w neighbouring racks for every w."""

    def __init__(self, topology: Topology, copies_N: Ints, block: int) -> None:
        first, last = int(topology.starts[_BLOCK][block]), int(topology.stops[_BLOCK][block])
        low, high = (int(topology.domain_LN[_RACK, node]) for node in (first, last - 1))
        starts_P = topology.starts[_RACK][low : high + 1]
        held_P = np.add.reduceat(copies_N[first:last], starts_P - first)
        self.per_node = max(1, int(copies_N[first:last].max()))
        self.size = int((topology.stops[_RACK][low : high + 1] - starts_P).max())
        self.largest = math.ceil(math.log2(len(held_P)))
        self.most_by_level = [
            int(np.add.reduceat(held_P, np.arange(0, len(held_P), 1 << level)).max())
            for level in range(self.largest + 1)
        ]

    def most(self, wanted: int) -> int:
        """Members in the best aggregated block of 2^wanted racks, at most the whole block."""
        return self.most_by_level[min(wanted, self.largest)]

    def could_hold(self, count: int) -> bool:
        """Whether the rule finds an aggregated block inside this block."""
        return self.most(aggregation_level(math.ceil(count / self.per_node), self.size)) >= count
