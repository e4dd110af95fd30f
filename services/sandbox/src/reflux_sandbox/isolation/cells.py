"""Cells: what one child is given while it lives - a user id of its own and control groups - and its successor later."""

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from reflux_sandbox.isolation.base import ChildLimits
from reflux_sandbox.isolation.cgroups import CellGroups

_NO_GROUPS = CellGroups()


def _first_user_id() -> int:
    """User ids that nobody else has, where the id map allows them; different for each service process on a machine."""
    mapped = sum(int(line.split()[2]) for line in Path("/proc/self/uid_map").read_text().splitlines())
    return 1_000_000 + (os.getpid() % 4096) * 256 if mapped > 1 << 22 else 59_000


class Cells:
    """Free numbers; each is with one child at a time. `open` makes the groups, `close` removes them."""

    def __init__(self, limits: ChildLimits) -> None:
        self.limits = limits
        self._groups = _NO_GROUPS
        self._first_user_id = _first_user_id()
        self._free: list[int] = []
        self._made = 0

    @property
    def reason(self) -> str:
        return self._groups.reason

    def open(self) -> None:
        """Looks for control groups."""
        self._groups = CellGroups.create()

    def add(self, count: int) -> None:
        """Makes further cells; without permission to limit them they have no groups, and `reason` says why."""
        try:
            self._groups.add(count, self.limits)
        except OSError as error:
            self._groups.close()
            self._groups = CellGroups(reason=f"no cgroups: {error.strerror} ({error.filename})")
        self._free += range(self._made, self._made + count)
        self._made += count

    def take(self) -> int | None:
        """A free cell, the one that rested longest; None when all are in use."""
        return self._free.pop(0) if self._free else None

    def give_back(self, cell: int) -> None:
        """Its child is gone."""
        self._free.append(cell)

    def user_id(self, cell: int) -> int:
        return self._first_user_id + cell

    def procs(self, cell: int) -> tuple[str, ...]:
        """`cgroup.procs` files of a cell; empty without cgroups."""
        return self._groups.procs(cell)

    @contextmanager
    def opened(self, cell: int) -> Iterator[list[int]]:
        """Descriptors through which a process joins the groups of a cell."""
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(Path(path).open("wb", buffering=0)) for path in self.procs(cell)]
            yield [file.fileno() for file in files]

    def counts_since(self, cell: int) -> Callable[[], tuple[int, int]]:
        """Counts what the kernel kills for memory, and the processes that it refuses, in a cell from now on."""
        groups = self._groups
        kills, refusals = groups.memory_kills(cell), groups.process_refusals(cell)
        return lambda: (groups.memory_kills(cell) - kills, groups.process_refusals(cell) - refusals)

    def close(self) -> None:
        """Removes the groups; no child lives."""
        self._groups.close()
