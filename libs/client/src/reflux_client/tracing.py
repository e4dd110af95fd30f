"""The tree of one sample from the local span sink: prompt -> tokens -> verification -> advantage -> optimizer step."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.tree import Tree

from reflux_client.connection import ClientError

_HIDDEN = ("reflux.run", "reflux.prompt")
ADVANTAGE = "train"
"""Span of the trainer that carries the advantages of one group."""


@dataclass
class SpanNode:
    """One recorded span and those below it."""

    record: dict[str, Any]
    children: list["SpanNode"] = field(default_factory=list)

    @property
    def start_ns(self) -> int:
        """Start in nanoseconds since 1970."""
        return int(self.record["start_ns"])


def parse_sample_id(sample: str) -> tuple[str, int, int | None]:
    """Splits "<run>/<prompt>[/<index>]". Raises `ClientError` for anything else."""
    parts = sample.split("/")
    if len(parts) not in (2, 3) or not all(part.isdigit() for part in parts[1:]):
        raise ClientError(
            f"{sample!r} is not a sample id: write <run>/<prompt> or <run>/<prompt>/<index>, e.g. demo-1/17/3"
        )
    return parts[0], int(parts[1]), int(parts[2]) if len(parts) == 3 else None


def find_tree(folder: Path, run: str, prompt: int) -> list[SpanNode]:
    """All root spans of one prompt of one run, with their children, oldest first."""
    traces: set[str] = set()
    spans: list[dict[str, Any]] = []
    for span in _spans(folder.glob("*.jsonl")):
        spans.append(span)
        attributes = span["attributes"]
        if attributes.get("reflux.run") == run and attributes.get("reflux.prompt") == prompt:
            traces.add(span["trace_id"])
    if not traces:
        raise ClientError(f"no span of prompt {prompt} of run {run} below {folder}: is the run's stack this one?")
    own = [span for span in spans if span["trace_id"] in traces]
    linked = [span for span in spans if span["trace_id"] not in traces and traces & set(span["links"])]
    roots = build_tree(own)
    _hang(roots, build_tree(linked))
    return roots


def build_tree(spans: Iterable[dict[str, Any]]) -> list[SpanNode]:
    """Links spans to their parents; a span whose parent was not recorded is a root."""
    nodes = {span["span_id"]: SpanNode(span) for span in spans}
    roots = []
    for node in sorted(nodes.values(), key=lambda each: each.start_ns):
        parent = nodes.get(node.record["parent_id"])
        (parent.children if parent else roots).append(node)
    return roots


def _hang(roots: list[SpanNode], linked: list[SpanNode]) -> None:
    """Puts the optimizer step, which belongs to a whole batch, below the span that gave the sample its advantage."""
    advantage = next((child for root in roots for child in root.children if child.record["name"] == ADVANTAGE), None)
    (roots if advantage is None else advantage.children).extend(linked)


def render(roots: list[SpanNode], title: str, index: int | None = None) -> Tree:
    """The tree for a terminal, with durations; with `index`, lists over the group's samples show that sample only."""
    tree = Tree(f"[bold]{title}[/bold]")
    for root in roots:
        _add(tree, root, roots[0].start_ns, index)
    return tree


def _add(tree: Tree, node: SpanNode, origin_ns: int, index: int | None) -> None:
    record = node.record
    duration_ms = (record["end_ns"] - record["start_ns"]) / 1e6
    shown = {key: value for key, value in record["attributes"].items() if key not in _HIDDEN}
    details = " ".join(f"{key.removeprefix('reflux.')}={_chosen(value, index)}" for key, value in shown.items())
    failed = " [red]ERROR[/red]" if record["status"] == "ERROR" else ""
    at_ms = (record["start_ns"] - origin_ns) / 1e6
    where = f"[dim]at +{at_ms:.1f} ms, {record['service']}[/dim]"
    label = f"[cyan]{record['name']}[/cyan] {duration_ms:.1f} ms {where} {details}"
    branch = tree.add(label + failed)
    for child in node.children:
        _add(branch, child, origin_ns, index)


def _chosen(value: object, index: int | None) -> object:
    if index is None or not isinstance(value, list):
        return value
    if index >= len(value):
        raise ClientError(f"the group has {len(value)} samples, there is no sample {index}")
    return value[index]


def _spans(paths: Iterable[Path]) -> Iterator[dict[str, Any]]:
    for path in paths:
        with path.open() as file:
            for line in file:
                if line.endswith("\n"):  # the last line of a killed process may be torn
                    yield json.loads(line)
