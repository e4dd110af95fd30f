"""Owns how labels of nodes (Kubernetes, Ray) become a topology: which label key names the domain of which level."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from reflux_placement.errors import InvalidTopology
from reflux_placement.topology import CLUSTER, NODE, Node, Resources, Topology, build_topology

LevelKeys = Mapping[str, Sequence[str]]
"""Label keys per level; levels tightest first, keys most trusted first."""

NVLINK_CLIQUE = "nvidia.com/gpu.clique"
"""Written by NVIDIA's GPU feature discovery as "{ClusterUUID}.{CliqueID}", once the node's fabric manager is done."""

KUBERNETES_LEVEL_KEYS: LevelKeys = {
    "rack": (
        NVLINK_CLIQUE,
        "accelerator.topograph.run/domain",  # topograph >= 1.0
        "network.topology.nvidia.com/accelerator",  # topograph <= 0.5
        "ds.coreweave.com/nvlink.domain",
        "topology.k8s.aws/ultraserver-id",
        "cloud.provider.com/topology-rack",
    ),
    "block": (
        "cloud.provider.com/topology-block",
        "fabric.topograph.run/tier-0",
        "network.topology.nvidia.com/leaf",
        "topology.k8s.aws/capacity-block-id",
    ),
    "zone": ("topology.kubernetes.io/zone", "fabric.topograph.run/tier-1", "network.topology.nvidia.com/spine"),
}
"""Where a network tier is narrower than a rack, a setting has to name other keys: racks lie inside blocks."""

RAY_LEVEL_KEYS: LevelKeys = {
    "rack": ("ray.io/gpu-domain", *KUBERNETES_LEVEL_KEYS["rack"]),
    "block": KUBERNETES_LEVEL_KEYS["block"],
    "zone": ("ray.io/availability-zone", *KUBERNETES_LEVEL_KEYS["zone"]),
}
"""Ray writes none of these by itself: `ray start --labels`."""

_NO_NAME = frozenset({"", "n/a", "[n/a]", "none", "unknown"})
_FABRIC = re.compile(r"(?P<cluster>[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12})\.(?P<clique>(0x)?[0-9a-f]+)", re.ASCII)
_NO_FABRIC = "00000000-0000-0000-0000-000000000000"
_DIGITS = re.compile(r"(\d+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class LabelledNode:
    """A node as its cluster describes it."""

    name: str
    resources: Resources
    labels: Mapping[str, str] = field(default_factory=dict)


def topology_from_labels(
    name: str, nodes: Sequence[LabelledNode], level_keys: LevelKeys = KUBERNETES_LEVEL_KEYS
) -> Topology:
    """Builds the tree from node labels; nodes and domains are in the natural order of node names (gb-2 before gb-10).

    At each level a node takes the first of the level's keys that it carries. It belongs to no domain there when it
    carries none, or when it lacks a key that other nodes of the same domain have: its fabric is not up (yet), and a
    constraint on that level must not be satisfied by it. A domain's id is its path, so one rack label in two blocks
    makes two racks.

    Raises:
        InvalidTopology: no node, a node name twice, a level called "node" or "cluster", a level without a key.
    """
    for level, keys in level_keys.items():
        if level in (NODE, CLUSTER) or not keys:
            raise InvalidTopology("level_keys", level, "give a level of your own and at least one label key for it")
    ordered = sorted(nodes, key=lambda node: natural_key(node.name))
    labels: list[dict[str, str]] = [{} for _ in ordered]
    for level, keys in level_keys.items():
        for mine, domain in zip(labels, _domains(ordered, keys), strict=True):
            if domain:
                mine[level] = domain
    placed = [Node(node.name, node.resources, mine) for node, mine in zip(ordered, labels, strict=True)]
    return build_topology(name, placed, tuple(level_keys))


def natural_key(text: str) -> tuple[tuple[int, int | str], ...]:
    """Sorts runs of digits by value: node-2 before node-10."""
    parts = _DIGITS.split(text)
    return (*((0, int(part)) if part.isdigit() else (1, part) for part in parts if part), (2, text))


def domain_name(value: str) -> str:
    """The domain that a label value names, "" for none.

    Clique ids can be decimal or hexadecimal, so they are compared as text without case, never as numbers. The cluster
    UUID 0 is what a node without a multi-node fabric reports; "N/A" is what nvidia-smi prints before it is up.
    """
    value = value.strip()
    if value.lower() in _NO_NAME:
        return ""
    fabric = _FABRIC.fullmatch(value.lower())
    if fabric is None:
        return value
    return "" if fabric["cluster"] == _NO_FABRIC else fabric[0]


def _domains(nodes: Sequence[LabelledNode], keys: Sequence[str]) -> list[str]:
    """Domain name of every node at the level of these keys."""
    found: list[tuple[str, str]] = [("", "")] * len(nodes)
    covered: set[tuple[str, str]] = set()
    """Domains of a less trusted key that hold a node with a more trusted one."""
    for index, node in enumerate(nodes):
        named = [(key, name) for key in keys if (name := domain_name(node.labels.get(key, "")))]
        if named:
            found[index] = named[0]
            covered.update(named[1:])
    keys_of: dict[str, set[str]] = {}
    for key, name in found:
        keys_of.setdefault(name, set()).add(key)
    # Two keys may use the same name (often a small number) for different domains.
    qualified = {name: len(users) > 1 for name, users in keys_of.items()}
    return [
        "" if (key, name) in covered else f"{name}@{key.rpartition('/')[2]}" if qualified[name] else name
        for key, name in found
    ]
