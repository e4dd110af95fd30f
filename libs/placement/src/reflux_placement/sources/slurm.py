"""Owns the reading of Slurm's topology: topology.conf, topology.yaml, `scontrol show topology` (tree and block).

A tree's leaf switch becomes the tightest level, a block topology's base block (one NVLink domain) likewise; switches
above, or aggregated blocks, become the levels above it. References: man pages topology.conf and topology.yaml.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from reflux_placement.errors import InvalidTopology
from reflux_placement.sources.hostlist import compress
from reflux_placement.sources.slurm_nodes import NodeRecord, names_of, pairs
from reflux_placement.topology import DEFAULT_LEVELS, Node, Topology, build_topology

Labels = dict[str, dict[str, str]]
"""Per node: the name of its domain at each level."""


@dataclass(frozen=True, slots=True)
class Switch:
    """A switch of a tree with what hangs on it directly."""

    name: str
    nodes: tuple[str, ...] = ()
    children: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Blocks:
    """Base blocks in order, and the groups of base blocks per aggregated level, tightest first."""

    nodes: Mapping[str, tuple[str, ...]]
    groups: tuple[Mapping[str, tuple[str, ...]], ...] = ()
    """Per level: group name -> names of its base blocks."""


def slurm_topology(
    name: str,
    nodes: Sequence[NodeRecord],
    labels: Mapping[str, Mapping[str, str]],
    levels: Sequence[str] = DEFAULT_LEVELS,
    partition: str = "",
) -> Topology:
    """The nodes (of one partition) as a tree. Nodes without a label belong to no domain. Raises InvalidTopology."""
    used = [node for node in nodes if not partition or partition in node.partitions]
    if not used:
        raise InvalidTopology("partition", partition, "has no node in this cluster")
    found = [Node(node.name, node.capacity, labels.get(node.name, {})) for node in used]
    return build_topology(name, found, levels)


def parse_topology_text(text: str, levels: Sequence[str] = DEFAULT_LEVELS) -> Labels:
    """Labels of topology.conf or of what `scontrol show topology` prints; empty when the cluster has no topology.

    Raises:
        InvalidTopology: a cycle, an unknown switch, a node in two places, or more levels than there are names for.
    """
    switches: list[Switch] = []
    base: dict[str, tuple[str, ...]] = {}
    merged: list[tuple[int, tuple[str, ...]]] = []
    sizes: list[int] = []
    for line in _lines(text):
        fields = {key.lower(): value for key, value in pairs(line).items()}
        nodes = names_of(fields.get("nodes"))
        if "switchname" in fields:
            switches.append(Switch(fields["switchname"], nodes, names_of(fields.get("switches"))))
        elif "blockname" in fields:
            base[fields["blockname"]] = nodes
        elif "aggregatedblock" in fields:
            merged.append((int(fields.get("blocksize", "0")), names_of(fields["aggregatedblock"])))
        if "blocksizes" in fields:
            sizes = [int(size) for size in fields["blocksizes"].split(",")]
    if base:
        groups = _printed_groups(merged) if merged else _groups(tuple(base), sizes)
        return block_labels(Blocks(base, groups), levels)
    return tree_labels(switches, levels)


def parse_topology_yaml(document: Any, name: str = "", levels: Sequence[str] = DEFAULT_LEVELS) -> Labels:
    """Labels of a loaded topology.yaml: the topology called `name`, else the cluster's default, else the first."""
    entries = document if isinstance(document, list) else []
    known = [str(entry.get("topology", "")) for entry in entries]
    if name and name not in known:
        raise InvalidTopology("topology", name, f"topology.yaml has {', '.join(known) or 'none'}")
    chosen = [entry for entry in entries if entry.get("topology") == name]
    chosen += [entry for entry in entries if not name and entry.get("cluster_default")] + entries[:1]
    if not chosen:
        return {}
    entry = chosen[0]
    if "tree" in entry:
        listed = entry["tree"].get("switches") or ()
        return tree_labels(
            [Switch(str(s["switch"]), names_of(s.get("nodes")), names_of(s.get("children"))) for s in listed], levels
        )
    if "block" in entry:
        base = {str(block["block"]): names_of(block.get("nodes")) for block in entry["block"].get("blocks") or ()}
        sizes = [int(size) for size in entry["block"].get("block_sizes") or ()]
        return block_labels(Blocks(base, _groups(tuple(base), sizes)), levels)
    if entry.get("flat"):
        return {}
    kind = next((key for key in entry if key not in ("topology", "cluster_default")), "nothing")
    raise InvalidTopology("topology", kind, "is not supported; tree, block and flat are")


