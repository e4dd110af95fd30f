"""Reads a cluster from TOML; every problem names file, key, value and what would work.

`[cluster] name`, optional `levels` (tightest first; default rack, block, zone). `[node_types.NAME] gpus, cpus, memory,
rails` ("auto" takes what the caller's machine has). The nodes, in one of two forms:
- a tree: `[[block]] name` with `[[block.rack]] name, node_type, nodes`; `zone` on a block is optional. A block may hold
  no racks but `node_type, nodes` itself: those nodes belong to no rack;
- any levels: `[[nodes]] names, node_type, labels = {rack = "r1", ...}`.
Names are lists of names or ranges, "gb[001-018]". Optional `[spares] per_domain, level` or `nodes`: what is held back
to replace failed nodes.
"""

import contextlib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reflux_placement.errors import InvalidTopology
from reflux_placement.policy.spares import NO_SPARES, SpareRule
from reflux_placement.sources.sizes import read_bytes
from reflux_placement.topology import DEFAULT_LEVELS, Node, Resources, Topology, build_topology

_RANGE = re.compile(r"([^\[\]]*)\[(\d+)-(\d+)\]([^\[\]]*)")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_MAX_RANGE = 100_000
_MAX_GPUS = 63


class TopologyFileError(ValueError):
    """A file that cannot be used: names the file, the key and the value, and says what would work."""

    def __init__(self, path: str, key: str, value: object, problem: str) -> None:
        super().__init__(f"{path}: {key} = {value!r}: {problem}")
        self.path = path
        self.key = key
        self.value = value
        self.problem = problem


@dataclass(frozen=True)
class Cluster:
    """What a file says."""

    topology: Topology
    spares: SpareRule = NO_SPARES


@dataclass(frozen=True, slots=True)
class _NodeType:
    resources: Resources
    rails: tuple[str, ...]


def read_cluster(path: Path, *, auto: Resources | None = None) -> Cluster:
    """Reads a file. Raises TopologyFileError: as `parse_cluster`, or the file cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise TopologyFileError(str(path), "file", str(path), f"cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise TopologyFileError(str(path), "file", str(path), f"is not TOML ({error})") from error
    return parse_cluster(text, str(path), auto=auto)


def read_topology(path: Path, *, auto: Resources | None = None) -> Topology:
    """The topology of `read_cluster`."""
    return read_cluster(path, auto=auto).topology


def parse_cluster(text: str, path: str = "topology", *, auto: Resources | None = None) -> Cluster:
    """Checks and builds a cluster.

    Args:
        text: the TOML document.
        path: how errors call it.
        auto: what "auto" stands for; None refuses it.

    Raises:
        TopologyFileError: not TOML, an unknown, missing or wrong key, an empty level or a name twice.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise TopologyFileError(path, "file", path, f"is not TOML ({error})") from error
    return _Reader(path, auto).cluster(table)


