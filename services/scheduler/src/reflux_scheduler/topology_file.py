"""Reads a topology from TOML; every problem names file, key, value and what would work.

Format: `[cluster] name`; `[node_types.NAME] gpus, cpus, memory` ("auto" takes what this machine has);
`[[block]] name` with `[[block.rack]] name, node_type, nodes`, where nodes is a list of names or ranges `gb[001-018]`.
"""

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reflux_scheduler.errors import InvalidTopology, TopologyFileError
from reflux_scheduler.topology import Node, Resources, Topology, TopologyBuilder

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]iB)?")
_RANGE = re.compile(r"([^\[\]]*)\[(\d+)-(\d+)\]([^\[\]]*)")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_MAX_RANGE = 100_000


@dataclass(frozen=True, slots=True)
class Machine:
    """What "auto" stands for."""

    resources: Resources

    @classmethod
    def this(cls) -> "Machine":
        """CPUs that this process may use, GPUs as device files, physical memory."""
        gpus = sum(1 for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit())
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return cls(Resources(gpus, len(os.sched_getaffinity(0)) * 1000, memory))


def toy_rack(machine: Machine | None = None) -> Topology:
    """This machine as a rack of one node named "local"; the same as configs/topologies/local.toml."""
    builder = TopologyBuilder("local")
    builder.add_rack("block-1", "rack-1", [Node("local", (machine or Machine.this()).resources)])
    return builder.build()


def load_topology(path: Path, machine: Machine | None = None) -> Topology:
    """Reads and checks `path`.

    Raises:
        TopologyFileError: the file cannot be read, is not TOML, has an unknown, missing or wrong key, an empty level
            or a name twice.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TopologyFileError(path, "file", str(path), f"cannot be read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TopologyFileError(path, "file", str(path), f"is not TOML ({error})") from error
    return _Reader(path, machine or Machine.this()).topology(table)


class _Reader:
    def __init__(self, path: Path, machine: Machine) -> None:
        self._path = path
        self._machine = machine

    def topology(self, table: Mapping[str, Any]) -> Topology:
        self._keys("", table, required={"cluster", "node_types", "block"})
        cluster = self._table("cluster", table["cluster"])
        self._keys("cluster", cluster, required={"name"})
        types = {
            name: self._node_type(f"node_types.{name}", entry)
            for name, entry in self._table("node_types", table["node_types"]).items()
        }
        builder = TopologyBuilder(self._name("cluster.name", cluster["name"]))
        blocks: set[str] = set()
        for position, block in enumerate(self._tables("block", table["block"])):
            key = f"block[{position}]"
            self._keys(key, block, required={"name", "rack"})
            name = self._name(f"{key}.name", block["name"])
            if name in blocks:
                raise self._bad(f"{key}.name", name, "is the name of another block already")
            blocks.add(name)
            for number, rack in enumerate(self._tables(f"{key}.rack", block["rack"])):
                self._add_rack(builder, name, f"{key}.rack[{number}]", rack, types)
        return builder.build()

    def _add_rack(
        self, builder: TopologyBuilder, block: str, key: str, rack: Mapping[str, Any], types: Mapping[str, Resources]
    ) -> None:
        self._keys(key, rack, required={"name", "node_type", "nodes"})
        node_type = rack["node_type"]
        if not isinstance(node_type, str) or node_type not in types:
            known = ", ".join(sorted(types)) or "none is defined"
            raise self._bad(f"{key}.node_type", node_type, f"is not a node type; known: {known}")
        nodes = [Node(name, types[node_type]) for name in self._node_names(f"{key}.nodes", rack["nodes"])]
        try:
            builder.add_rack(block, self._name(f"{key}.name", rack["name"]), nodes)
        except InvalidTopology as error:
            where = f"{key}.name" if error.key == "rack" else f"{key}.nodes"
            raise self._bad(where, error.value, error.problem) from error

    def _node_type(self, key: str, entry: object) -> Resources:
        table = self._table(key, entry)
        self._keys(key, table, required={"cpus", "memory"}, optional={"gpus"})
        auto = self._machine.resources
        return Resources(
            gpus=self._gpus(f"{key}.gpus", table.get("gpus", 0), auto.gpus),
            millicpus=self._millicpus(f"{key}.cpus", table["cpus"], auto.millicpus),
            memory_bytes=self._memory(f"{key}.memory", table["memory"], auto.memory_bytes),
        )

    def _gpus(self, key: str, value: object, auto: int) -> int:
        if value == "auto":
            return auto
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._bad(key, value, 'is not a count of GPUs; write 0, 4 or "auto"')
        return value

    def _millicpus(self, key: str, value: object, auto: int) -> int:
        if value == "auto":
            return auto
        # `not >` also catches nan; inf is no number of CPUs either.
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
            raise self._bad(key, value, 'is not a number of CPUs; write 144, 0.5 or "auto"')
        return round(value * 1000)

    def _memory(self, key: str, value: object, auto: int) -> int:
        if value == "auto":
            return auto
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        match = _SIZE.fullmatch(value) if isinstance(value, str) else None
        if match is None or float(match[1]) <= 0:
            raise self._bad(key, value, 'is not a size; write "960GiB", a number of bytes or "auto"')
        return int(float(match[1]) * _UNITS[match[2] or ""])

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