def tree_labels(switches: Sequence[Switch], levels: Sequence[str] = DEFAULT_LEVELS) -> Labels:
    """Labels of a tree of switches. The level of a switch is its height above its lowest leaf switch, as in Slurm."""
    by_name = {switch.name: switch for switch in switches}
    if len(by_name) != len(switches):
        raise InvalidTopology("SwitchName", [s.name for s in switches], "a switch is defined twice")
    heights: dict[str, int] = {}
    for switch in switches:
        _height(switch.name, by_name, heights, ())
    parents = _parents(switches)
    below = {switch.name: _nodes_below(switch, by_name) for switch in switches}
    _check_heights(heights, below, levels)
    labels: Labels = {}
    for switch in switches:
        inner = {node for child in switch.children for node in below[child]}
        for node in switch.nodes:
            if node in inner:
                continue  # `scontrol show topology` lists all nodes below a switch.
            if node in labels:
                raise InvalidTopology("Nodes", node, f"hangs on two switches, one is {switch.name}")
            labels[node] = _climb(switch.name, parents, heights, levels)
    return labels


def block_labels(blocks: Blocks, levels: Sequence[str] = DEFAULT_LEVELS) -> Labels:
    """Labels of a block topology: base block, then the aggregated blocks that hold it."""
    groups = blocks.groups
    if len(groups) >= len(levels) and len(groups[-1]) == 1:
        groups = groups[:-1]  # The whole cluster is a domain already.
    if len(groups) >= len(levels):
        raise InvalidTopology("BlockSizes", len(groups) + 1, f"has more levels than names: {', '.join(levels)}")
    labels: Labels = {}
    for name, nodes in blocks.nodes.items():
        domains = {levels[0]: name}
        for level, members in zip(levels[1:], groups, strict=False):
            domains.update((level, group) for group, bases in members.items() if name in bases)
        for node in nodes:
            if node in labels:
                raise InvalidTopology("Nodes", node, f"is in two blocks, one is {name}")
            labels[node] = dict(domains)
    return labels


def _lines(text: str) -> Iterable[str]:
    """Lines without comments; a backslash at the end joins two."""
    for line in text.replace("\\\n", " ").splitlines():
        line = line.partition("#")[0].strip()
        if line:
            yield line


def _groups(base: tuple[str, ...], sizes: Sequence[int]) -> tuple[Mapping[str, tuple[str, ...]], ...]:
    """Aggregated blocks are consecutive base blocks; sizes are node counts, each a multiple of the base size."""
    found: list[Mapping[str, tuple[str, ...]]] = []
    for smaller, size in pairwise(sizes):
        if smaller <= 0 or size <= smaller or size % sizes[0]:
            raise InvalidTopology("BlockSizes", list(sizes), "sizes grow, each a multiple of the base block's")
        step = size // sizes[0]
        parts = [base[start : start + step] for start in range(0, len(base), step)]
        found.append({compress(part): part for part in parts})
    return tuple(found)


def _printed_groups(merged: Sequence[tuple[int, tuple[str, ...]]]) -> tuple[Mapping[str, tuple[str, ...]], ...]:
    by_size: dict[int, dict[str, tuple[str, ...]]] = {}
    for size, bases in merged:
        by_size.setdefault(size, {})[compress(bases)] = bases
    return tuple(by_size[size] for size in sorted(by_size))


def _height(name: str, by_name: Mapping[str, Switch], heights: dict[str, int], path: tuple[str, ...]) -> int:
    if name in path:
        raise InvalidTopology("Switches", " > ".join((*path, name)), "a switch hangs below itself")
    if name not in by_name:
        raise InvalidTopology("Switches", name, f"is not defined, but {path[-1]} names it")
    if name not in heights:
        children = by_name[name].children
        heights[name] = 1 + max((_height(child, by_name, heights, (*path, name)) for child in children), default=-1)
    return heights[name]


def _parents(switches: Sequence[Switch]) -> dict[str, str]:
    parents: dict[str, str] = {}
    for switch in switches:
        for child in switch.children:
            if child in parents:
                raise InvalidTopology("Switches", child, f"hangs on two switches: {parents[child]} and {switch.name}")
            parents[child] = switch.name
    return parents


def _nodes_below(switch: Switch, by_name: Mapping[str, Switch]) -> set[str]:
    found = set(switch.nodes)
    for child in switch.children:
        found |= _nodes_below(by_name[child], by_name)
    return found


def _check_heights(heights: Mapping[str, int], below: Mapping[str, set[str]], levels: Sequence[str]) -> None:
    """A single root above the last named level is the cluster itself; any other switch up there has no name."""
    nameless = [name for name, height in heights.items() if height >= len(levels) and below[name]]
    if len(nameless) > 1:
        depth = max(heights.values()) + 1
        raise InvalidTopology("levels", list(levels), f"the tree has {depth} levels of switches; name them all")


def _climb(name: str, parents: Mapping[str, str], heights: Mapping[str, int], levels: Sequence[str]) -> dict[str, str]:
    labels: dict[str, str] = {}
    here: str | None = name
    while here is not None:
        if heights[here] < len(levels):
            labels[levels[heights[here]]] = here
        here = parents.get(here)
    return labels