class _Reader:
    def __init__(self, path: str, auto: Resources | None) -> None:
        self._path = path
        self._auto = auto
        self._types: dict[str, _NodeType] = {}
        self._nodes: list[Node] = []
        self._where: dict[str, str] = {}
        self._domains: set[tuple[str, ...]] = set()

    def cluster(self, table: Mapping[str, Any]) -> Cluster:
        self._keys("", table, required={"cluster", "node_types"}, optional={"block", "nodes", "spares"})
        if "block" not in table and "nodes" not in table:
            raise self._bad("block", None, "is missing: a cluster has [[block]] with racks, or [[nodes]] with labels")
        head = self._table("cluster", table["cluster"])
        self._keys("cluster", head, required={"name"}, optional={"levels"})
        levels = self._levels(head)
        for name, entry in self._table("node_types", table["node_types"]).items():
            self._types[name] = self._node_type(f"node_types.{name}", entry)
        for position, block in enumerate(self._tables("block", table["block"]) if "block" in table else ()):
            self._block(f"block[{position}]", block)
        for position, entry in enumerate(self._tables("nodes", table["nodes"]) if "nodes" in table else ()):
            self._labelled(f"nodes[{position}]", entry)
        try:
            topology = build_topology(self._name("cluster.name", head["name"]), self._nodes, levels)
        except InvalidTopology as error:
            raise self._bad(error.key, error.value, error.problem) from error
        return Cluster(topology, self._spares(table["spares"], topology) if "spares" in table else NO_SPARES)

    def _levels(self, head: Mapping[str, Any]) -> tuple[str, ...]:
        levels = head.get("levels", list(DEFAULT_LEVELS))
        if not isinstance(levels, list) or not all(
            isinstance(level, str) and _NAME.fullmatch(level) for level in levels
        ):
            raise self._bad("cluster.levels", levels, 'is not a list of names; write ["rack", "block", "zone"]')
        return tuple(levels)

    def _block(self, key: str, block: Mapping[str, Any]) -> None:
        self._keys(key, block, required={"name"}, optional={"rack", "zone", "node_type", "nodes"})
        labels = {"block": self._name(f"{key}.name", block["name"])}
        if "zone" in block:
            labels["zone"] = self._name(f"{key}.zone", block["zone"])
        self._once(f"{key}.name", (labels.get("zone", ""), labels["block"]), "block")
        if ("rack" in block) == ("nodes" in block):
            raise self._bad(f"{key}.rack", block.get("rack"), "write [[block.rack]], or nodes without a rack")
        if "nodes" in block:
            self._add(key, block, labels)
            return
        for number, rack in enumerate(self._tables(f"{key}.rack", block["rack"])):
            here = f"{key}.rack[{number}]"
            self._keys(here, rack, required={"name", "node_type", "nodes"})
            name = self._name(f"{here}.name", rack["name"])
            self._once(f"{here}.name", (labels.get("zone", ""), labels["block"], name), "rack")
            self._add(here, rack, {**labels, "rack": name})

    def _labelled(self, key: str, entry: Mapping[str, Any]) -> None:
        self._keys(key, entry, required={"names", "node_type"}, optional={"labels"})
        labels = self._table(f"{key}.labels", entry.get("labels", {}))
        for level, domain in labels.items():
            self._name(f"{key}.labels.{level}", domain)
        self._add(key, {"nodes": entry["names"], "node_type": entry["node_type"]}, dict(labels), "names")

    def _once(self, key: str, domain: tuple[str, ...], kind: str) -> None:
        if domain in self._domains:
            raise self._bad(key, domain[-1], f"is the name of another {kind} already")
        self._domains.add(domain)

    def _add(self, key: str, entry: Mapping[str, Any], labels: Mapping[str, str], names_key: str = "nodes") -> None:
        kind = entry.get("node_type")
        if not isinstance(kind, str) or kind not in self._types:
            known = ", ".join(sorted(self._types)) or "none is defined"
            raise self._bad(f"{key}.node_type", kind, f"is not a node type; known: {known}")
        names = self._node_names(f"{key}.{names_key}", entry["nodes"])
        if not names:
            raise self._bad(f"{key}.{names_key}", entry["nodes"], "is empty; every domain holds at least one node")
        node_type = self._types[kind]
        for name in names:
            if name in self._where:
                raise self._bad(
                    f"{key}.{names_key}", name, f"is there twice ({self._where[name]}); node names are unique"
                )
            self._where[name] = key
            self._nodes.append(Node(name, node_type.resources, labels, node_type.rails))

    def _spares(self, value: object, topology: Topology) -> SpareRule:
        table = self._table("spares", value)
        self._keys("spares", table, required=set(), optional={"per_domain", "level", "nodes"})
        count, level = table.get("per_domain", 0), table.get("level", "rack")
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise self._bad("spares.per_domain", count, "is not a count; write 0 or more")
        if level not in topology.levels:
            raise self._bad("spares.level", level, f"is not a level here; known: {', '.join(topology.levels)}")
        names = tuple(self._node_names("spares.nodes", table.get("nodes", [])))
        for name in names:
            if name not in topology:
                raise self._bad("spares.nodes", name, "is no node of this cluster")
        return SpareRule(per_domain=count, level=level, nodes=names)

    def _node_type(self, key: str, entry: object) -> _NodeType:
        table = self._table(key, entry)
        self._keys(key, table, required={"cpus", "memory"}, optional={"gpus", "rails"})
        rails = table.get("rails", [])
        if not isinstance(rails, list) or not all(isinstance(rail, str) and _NAME.fullmatch(rail) for rail in rails):
            raise self._bad(f"{key}.rails", rails, 'is not a list of NIC names; write ["mlx5_0", "mlx5_1"]')
        resources = Resources(
            gpus=self._gpus(f"{key}.gpus", table.get("gpus", 0)),
            millicpus=self._millicpus(f"{key}.cpus", table["cpus"]),
            memory_bytes=self._memory(f"{key}.memory", table["memory"]),
        )
        return _NodeType(resources, tuple(rails))

    def _machine(self, key: str) -> Resources:
        if self._auto is None:
            raise self._bad(key, "auto", "stands for this machine, which says nothing here; write a number")
        return self._auto

    def _gpus(self, key: str, value: object) -> int:
        if value == "auto":
            return self._machine(key).gpus
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_GPUS:
            raise self._bad(key, value, f'is not a count of GPUs up to {_MAX_GPUS}; write 0, 4 or "auto"')
        return value

    def _millicpus(self, key: str, value: object) -> int:
        if value == "auto":
            return self._machine(key).millicpus
        # `not <` also catches nan; inf is no number of CPUs either.
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
            raise self._bad(key, value, 'is not a number of CPUs; write 144, 0.5 or "auto"')
        return round(value * 1000)

    def _memory(self, key: str, value: object) -> int:
        if value == "auto":
            return self._machine(key).memory_bytes
        with contextlib.suppress(ValueError):
            if size := read_bytes(value):
                return size
        raise self._bad(key, value, 'is not a size; write "960GiB", a number of bytes or "auto"')

    def _node_names(self, key: str, value: object) -> list[str]:
        if not isinstance(value, list):
            raise self._bad(key, value, 'is not a list; write ["node-1"] or ["gb[001-018]"]')
        names: list[str] = []
        for entry in value:
            if not isinstance(entry, str):
                raise self._bad(key, entry, 'is not a node name; write "node-1" or "gb[001-018]"')
            names.extend(self._name(key, name) for name in self._expanded(key, entry))
        return names

    def _expanded(self, key: str, entry: str) -> list[str]:
        match = _RANGE.fullmatch(entry)
        if match is None:
            return [entry]
        before, first, last, after = match.groups()
        numbers = range(int(first), int(last) + 1)
        if not numbers or len(numbers) > _MAX_RANGE:
            raise self._bad(key, entry, f'is no usable range; write "gb[001-018]" with at most {_MAX_RANGE} nodes')
        return [f"{before}{number:0{len(first)}d}{after}" for number in numbers]

    def _name(self, key: str, value: object) -> str:
        if not isinstance(value, str) or not _NAME.fullmatch(value):
            raise self._bad(key, value, "is not a name; use letters, digits, '.', '_' and '-'")
        return value

    def _table(self, key: str, value: object) -> Mapping[str, Any]:
        if not isinstance(value, dict):
            raise self._bad(key, value, f"is not a table; write [{key}]")
        return value

    def _tables(self, key: str, value: object) -> list[Mapping[str, Any]]:
        if not isinstance(value, list):
            raise self._bad(key, value, f"is not a list of tables; write [[{key}]]")
        if not value:
            raise self._bad(key, value, "is empty; every level holds at least one domain")
        return [self._table(f"{key}[{position}]", entry) for position, entry in enumerate(value)]

    def _keys(
        self, key: str, table: Mapping[str, Any], required: set[str], optional: set[str] | frozenset[str] = frozenset()
    ) -> None:
        prefix = f"{key}." if key else ""
        for name in table:
            if name not in required and name not in optional:
                known = ", ".join(sorted(required | optional))
                raise self._bad(prefix + name, table[name], f"is an unknown key; known here: {known}")
        for name in sorted(required):
            if name not in table:
                raise self._bad(prefix + name, None, "is missing")

    def _bad(self, key: str, value: object, problem: str) -> TopologyFileError:
        return TopologyFileError(self._path, key, value, problem)
