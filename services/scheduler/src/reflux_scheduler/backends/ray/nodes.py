"""Owns how Ray's list of nodes is read: one entry per node name, whatever lives a node had before."""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from reflux_placement.topology import Resources


@dataclass(frozen=True, slots=True)
class RayNode:
    """A node by name, in its present life."""

    name: str
    node_id: str
    address: str
    state: Literal["up", "draining", "down"]
    reason: str = ""
    resources: Resources = field(default_factory=Resources)
    """What the node has in all; nothing once it is down."""

    labels: Mapping[str, str] = field(default_factory=dict)


def read_nodes(
    rows: Iterable[Mapping[str, Any]], name_key: str = "", draining: Container[str] = ()
) -> dict[str, RayNode]:
    """Nodes by name from the rows of `ray.nodes()`; the name is the value of the label `name_key`, or Ray's own.

    A name that two living raylets share names no node that anything could be sent to: it is down, with the way out.
    `draining` holds ids of nodes that Ray is emptying.
    """
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        labels = row.get("Labels") or {}
        name = labels.get(name_key, "") if name_key else row.get("NodeName") or row["NodeManagerAddress"]
        if name:
            by_name.setdefault(name, []).append(row)
    return {name: _present(name, lives, draining) for name, lives in by_name.items()}


def amounts(resources: Mapping[str, float]) -> Resources:
    """Ray's figures as ours: whole GPUs, thousandths of a CPU, bytes."""
    millicpus = round(resources.get("CPU", 0) * 1000)
    return Resources(int(resources.get("GPU", 0)), millicpus, int(resources.get("memory", 0)))


def lacking(wanted: Resources, node: RayNode) -> str:
    """What of a share even the empty node does not have; empty when it has all."""
    names = ("GPUs", "thousandths of a CPU", "bytes of memory")
    figures = zip(names, wanted.row, node.resources.row, strict=True)
    return ", ".join(f"{need} {name} of {has}" for name, need, has in figures if need > has)


def foreign(
    nodes: Iterable[RayNode], available: Mapping[str, Mapping[str, float]], ours: Mapping[str, Resources]
) -> dict[str, Resources]:
    """What others hold, by node name: total less `available` less `ours` (both by node id).

    Ray reports availability late. Room that was just taken for us then looks free, hence the bound at zero; room that
    was just given back looks taken for a moment, which it still is for the next group.
    """
    found: dict[str, Resources] = {}
    for node in nodes:
        if node.node_id in available:
            used = node.resources - amounts(available[node.node_id]) - ours.get(node.node_id, Resources())
            gpus, millicpus, memory_bytes = (max(0, amount) for amount in used.row)
            found[node.name] = Resources(gpus, millicpus, memory_bytes)
    return found


def _present(name: str, lives: list[Mapping[str, Any]], draining: Container[str]) -> RayNode:
    alive = [row for row in lives if row["Alive"]]
    last = (alive or lives)[-1]
    fields = {"name": name, "node_id": last["NodeID"], "address": last["NodeManagerAddress"]}
    described = {"resources": amounts(last.get("Resources") or {}), "labels": dict(last.get("Labels") or {})}
    if not alive:
        return RayNode(**fields, state="down", reason=last.get("DeathReasonMessage") or "its raylet is gone")
    if len(alive) > 1:
        reason = f"{len(alive)} raylets call themselves {name}: give each its own --node-name"
        return RayNode(**fields, state="down", reason=reason)
    if last["NodeID"] in draining:
        return RayNode(**fields, **described, state="draining", reason="Ray is draining it")
    return RayNode(**fields, **described, state="up")
