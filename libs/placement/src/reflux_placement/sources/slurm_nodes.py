"""Owns what Slurm says of its nodes: `scontrol -d show nodes -o` (text) or the nodes of `--json` and of slurmrestd."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reflux_placement.errors import InvalidTopology
from reflux_placement.sources.hostlist import expand
from reflux_placement.topology import Resources

MIB = 1 << 20

_SIGNS = {
    "*": "NOT_RESPONDING",
    "~": "POWERED_DOWN",
    "#": "POWERING_UP",
    "!": "POWERING_DOWN",
    "%": "POWERING_DOWN",
    "$": "MAINTENANCE",
    "@": "REBOOT_REQUESTED",
    "^": "REBOOT_ISSUED",
    "-": "PLANNED",
}
"""Suffixes of a state (man page of sinfo, NODE STATE CODES) by the flag that they stand for."""

_KEY = re.compile(r"(?:^|\s)([A-Za-z][A-Za-z0-9_:/]*)=")
_GPUS = re.compile(r"(?:^|,)(?:gres[:/])?gpu(?::[^:,(=]+)?[:=](\d+)")
_SIGNED_BY = re.compile(r"\s*\[[^\]@]*@[^\]]*\]\s*$")


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """One node as Slurm describes it. `state` is the base state (IDLE, MIXED, ALLOCATED, DOWN, ...), upper case."""

    name: str
    state: str
    flags: frozenset[str]
    reason: str
    capacity: Resources
    allocated: Resources
    """What all jobs on it hold together."""

    features: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()
    address: str = ""


def parse_nodes_text(text: str) -> list[NodeRecord]:
    """One node per line, as `scontrol -d show nodes -o` prints them. Raises InvalidTopology."""
    return [_from_text(line) for line in text.splitlines() if line.startswith("NodeName=")]


def parse_nodes_json(document: Mapping[str, Any]) -> list[NodeRecord]:
    """The answer of `scontrol show nodes --json` or of slurmrestd's `/nodes`, any version since v0.0.38."""
    nodes = document.get("nodes")
    if not isinstance(nodes, list):
        raise InvalidTopology("nodes", type(nodes).__name__, "the answer has no list of nodes")
    return [_from_json(node) for node in nodes]


def pairs(line: str) -> dict[str, str]:
    """The Key=value pairs of a line; a value may hold blanks and ends before the next key."""
    found = list(_KEY.finditer(line))
    ends = [*(match.start() for match in found[1:]), len(line)]
    return {match[1]: line[match.end() : end].strip() for match, end in zip(found, ends, strict=False)}


def gpu_count(gres: str) -> int:
    """GPUs of a list of generic resources such as "gpu:gb200:4(S:0-1),nic:2" or "gres/gpu=4"."""
    return sum(int(number) for number in _GPUS.findall(gres))


def _from_text(line: str) -> NodeRecord:
    fields = pairs(line)
    state, flags = _state(fields.get("State", "UNKNOWN").split("+"))
    usable = _number(fields, "CPUEfctv") or _number(fields, "CPUTot")
    memory_mib = _number(fields, "RealMemory") - _number(fields, "MemSpecLimit")
    used = fields.get("GresUsed", "") or fields.get("AllocTRES", "")
    return NodeRecord(
        name=fields["NodeName"],
        state=state,
        flags=flags,
        reason=_SIGNED_BY.sub("", fields.get("Reason", "")),
        capacity=_amount(gpu_count(fields.get("Gres", "")), usable, memory_mib),
        allocated=_amount(gpu_count(used), _number(fields, "CPUAlloc"), _number(fields, "AllocMem")),
        features=_words(fields.get("ActiveFeatures") or fields.get("AvailableFeatures")),
        partitions=_words(fields.get("Partitions")),
        address=fields.get("NodeAddr", ""),
    )


def _from_json(node: Mapping[str, Any]) -> NodeRecord:
    said = node.get("state", "UNKNOWN")
    words = [said] if isinstance(said, str) else list(said)
    state, flags = _state([*words, *(node.get("state_flags") or ())])
    usable = _int(node.get("effective_cpus")) or _int(node.get("cpus"))
    memory_mib = _int(node.get("real_memory")) - _int(node.get("specialized_memory"))
    used = gpu_count(str(node.get("gres_used") or node.get("tres_used") or ""))
    return NodeRecord(
        name=str(node["name"]),
        state=state,
        flags=flags,
        reason=str(node.get("reason") or ""),
        capacity=_amount(gpu_count(str(node.get("gres") or "")), usable, memory_mib),
        allocated=_amount(used, _int(node.get("alloc_cpus")), _int(node.get("alloc_memory"))),
        features=_words(node.get("active_features") or node.get("features")),
        partitions=_words(node.get("partitions")),
        address=str(node.get("address") or ""),
    )


def _state(words: list[str]) -> tuple[str, frozenset[str]]:
    base, *others = (word.strip().upper() for word in words)
    flags = set(others)
    while base and base[-1] in _SIGNS:
        flags.add(_SIGNS[base[-1]])
        base = base[:-1]
    # DRAINED and DRAINING are how some commands write IDLE+DRAIN and MIXED+DRAIN.
    if base in ("DRAINED", "DRAINING", "DRAIN"):
        base, flags = ("IDLE" if base == "DRAINED" else "MIXED"), flags | {"DRAIN"}
    return base, frozenset(flags)


def _amount(gpus: int, cpus: int, memory_mib: int) -> Resources:
    return Resources(gpus=gpus, millicpus=cpus * 1000, memory_bytes=max(0, memory_mib) * MIB)


def _number(fields: Mapping[str, str], key: str) -> int:
    digits = re.match(r"\d+", fields.get(key, ""))
    return int(digits[0]) if digits else 0


def _int(value: Any) -> int:
    """A count of the JSON answers: plain in v0.0.38, {"set": true, "number": 4} in some newer fields."""
    if isinstance(value, Mapping):
        value = value.get("number") if value.get("set", True) else 0
    return int(value or 0)


def _words(value: Any) -> tuple[str, ...]:
    if value is None or value == "(null)":
        return ()
    if isinstance(value, str):
        return tuple(word for word in value.split(",") if word)
    return tuple(str(word) for word in value)


def names_of(value: Any) -> tuple[str, ...]:
    """Node names of a field: a hostlist, a list of hostlists, or nothing."""
    if not value or value == "(null)":
        return ()
    lists = [value] if isinstance(value, str) else value
    return tuple(name for each in lists for name in expand(str(each)))
