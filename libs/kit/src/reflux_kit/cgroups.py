"""Owns where a process may make control groups (v2 or v1): folders NAME-PID below its own group, one per hierarchy.

A folder is called "v2", or after its controller in v1. What a killed process left is removed by the next one.
"""

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path


def open_folders(name: str, controllers: Sequence[str]) -> dict[str, Path]:
    """Makes the folders: "v2" where it hands all controllers down, else those of v1 that there are.

    Raises:
        OSError: this user may not write there.
    """
    folders: dict[str, Path] = {}
    for kind, parent in _own(controllers).items():
        for stale in parent.glob(f"{name}-*"):
            owner = stale.name.removeprefix(f"{name}-")
            if owner.isdigit() and not Path(f"/proc/{owner}").exists():
                remove_folder(stale)
        folder = parent / f"{name}-{os.getpid()}"
        folder.mkdir(exist_ok=True)
        if kind == "v2":
            (folder / "cgroup.subtree_control").write_text(" ".join(f"+{each}" for each in controllers))
        folders[kind] = folder
    return folders


def remove_folder(folder: Path) -> None:
    """Removes a folder and the groups in it; those that still have processes stay."""
    for group in folder.iterdir() if folder.is_dir() else ():
        if group.is_dir():
            with contextlib.suppress(OSError):
                group.rmdir()
    with contextlib.suppress(OSError):
        folder.rmdir()


def memory_kills(folders: Mapping[str, Path], group: str) -> int:
    """How often the kernel has killed for memory in a group so far."""
    for kind, name in (("v2", "memory.events"), ("memory", "memory.oom_control")):
        if kind in folders:
            with contextlib.suppress(OSError):
                lines = (folders[kind] / group / name).read_text().splitlines()
                return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    return 0


def _own(controllers: Sequence[str]) -> dict[str, Path]:
    """The caller's own folder per usable hierarchy."""
    paths: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        paths |= dict.fromkeys(names.split(","), path)  # The name of v2 is empty.
    found: dict[str, Path] = {}
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount_point, kind, options, *_ = line.split()
        if kind == "cgroup2" and set(controllers) <= _handed_down(Path(mount_point + paths.get("", "/"))):
            return {"v2": Path(mount_point + paths.get("", "/"))}
        if kind == "cgroup":
            for controller in set(controllers) & set(options.split(",")):
                found.setdefault(controller, Path(mount_point + paths.get(controller, "/")))
    return found


def _handed_down(own: Path) -> set[str]:
    """Controllers that a child group of `own` gets; a group with processes cannot hand any down, except the root."""
    with contextlib.suppress(OSError):
        return set((own / "cgroup.subtree_control").read_text().split())
    return set()
