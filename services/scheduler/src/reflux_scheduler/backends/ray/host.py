"""Owns the actor that is the parent of one agent inside a grant: one per bundle, on the bundle's node.

The agent hangs on a keeper (agent/keeper.py), whose pipe closes when the actor's process goes away however it goes:
killed by Ray with its placement group, by the end of its raylet, by the kernel. Nothing below it outlives it.
The environment, which holds the stack secret, arrives as the argument of a method call: such arguments go from process
to process, while those of a constructor and a runtime environment are kept by Ray and shown on its dashboard.
"""

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from reflux_scheduler.agent.process import RoleProcess

_LOG_LIMIT_BYTES = 4 << 20
_KEPT_LOGS = 20
_TAIL_BYTES = 2048
_MAX_LINE = 300


class AgentHost:
    """Holds at most one agent. An asyncio actor: calls overlap, `ended` may be waited for by several drivers."""

    def __init__(self) -> None:
        self._process: RoleProcess | None = None
        self._end: asyncio.Task[str] | None = None
        self._lock = asyncio.Lock()

    async def start(self, argv: Sequence[str], environment: Mapping[str, str], label: str) -> int:
        """Starts the agent once and returns its pid; `label` names its log. Raises OSError when it cannot be executed.

        REFLUX_STATE_DIR of the environment, or the folder that the agent takes by itself, is where it starts.
        """
        async with self._lock:
            if self._process is None:
                await self._start(argv, environment, label)
        assert self._process is not None
        return self._process.pid

    async def ended(self) -> str:
        """Waits for the agent's end and says how it ended."""
        if self._end is None:
            return "it was never started"
        # Several drivers may wait, and one that goes away must not take the end from the others.
        return await asyncio.shield(self._end)

    async def stop(self, grace_seconds: float) -> None:
        """Ends the agent with everything below it: SIGTERM, after the grace SIGKILL."""
        if self._process is not None:
            self._process.stop(grace_seconds)
            await self.ended()

    async def _start(self, argv: Sequence[str], environment: Mapping[str, str], label: str) -> None:
        merged = node_environment() | dict(environment)
        # A venv that is not activated has its commands beside its interpreter.
        merged["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), merged.get("PATH", os.defpath)])
        folder = Path(merged.get("REFLUX_STATE_DIR") or f"{tempfile.gettempdir()}/reflux-{os.getuid()}")
        logs = folder / "agents"
        logs.mkdir(parents=True, exist_ok=True)
        _prune(logs)
        log_path = logs / f"{label}.log"
        self._process = await RoleProcess.start(tuple(argv), merged, folder, log_path, _LOG_LIMIT_BYTES)
        self._end = asyncio.create_task(self._watch(self._process, log_path))

    @staticmethod
    async def _watch(process: RoleProcess, log_path: Path) -> str:
        code = await process.wait()
        try:
            text = log_path.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
        except OSError:
            text = ""
        lines = text.strip().splitlines()
        said = f"; last output: {lines[-1][:_MAX_LINE]}" if lines else ""
        return f"its agent ended with status {code}{said}"


def node_environment() -> dict[str, str]:
    """The environment that the node's raylet was started with. Ray's own additions to a worker's (a thread limit, no
    visible GPU, a debugger) are not for the agent, whose members would inherit them."""
    try:
        pairs = Path(f"/proc/{os.environ['RAY_RAYLET_PID']}/environ").read_bytes().split(b"\0")
    except (KeyError, OSError):
        inherited = dict(os.environ)
    else:
        inherited = dict(pair.decode(errors="replace").split("=", 1) for pair in pairs if b"=" in pair)
    return {name: value for name, value in inherited.items() if not name.startswith("RAY_")}


def _prune(logs: Path) -> None:
    """Keeps the newest logs. Agents of one machine may do this at the same time: a file may be gone already."""
    aged: list[tuple[float, Path]] = []
    for path in logs.glob("*.log"):
        with contextlib.suppress(OSError):
            aged.append((path.stat().st_mtime, path))
    for _, path in sorted(aged)[:-_KEPT_LOGS]:
        path.unlink(missing_ok=True)
        path.with_name(path.name + ".1").unlink(missing_ok=True)
