"""Control groups for the cells of children (v2 or v1), where we may write them; elsewhere only rlimits hold."""

import contextlib
import itertools
from dataclasses import dataclass, field
from pathlib import Path

from reflux_kit.cgroups import memory_kills, open_folders, remove_folder
from reflux_sandbox.isolation.base import ChildLimits

_NAME = "reflux-sandbox"
_NEEDED = ("memory", "pids")
_PERIOD_MICROSECONDS = 100_000
_WEIGHTS = {"v2": ("cpu.weight", "800"), "cpu": ("cpu.shares", "8192")}
"""All children together weigh as eight processes outside: by default their group would weigh as one."""
_instances = itertools.count()
"""Mechanisms of one process share the parent groups."""


@dataclass
class CellGroups:
    """One group per cell and hierarchy, made by `add`, removed by `close`."""

    parents: dict[str, Path] = field(default_factory=dict)
    """ "v2", or "memory", "pids" and, where there is one, "cpu" of v1."""
    reason: str = ""
    _instance: int = field(default_factory=lambda: next(_instances))
    _cells: int = 0

    @classmethod
    def create(cls) -> "CellGroups":
        """Makes the parent groups; without permission it has none and `reason` says why."""
        try:
            groups = cls(_open())
        except OSError as error:
            return cls(reason=f"no cgroups: {error.strerror} ({error.filename})")
        if not groups.parents:
            groups.reason = "no cgroups: no writable memory and pids controllers"
            return groups
        for kind, (name, weight) in _WEIGHTS.items():
            if kind in groups.parents:
                with contextlib.suppress(OSError):
                    (groups.parents[kind] / name).write_text(weight)
        cpu = "" if groups.parents.keys() & {"v2", "cpu"} else ", none on cpu"
        groups.reason = f"cgroup limits on memory, processes and cpu{cpu} ({', '.join(sorted(groups.parents))})"
        return groups

    def add(self, cells: int, limits: ChildLimits) -> None:
        """Makes the groups of that many further cells; nothing without parents. Raises OSError."""
        for number in range(self._cells, self._cells + cells):
            for kind, parent in self.parents.items():
                folder = parent / self._group(number)
                folder.mkdir()
                for name, value in _settings(kind, limits).items():
                    if (folder / name).exists() or not name.startswith("cpu."):
                        (folder / name).write_text(value)
        self._cells += cells

    def _group(self, number: int) -> str:
        return f"{self._instance}-cell-{number}"

    def procs(self, number: int) -> tuple[str, ...]:
        """Files through which a process joins the groups of a cell."""
        return tuple(str(parent / self._group(number) / "cgroup.procs") for parent in self.parents.values())

    def memory_kills(self, number: int) -> int:
        """How often the kernel has killed for memory in this cell so far."""
        return memory_kills(self.parents, self._group(number))

    def process_refusals(self, number: int) -> int:
        """How often a process of this cell could not fork for its limit so far."""
        for kind in ("v2", "pids"):
            if kind in self.parents:
                with contextlib.suppress(OSError, ValueError, IndexError):
                    return int((self.parents[kind] / self._group(number) / "pids.events").read_text().split()[1])
        return 0

    def close(self) -> None:
        """Removes the groups; they are empty because their children are dead."""
        for parent in self.parents.values():
            for number in range(self._cells):
                with contextlib.suppress(OSError):
                    (parent / self._group(number)).rmdir()
            with contextlib.suppress(OSError):
                parent.rmdir()
        self._cells = 0


def _settings(kind: str, limits: ChildLimits) -> dict[str, str]:
    """File name -> value for one group; a kernel may lack the bandwidth files of cpu."""
    memory, processes = str(limits.memory_bytes), str(limits.processes)
    quota = str(int(limits.cpu_cores * _PERIOD_MICROSECONDS))
    if kind == "v2":
        return {"memory.max": memory, "pids.max": processes, "cpu.max": f"{quota} {_PERIOD_MICROSECONDS}"}
    return {
        "memory": {"memory.limit_in_bytes": memory},
        "pids": {"pids.max": processes},
        "cpu": {"cpu.cfs_quota_us": quota},
    }[kind]


def _open() -> dict[str, Path]:
    """The parent folders with the cpu controller where it can be had, else without it; {} when others are missing."""
    for wanted in ((*_NEEDED, "cpu"), _NEEDED):
        try:
            folders = open_folders(_NAME, wanted)
        except OSError:
            if wanted == _NEEDED:
                raise
            continue
        if "v2" in folders or set(_NEEDED) <= set(folders):
            return folders
        for folder in folders.values():
            remove_folder(folder)
    return {}
