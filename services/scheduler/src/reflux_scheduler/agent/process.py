"""The agent's end of a keeper: starts one role process, waits for its end, asks for its stop."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from reflux_scheduler.agent import keeper

log = logging.getLogger(__name__)

_LEAVE_SECONDS = 5.0
KEEPER_DIED = -int(signal.SIGKILL)


class CannotStart(OSError):
    """The role's program cannot be executed."""


class RoleProcess:
    """A running role; `start` makes one."""

    def __init__(self, child: asyncio.subprocess.Process, pid: int) -> None:
        self._child = child
        self.pid = pid

    @classmethod
    async def start(
        cls,
        argv: tuple[str, ...],
        environment: Mapping[str, str],
        folder: Path,
        log_path: Path,
        log_limit_bytes: int,
        groups: tuple[str, ...] = (),
    ) -> "RoleProcess":
        """Starts `argv` in `folder`; its output goes to `log_path`. `groups` are control groups to join, as the files
        that take a process id. Raises CannotStart."""
        order = {
            "argv": [sys.executable if argv[0] == "python" else argv[0], *argv[1:]],
            "env": dict(environment),
            "cwd": str(folder),
            "log_path": str(log_path),
            "log_limit_bytes": log_limit_bytes,
            "groups": list(groups),
        }
        # A file run with -I -S starts in a few milliseconds and sees none of our packages. No preexec_fn: a fork that
        # runs Python code in a process with gRPC threads may never return.
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", str(keeper.__file__),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert child.stdin is not None
        assert child.stdout is not None
        with contextlib.ExitStack() as undo:
            # Cancelled half-way: nobody knows the role yet, and nobody else would end it.
            undo.callback(child.stdin.close)
            child.stdin.write(json.dumps(order).encode() + b"\n")
            await child.stdin.drain()
            word, _, rest = (await child.stdout.readline()).decode().strip().partition(" ")
            undo.pop_all()
        if word != "started":
            child.stdin.close()
            await child.wait()
            raise CannotStart(rest or f"{argv[0]}: the keeper ended with status {child.returncode}")
        return cls(child, int(rest))

    async def wait(self) -> int:
        """Waits until the role and everything below it is gone; the exit code, negative for a signal."""
        assert self._child.stdout is not None
        line = (await self._child.stdout.readline()).decode()
        await self._child.wait()
        if line.startswith("exited "):
            return int(line.split()[1])
        # The keeper was killed; the kernel has killed the role, its group may have members left.
        log.warning("keeper %d of process %d is gone; killing what is left of its group", self._child.pid, self.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        return KEEPER_DIED

    def stop(self, grace_seconds: float) -> None:
        """Asks for SIGTERM now and SIGKILL of the whole tree after the grace, the shortest if asked again; `wait` tells
        the end."""
        assert self._child.stdin is not None
        with contextlib.suppress(OSError, RuntimeError):
            self._child.stdin.write(f"stop {grace_seconds:.3f}\n".encode())

    def kill(self) -> None:
        """Ends the whole tree at once."""
        assert self._child.stdin is not None
        self._child.stdin.close()
