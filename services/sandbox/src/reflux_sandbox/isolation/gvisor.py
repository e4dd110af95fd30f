"""Children in gVisor: a kernel of their own in user space (runsc, platform ptrace), so no call reaches the host's.

Source: gVisor's documentation (runsc do; networking "none"). Debian's package runsc; needs root for its mounts.
"""

import json
import os
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from reflux_sandbox.isolation import syscalls
from reflux_sandbox.isolation.base import ChildLimits, IsolationUnavailable, Tier
from reflux_sandbox.isolation.cells import Cells
from reflux_sandbox.isolation.plain import PlainConfig
from reflux_sandbox.isolation.spawned import Launch, SpawnedIsolation
from reflux_sandbox.isolation.template import make_mount_point

_KERNEL_PROCESSES = 192
"""Processes and threads of gVisor itself (its kernel, file server and stubs) in a child's control group."""
_KERNEL_BYTES = 256 << 20
_NOBODY = 65534


class GvisorIsolation(SpawnedIsolation):
    """The strongest tier, for native code and long runs: half a second to start, system calls cost more."""

    name = "gvisor"
    tier = Tier.GVISOR
    says_status = False

    def __init__(self, *, limits: ChildLimits, **options: Any) -> None:
        super().__init__(limits=limits, **options)
        roomier = replace(
            limits,
            processes=limits.processes + _KERNEL_PROCESSES,
            memory_bytes=limits.memory_bytes + _KERNEL_BYTES,
        )
        self.cells = Cells(roomier)
        self._new_root = ""
        self._state = ""

    @property
    def reasons(self) -> list[str]:
        fixed = [
            "gVisor: a kernel of its own in user space (ptrace), no network; inside it nobody, not root",
            "a read-only tree without host data; /box, /tmp and /dev/shm are private tmpfs",
            "seccomp allow-list; no exec for model-written code and plain verifiers; no sockets",
            self.cells.reason,
        ]
        return fixed + self.notes

    def check(self) -> None:
        if not syscalls.supported():
            raise IsolationUnavailable(f"no system call table for {os.uname().machine}")
        if shutil.which("runsc") is None:
            raise IsolationUnavailable("runsc is not installed (Debian package runsc)")
        if os.geteuid() != 0:
            raise IsolationUnavailable("runsc needs root for its mounts here")

    async def start(self) -> None:
        self.check()
        self._new_root = make_mount_point()
        self._state = _make_state_folder()
        await super().start()

    def command(self, launch: Launch, config: PlainConfig) -> list[str]:
        inside = replace(config, around="gvisor", user_id=_NOBODY)
        folders = [config.cache_folder, *config.import_folders]
        rooted = json.dumps({"new_root": self._new_root, "folders": folders, "groups": launch.groups})
        outer = [sys.executable, "-I", "-m", "reflux_sandbox.isolation.rooted", rooted]
        state = Path(self._state, str(launch.cell))
        flags = [f"--root={state}", "--network=none", "--ignore-cgroups", "--platform=ptrace"]
        runsc = ["runsc", *flags, "do", "-quiet", "-root", self._new_root, "-cwd", "/"]
        program = [sys.executable, "-I", "-m", "reflux_sandbox.isolation.plain", inside.to_json()]
        return [*outer, *runsc, *program, "0", "-1"]

    def tidy(self, cell: int) -> None:
        shutil.rmtree(Path(self._state, str(cell)), ignore_errors=True)

    async def close(self) -> None:
        await super().close()
        for folder in filter(None, (self._state, self._new_root)):
            shutil.rmtree(folder, ignore_errors=True)
        self._state = self._new_root = ""


def _make_state_folder() -> str:
    """Where runsc keeps notes on its sandboxes; those of services that were killed are removed on the way."""
    for folder in Path(tempfile.gettempdir()).glob("reflux-runsc-*-*"):
        owner = folder.name.split("-")[2]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(folder, ignore_errors=True)
    return tempfile.mkdtemp(prefix=f"reflux-runsc-{os.getpid()}-")
