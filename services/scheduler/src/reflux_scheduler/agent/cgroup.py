"""Owns the control groups of an agent's members (v2 or v1), where the agent may write them.

A member that asked for memory is killed when it goes over; CPUs are shares, so that an idle core is never kept from
whoever can use it. Without permission nothing is limited and `reason` says so.
"""

import contextlib
import logging
import re
from dataclasses import dataclass, field
from pathlib import Path

from reflux_kit.cgroups import memory_kills, open_folders, remove_folder

log = logging.getLogger(__name__)

_NAME = "reflux-agent"
_CONTROLLERS = ("memory", "cpu")
_SHARES_PER_CPU = 1024
_WEIGHT_PER_CPU = 100
_MAX_WEIGHT = 10_000
_MIN_SHARES = 2


@dataclass
class MemberGroups:
    """One folder per hierarchy, with one group per member below it."""

    folders: dict[str, Path] = field(default_factory=dict)
    """ "v2", or "memory" and "cpu" of v1."""

    reason: str = ""

    @classmethod
    def open(cls) -> "MemberGroups":
        """Makes the agent's folders and removes those that a killed agent left."""
        try:
            groups = cls(open_folders(_NAME, _CONTROLLERS))
        except OSError as error:
            return cls(reason=f"no cgroup limits: {error.strerror} ({error.filename})")
        groups.reason = f"cgroup limits ({', '.join(sorted(groups.folders))})" if groups.folders else "no cgroup limits"
        return groups

    def enter(self, role_id: str, memory_bytes: int, millicpus: int) -> tuple[str, ...]:
        """Files that a process writes its id into to join the member's groups; amounts of 0 set no limit."""
        joined: list[str] = []
        for kind, folder in self.folders.items():
            group = folder / _group_name(role_id)
            try:
                group.mkdir(exist_ok=True)
                for name, value in _limits(kind, memory_bytes, millicpus).items():
                    (group / name).write_text(value)
            except OSError as error:
                log.warning("no %s limit for %s: %s (%s)", kind, role_id, error.strerror, error.filename)
                continue
            joined.append(str(group / "cgroup.procs"))
        return tuple(joined)

    def memory_kills(self, role_id: str) -> int:
        """How often the kernel has killed for memory in a member's group so far."""
        return memory_kills(self.folders, _group_name(role_id))

    def leave(self, role_id: str) -> None:
        """Removes a member's groups once its processes are gone; others cannot be removed and stay."""
        for folder in self.folders.values():
            with contextlib.suppress(OSError):
                (folder / _group_name(role_id)).rmdir()

    def close(self) -> None:
        """Removes everything; members are gone by now."""
        for folder in self.folders.values():
            remove_folder(folder)


def _limits(kind: str, memory_bytes: int, millicpus: int) -> dict[str, str]:
    values: dict[str, str] = {}
    if memory_bytes and kind in ("v2", "memory"):
        values["memory.max" if kind == "v2" else "memory.limit_in_bytes"] = str(memory_bytes)
    if millicpus and kind == "v2":
        values["cpu.weight"] = str(min(_MAX_WEIGHT, max(1, millicpus * _WEIGHT_PER_CPU // 1000)))
    if millicpus and kind == "cpu":
        values["cpu.shares"] = str(max(_MIN_SHARES, millicpus * _SHARES_PER_CPU // 1000))
    return values


def _group_name(role_id: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "-", role_id)
