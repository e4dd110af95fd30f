"""Control groups for the cells of children (v2 or v1), where we may write them; elsewhere only rlimits hold."""

from dataclasses import dataclass, field
from pathlib import Path

from reflux_kit.cgroups import memory_kills, open_folders, remove_folder

_NAME = "reflux-sandbox"
_CONTROLLERS = ("memory", "pids")


@dataclass
class CellGroups:
    """One group per cell and hierarchy, made on `create`, removed on `close`."""

    parents: dict[str, Path] = field(default_factory=dict)
    """"v2", or "memory" and "pids" of v1."""
    reason: str = ""

    @classmethod
    def create(cls, cells: int, memory_bytes: int, processes: int) -> "CellGroups":
        """Makes the groups; without permission it has no parents and `reason` says why."""
        try:
            groups = cls(open_folders(_NAME, _CONTROLLERS))
            if "v2" not in groups.parents and set(groups.parents) != set(_CONTROLLERS):
                groups.close()
                groups.parents = {}
            for number in range(cells):
                groups._make_cell(number, memory_bytes, processes)
        except OSError as error:
            return cls(reason=f"no cgroups: {error.strerror} ({error.filename})")
        if not groups.parents:
            groups.reason = "no cgroups: no writable memory and pids controllers"
        else:
            groups.reason = f"cgroup limits on memory and processes ({', '.join(sorted(groups.parents))})"
        return groups

    def _make_cell(self, number: int, memory_bytes: int, processes: int) -> None:
        for kind, parent in self.parents.items():
            folder = parent / f"cell-{number}"
            folder.mkdir()
            if kind in ("v2", "memory"):
                name = "memory.max" if kind == "v2" else "memory.limit_in_bytes"
                (folder / name).write_text(str(memory_bytes))
            if kind in ("v2", "pids"):
                (folder / "pids.max").write_text(str(processes))

    def procs(self, number: int) -> tuple[str, ...]:
        """Files through which a process joins the groups of a cell."""
        return tuple(str(parent / f"cell-{number}" / "cgroup.procs") for parent in self.parents.values())

    def memory_kills(self, number: int) -> int:
        """How often the kernel has killed for memory in this cell so far."""
        return memory_kills(self.parents, f"cell-{number}")

    def close(self) -> None:
        """Removes the groups; they are empty because their children are dead."""
        for parent in self.parents.values():
            remove_folder(parent)
