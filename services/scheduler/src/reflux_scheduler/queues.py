"""Reads queues and the policy's knobs from TOML.

`[queues.NAME]` with optional parent, weight, guaranteed = {gpus, cpus, memory} and limit (the same); `[policy]` with
the fields of PolicyConfig. A queue "default" is always there.
"""

import dataclasses
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reflux_placement.policy.config import PolicyConfig
from reflux_placement.policy.view import DEFAULT_QUEUE, Queue
from reflux_placement.sources.sizes import read_bytes
from reflux_placement.topology import NOTHING, Resources
from reflux_scheduler.errors import ConfigurationError

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_KNOBS = {field.name: field for field in dataclasses.fields(PolicyConfig)}


def read_queues(path: Path) -> tuple[dict[str, Queue], PolicyConfig]:
    """Queues by name, parents before children, and the knobs. Raises ConfigurationError."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(path, "file", str(path), f"cannot be read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(path, "file", str(path), f"is not TOML ({error})") from error
    _known(path, "", table, {"queues", "policy"})
    queues = {
        name: _queue(path, name, entry) for name, entry in _table(path, "queues", table.get("queues", {})).items()
    }
    queues.setdefault(DEFAULT_QUEUE, Queue(name=DEFAULT_QUEUE))
    return _ordered(path, queues), _config(path, _table(path, "policy", table.get("policy", {})))


def default_queues() -> dict[str, Queue]:
    """One queue without bounds."""
    return {DEFAULT_QUEUE: Queue(name=DEFAULT_QUEUE)}


def _queue(path: Path, name: str, entry: object) -> Queue:
    key = f"queues.{name}"
    if not _NAME.fullmatch(name):
        raise ConfigurationError(path, "queues", name, "is not a name; use lower-case letters, digits, '.', '_', '-'")
    table = _table(path, key, entry)
    _known(path, f"{key}.", table, {"parent", "weight", "guaranteed", "limit"})
    weight, parent = table.get("weight", 1.0), table.get("parent", "")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < 1e9:
        raise ConfigurationError(path, f"{key}.weight", weight, "is not a weight above zero")
    if not isinstance(parent, str):
        raise ConfigurationError(path, f"{key}.parent", parent, "is not the name of a queue")
    return Queue(
        name=name,
        parent=parent,
        weight=float(weight),
        guaranteed=_amount(path, f"{key}.guaranteed", table["guaranteed"]) if "guaranteed" in table else NOTHING,
        limit=_amount(path, f"{key}.limit", table["limit"]) if "limit" in table else None,
    )


def _amount(path: Path, key: str, value: object) -> Resources:
    table = _table(path, key, value)
    _known(path, f"{key}.", table, {"gpus", "cpus", "memory"})
    gpus, cpus, memory = table.get("gpus", 0), table.get("cpus", 0), table.get("memory", 0)
    if isinstance(gpus, bool) or not isinstance(gpus, int) or gpus < 0:
        raise ConfigurationError(path, f"{key}.gpus", gpus, "is not a count of GPUs; write 64")
    if isinstance(cpus, bool) or not isinstance(cpus, int | float) or not 0 <= cpus < 1e9:
        raise ConfigurationError(path, f"{key}.cpus", cpus, "is not a number of CPUs; write 144")
    try:
        return Resources(gpus, round(cpus * 1000), read_bytes(memory))
    except ValueError:
        raise ConfigurationError(path, f"{key}.memory", memory, 'is not a size; write "960GiB"') from None


def _ordered(path: Path, queues: Mapping[str, Queue]) -> dict[str, Queue]:
    """Parents before children. Raises ConfigurationError for a parent that is missing or a loop."""
    ordered: dict[str, Queue] = {}
    while len(ordered) < len(queues):
        ready = [queue for queue in queues.values() if queue.name not in ordered and queue.parent in ("", *ordered)]
        for queue in ready:
            ordered[queue.name] = queue
        if not ready:
            stuck = next(queue for queue in queues.values() if queue.name not in ordered)
            known = ", ".join(sorted(queues))
            raise ConfigurationError(
                path,
                f"queues.{stuck.name}.parent",
                stuck.parent,
                f"is no queue, or a queue below this one; known: {known}",
            )
    return ordered


def _config(path: Path, table: Mapping[str, Any]) -> PolicyConfig:
    _known(path, "policy.", table, set(_KNOBS))
    for name, value in table.items():
        wanted = type(_KNOBS[name].default)
        fits = isinstance(value, int) and not isinstance(value, bool) if wanted in (int, float) else False
        if not (isinstance(value, wanted) or (wanted is float and fits)) or (wanted is int and isinstance(value, bool)):
            raise ConfigurationError(path, f"policy.{name}", value, f"is not of type {wanted.__name__}")
    try:
        return PolicyConfig(**table)
    except ValueError as error:
        raise ConfigurationError(path, "policy", dict(table), str(error)) from error


def _table(path: Path, key: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ConfigurationError(path, key, value, f"is not a table; write [{key}]")
    return value


def _known(path: Path, prefix: str, table: Mapping[str, Any], names: set[str]) -> None:
    for name in table:
        if name not in names:
            known = ", ".join(sorted(names))
            raise ConfigurationError(path, prefix + name, table[name], f"is an unknown key; known here: {known}")
