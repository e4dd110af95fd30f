"""Owns the reading of files for simulations: openb task and node lists (CSV) and cluster descriptions (TOML).

The only module here that touches the disk. Every error names the file, the line or key, and what would work.
"""

import csv
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from reflux_placement.simulate.clusters import NODES_PER_RACK, RACKS_PER_BLOCK, ListedNode, grid, racked
from reflux_placement.simulate.openb import Task
from reflux_placement.sources.toml import read_topology
from reflux_placement.topology import Resources, Topology

MIB = 1 << 20
_TASK_COLUMNS = ("name", "cpu_milli", "memory_mib", "num_gpu", "creation_time", "deletion_time", "scheduled_time")
_NODE_COLUMNS = ("sn", "cpu_milli", "memory_mib", "gpu", "model")
_GRID = {"racks", "nodes_per_rack", "racks_per_block", "gpus", "cpus", "memory_gib"}
_LISTED = {"file", "nodes_per_rack", "racks_per_block"}
T = TypeVar("T")


class InputError(ValueError):
    """A file that cannot be used: `path`, where in it, and what is wrong."""

    def __init__(self, path: Path, where: str, problem: str) -> None:
        super().__init__(f"{path}{', ' + where if where else ''}: {problem}")
        self.path = path


def read_tasks(path: Path) -> list[Task]:
    """Tasks of an openb trace (cluster-trace-gpu-v2023 of alibaba/clusterdata), in file order.

    Raises:
        InputError: no such file, a missing column, or a value that is no number.
    """
    tasks = []
    for number, row in _rows(path, _TASK_COLUMNS):
        line = _Line(path, number, row)
        started, ended = line.optional("scheduled_time"), line.number("deletion_time")
        if started is not None and ended <= started:
            raise InputError(path, f"line {number}", f"deletion_time {ended:g} is not after scheduled_time {started:g}")
        each = Resources(
            int(line.number("num_gpu")), int(line.number("cpu_milli")), int(line.number("memory_mib")) * MIB
        )
        arrives = line.number("creation_time")
        tasks.append(Task(row["name"], arrives, None if started is None else ended - started, each))
    return tasks


def read_nodes(path: Path) -> list[ListedNode]:
    """Nodes of an openb node list, in file order. Raises InputError."""
    nodes = []
    for number, row in _rows(path, _NODE_COLUMNS):
        line = _Line(path, number, row)
        each = Resources(int(line.number("gpu")), int(line.number("cpu_milli")), int(line.number("memory_mib")) * MIB)
        nodes.append(ListedNode(row["sn"], row["model"], each))
    return nodes


def read_cluster(path: Path) -> Topology:
    """A cluster from a file: a node list (.csv), or TOML with a table [grid] (even racks), [node_list] (a CSV and how
    to cut it into racks), or the racks themselves as in configs/topologies.

    Raises:
        InputError: the file is missing or not understood.
        ValueError: from the topology reader, naming file and key.
    """
    if path.suffix == ".csv":
        return racked(path.stem, read_nodes(path), nodes_per_rack=NODES_PER_RACK, racks_per_block=RACKS_PER_BLOCK)
    try:
        table = tomllib.loads(_text(path))
    except tomllib.TOMLDecodeError as error:
        raise InputError(path, "", f"is no TOML: {error}") from error
    name = table.get("cluster", {}).get("name", path.stem)
    if "grid" in table:
        return _grid(path, name, table["grid"])
    if "node_list" in table:
        return _listed(path, name, table["node_list"])
    return read_topology(path)


def _grid(path: Path, name: str, table: Mapping[str, Any]) -> Topology:
    _check_keys(path, "grid", table, _GRID)
    number = {key: _positive(path, f"grid.{key}", table.get(key, default)) for key, default in
              {"racks": 1, "nodes_per_rack": NODES_PER_RACK, "racks_per_block": RACKS_PER_BLOCK, "gpus": 4, "cpus": 144,
               "memory_gib": 960}.items()}  # fmt: skip
    each = Resources(number["gpus"], number["cpus"] * 1000, number["memory_gib"] << 30)
    layout = {key: number[key] for key in ("racks", "nodes_per_rack", "racks_per_block")}
    return grid(name, each=each, **layout)


def _listed(path: Path, name: str, table: Mapping[str, Any]) -> Topology:
    _check_keys(path, "node_list", table, _LISTED)
    if not isinstance(table.get("file"), str):
        raise InputError(path, "node_list.file", 'name the CSV of the nodes, relative to this file: file = "nodes.csv"')
    nodes = read_nodes(path.parent / table["file"])
    per_rack = _positive(path, "node_list.nodes_per_rack", table.get("nodes_per_rack", NODES_PER_RACK))
    per_block = _positive(path, "node_list.racks_per_block", table.get("racks_per_block", RACKS_PER_BLOCK))
    return racked(name, nodes, nodes_per_rack=per_rack, racks_per_block=per_block)


def _check_keys(path: Path, section: str, table: object, known: set[str]) -> None:
    if not isinstance(table, dict):
        raise InputError(path, section, f"is not a table; write [{section}]")
    for key in table:
        if key not in known:
            raise InputError(path, f"{section}.{key}", f"is an unknown key; known here: {', '.join(sorted(known))}")


def _positive(path: Path, key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(path, key, f"{value!r} is not a whole number above zero")
    return value


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        raise InputError(path, "", "does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(path, "", f"cannot be read: {error}") from error


def _rows(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str]]]:
    reader = csv.DictReader(_text(path).splitlines())
    for column in columns:
        if column not in (reader.fieldnames or ()):
            found = ", ".join(reader.fieldnames or ()) or "none"
            raise InputError(path, "line 1", f"column {column!r} is missing; the file has {found}")
    empty = True
    for row in reader:
        empty = False
        if any(row[column] is None for column in columns):
            raise InputError(path, f"line {reader.line_num}", f"has fewer than {len(columns)} values")
        yield reader.line_num, row
    if empty:
        raise InputError(path, "", "has no rows below the header")


class _Line:
    def __init__(self, path: Path, number: int, row: Mapping[str, str]) -> None:
        self._path, self._number, self._row = path, number, row

    def number(self, column: str) -> float:
        return self._parsed(column, float)

    def optional(self, column: str) -> float | None:
        return self.number(column) if self._row[column] else None

    def _parsed(self, column: str, parse: Callable[[str], T]) -> T:
        text = self._row[column]
        try:
            value = parse(text)
        except ValueError:
            value = None
        if value is None or not 0 <= value < 1e15:  # pyright: ignore[reportOperatorIssue]
            raise InputError(self._path, f"line {self._number}", f"{column} = {text!r} is not a number of zero or more")
        return value
