"""One supervised child process: start, log, watch, restart with a bound, stop with its whole group."""

import asyncio
import ctypes
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
_WINDOW_SECONDS = 600.0
STARTUP_ERROR_STATUS = 2


class StackError(RuntimeError):
    """The stack cannot go on; the message says which process and why."""


@dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    """What to run and when it counts as up."""

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    ready: Callable[[], Awaitable[None]]
    """Returns when the process serves; raises TimeoutError when it does not in time."""
    max_restarts: int = 20
    """Restarts within 10 minutes before the stack gives up."""


def _die_with_parent() -> None:
    # A supervisor that is killed -9 must leave no process behind.
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass
class Supervised:
    """Keeps one process alive until `stop`."""

    spec: ProcessSpec
    log_path: Path
    on_restart: Callable[[], None]
    process: asyncio.subprocess.Process | None = None
    restarts: int = 0
    _stopping: bool = False
    _starts: deque[float] = field(default_factory=deque)

    async def start(self) -> None:
        """Starts the process and waits until it is ready. Raises `StackError` with its last words if it ends."""
        await self._spawn()
        assert self.process is not None
        ended = asyncio.ensure_future(self.process.wait())
        ready = asyncio.ensure_future(self.spec.ready())
        try:
            await asyncio.wait((ended, ready), return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                raise StackError(f"{self.spec.name} ended at start with status {ended.result()}: {self._last_words()}")
            try:
                ready.result()
            except TimeoutError:
                raise StackError(f"{self.spec.name} did not become ready: see {self.log_path}") from None
        finally:
            ended.cancel()
            ready.cancel()

    async def watch(self) -> None:
        """Restarts the process whenever it ends, until `stop`. Raises `StackError` beyond the bound."""
        while True:
            assert self.process is not None
            status = await self.process.wait()
            if self._stopping:
                return
            self._kill_group()
            delay = self._next_delay()
            log.warning("%s ended with status %s; restart in %.1f s", self.spec.name, status, delay)
            await asyncio.sleep(delay)
            if self._stopping:
                return
            self.restarts += 1
            await self._spawn()
            self.on_restart()

    async def stop(self, grace_seconds: float) -> None:
        """SIGTERM, grace, SIGKILL of the process group."""
        self._stopping = True
        process = self.process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), grace_seconds)
        except TimeoutError:
            log.warning("%s did not stop within %.0f s: killing it", self.spec.name, grace_seconds)
        self._kill_group()
        await process.wait()

    async def _spawn(self) -> None:
        with self.log_path.open("ab") as output:
            self.process = await asyncio.create_subprocess_exec(
                *self.spec.argv,
                env=dict(self.spec.environment),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    def _kill_group(self) -> None:
        assert self.process is not None
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    def _next_delay(self) -> float:
        now = time.monotonic()
        self._starts.append(now)
        while self._starts and now - self._starts[0] > _WINDOW_SECONDS:
            self._starts.popleft()
        if len(self._starts) > self.spec.max_restarts:
            raise StackError(
                f"{self.spec.name} ended {len(self._starts)} times within 10 minutes, the last time with: "
                f"{self._last_words()} (log: {self.log_path})"
            )
        return min(5.0, 0.1 * 2.0 ** (len(self._starts) - 1))

    def _last_words(self) -> str:
        lines = [line for line in self.log_path.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else "it wrote nothing"
