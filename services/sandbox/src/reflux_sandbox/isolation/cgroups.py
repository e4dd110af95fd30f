"""Control groups for the cells of children (v2 or v1), where we may write them; elsewhere only rlimits hold."""

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path

_NAME = "reflux-sandbox"


def _mounts() -> list[tuple[str, str, set[str]]]:
    """(kind, mount point, options) of the mounted hierarchies."""
    rows = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    return [(row[2], row[1], set(row[3].split(","))) for row in rows if row[2] in ("cgroup", "cgroup2")]


def _own_paths() -> dict[str, str]:
    """Controller -> path of the caller's own group; the key of cgroup v2 is empty."""
    paths: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            paths[controller] = path
    return paths


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
            _remove_stale()
            groups = cls(_parents())
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
        for kind, name in (("v2", "memory.events"), ("memory", "memory.oom_control")):
            if kind in self.parents:
                with contextlib.suppress(OSError):
                    lines = (self.parents[kind] / f"cell-{number}" / name).read_text().splitlines()
                    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
        return 0

    def close(self) -> None:
        """Removes the groups; they are empty because their children are dead."""
        for parent in self.parents.values():
            _remove(parent)


def _parents() -> dict[str, Path]:
    own = _own_paths()
    parents: dict[str, Path] = {}
    name = f"{_NAME}-{os.getpid()}"
    for kind, mount_point, options in _mounts():
        if kind == "cgroup":
            for controller in ("memory", "pids"):
                if controller in options and controller not in parents:
                    parents[controller] = Path(mount_point + own.get(controller, "/")) / name
        elif kind == "cgroup2" and {"memory", "pids"} <= _v2_controllers(Path(mount_point + own.get("", "/"))):
            parents = {"v2": Path(mount_point + own.get("", "/")) / name}
            break
    if "v2" not in parents and set(parents) != {"memory", "pids"}:
        return {}
    for parent in parents.values():
        parent.mkdir()
    if "v2" in parents:
        (parents["v2"] / "cgroup.subtree_control").write_text("+memory +pids")
    return parents


def _v2_controllers(own: Path) -> set[str]:
    """Controllers that a child group of `own` gets; a group with processes cannot hand any down, except the root."""
    with contextlib.suppress(OSError):
        return set((own / "cgroup.subtree_control").read_text().split())
    return set()


def _remove_stale() -> None:
    """Removes groups that a killed service left: their names carry its process id."""
    own = _own_paths()
    for kind, mount_point, options in _mounts():
        controller = next((name for name in ("memory", "pids") if name in options), "" if kind == "cgroup2" else None)
        if controller is None:
            continue
        for folder in Path(mount_point + own.get(controller, "/")).glob(f"{_NAME}-*"):
            owner = folder.name.removeprefix(f"{_NAME}-")
            if owner.isdigit() and not Path(f"/proc/{owner}").exists():
                _remove(folder)


def _remove(parent: Path) -> None:
    for cell in parent.glob("cell-*"):
        with contextlib.suppress(OSError):
            cell.rmdir()
    with contextlib.suppress(OSError):
        parent.rmdir()
