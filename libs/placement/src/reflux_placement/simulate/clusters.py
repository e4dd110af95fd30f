"""Owns clusters that are described by a rule instead of a list: even grids of racks, and node lists without racks."""

from collections.abc import Sequence
from dataclasses import dataclass

from reflux_placement.topology import Node, Resources, Topology, build_topology

GIB = 1 << 30
TRAY = Resources(gpus=4, millicpus=144_000, memory_bytes=960 * GIB)
"""One compute tray of a GB200 NVL72 rack: 4 GPUs, 2 Grace CPUs of 72 cores."""

NODES_PER_RACK, RACKS_PER_BLOCK = 18, 8
"""An NVL72 rack has 18 trays; a scalable unit has 8 racks."""


def grid(
    name: str, *, racks: int, nodes_per_rack: int = NODES_PER_RACK, racks_per_block: int = RACKS_PER_BLOCK,
    each: Resources = TRAY,
) -> Topology:  # fmt: skip
    """An even cluster: racks of equal nodes, blocks of `racks_per_block` racks (the last one may be smaller)."""
    nodes = [
        Node(
            f"n{rack * nodes_per_rack + tray + 1:06d}",
            each,
            {"rack": f"rack-{rack + 1}", "block": f"block-{rack // racks_per_block + 1}"},
        )
        for rack in range(racks)
        for tray in range(nodes_per_rack)
    ]
    return build_topology(name, nodes)


@dataclass(frozen=True, slots=True)
class ListedNode:
    """A node of a list that says nothing about racks."""

    name: str
    model: str
    resources: Resources


def racked(name: str, nodes: Sequence[ListedNode], *, nodes_per_rack: int, racks_per_block: int) -> Topology:
    """Gives listed nodes a synthetic topology: sorted by GPUs (most first) and model, so that a rack holds equal nodes
    as real ones do, then cut into racks and blocks. A rack never mixes models; its last one may be smaller."""
    kinds: dict[tuple[int, str], list[ListedNode]] = {}
    for node in nodes:
        kinds.setdefault((-node.resources.gpus, node.model), []).append(node)
    placed: list[Node] = []
    rack = 0
    for kind in sorted(kinds):
        for start in range(0, len(kinds[kind]), nodes_per_rack):
            labels = {"rack": f"rack-{rack + 1}", "block": f"block-{rack // racks_per_block + 1}"}
            placed += [Node(each.name, each.resources, labels) for each in kinds[kind][start : start + nodes_per_rack]]
            rack += 1
    return build_topology(name, placed)
