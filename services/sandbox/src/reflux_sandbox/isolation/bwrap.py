"""Children in bubblewrap: namespaces and a read-only tree by its hand, then our Landlock, seccomp and limits.

Needs the program `bwrap` (>= 0.8) and either root, user namespaces, or a bwrap that is setuid.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from reflux_sandbox.isolation import landlock, syscalls, tree
from reflux_sandbox.isolation.base import IsolationUnavailable, Tier
from reflux_sandbox.isolation.plain import PlainConfig
from reflux_sandbox.isolation.spawned import Launch, SpawnedIsolation
from reflux_sandbox.isolation.template import ENVIRONMENT

_WALLS = (
    *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
    *("--die-with-parent", "--as-pid-1", "--new-session", "--hostname", "sandbox", "--cap-drop", "ALL"),
)
_AS_ROOT = ("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")
"""Root becomes the cell's own user inside: a user namespace would only give root another name."""
_AS_USER = ("--unshare-user", "--disable-userns", "--uid", "65534", "--gid", "65534")
_MASKED = tuple(
    f"/proc/{name}"
    for name in (
        "sys",
        "acpi",
        "fs",
        "bus",
        "irq",
        "scsi",
        "kcore",
        "kmsg",
        "keys",
        "key-users",
        "timer_list",
        "config.gz",
    )
    if Path("/proc", name).exists()
)
"""What bwrap's /proc shows of the host beyond the own processes: hidden by empty folders and files."""


class BwrapIsolation(SpawnedIsolation):
    """A started interpreter per child: slower to refill than prefork, but no memory of a warm parent is shared."""

    name = "bwrap"
    tier = Tier.BWRAP

    @property
    def reasons(self) -> list[str]:
        abi = landlock.abi()
        fixed = [
            "bubblewrap: all namespaces, no capabilities, a read-only tree, private tmpfs with a cap",
            f"Landlock ABI {abi}: writes to private folders only" if abi else "no Landlock in this kernel",
            "seccomp allow-list; no exec for model-written code and plain verifiers; no sockets",
            self.cells.reason,
        ]
        return fixed + self.notes

    def check(self) -> None:
        if not syscalls.supported():
            raise IsolationUnavailable(f"no system call table for {os.uname().machine}")
        if shutil.which("bwrap") is None:
            raise IsolationUnavailable("bwrap is not installed (Debian package bubblewrap)")
        trial = subprocess.run([*self._wrapped, "/bin/true"], capture_output=True, text=True, timeout=30)
        if trial.returncode != 0:
            raise IsolationUnavailable(trial.stderr.strip() or f"bwrap ends with {trial.returncode}")

    @cached_property
    def _wrapped(self) -> list[str]:
        """bwrap with everything but the program."""
        command = ["bwrap", *_WALLS, *(_AS_ROOT if os.geteuid() == 0 else _AS_USER)]
        for path, link in tree.shown((self.config.cache_folder, *self.config.import_folders)):
            command += ["--symlink", link, path] if link else ["--ro-bind", path, path]
        command += ["--proc", "/proc", "--dev", "/dev"]
        for path in _MASKED:
            command += ["--tmpfs", path] if Path(path).is_dir() else ["--ro-bind-try", "/dev/null", path]
        for folder in tree.WRITABLE:
            command += ["--size", str(self.limits.disk_bytes), "--perms", "0777", "--tmpfs", folder]
        for path in tree.kept_below_writable((self.config.cache_folder, *self.config.import_folders)):
            command += ["--ro-bind", path, path]
        command += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", tree.WRITABLE[0], "--clearenv"]
        for name, value in ENVIRONMENT.items():
            command += ["--setenv", name, value]
        return command

    def command(self, launch: Launch, config: PlainConfig) -> list[str]:
        inside = replace(config, around="bwrap", user_id=self.cells.user_id(launch.cell) if os.geteuid() == 0 else 0)
        program = [sys.executable, "-I", "-m", "reflux_sandbox.isolation.plain", inside.to_json()]
        return [*self._wrapped, *program, *map(str, (launch.channel, launch.status, *launch.groups))]
