"""One session: a child that answers calls until its time is over, it dies, or it is closed."""

import asyncio
import base64
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from reflux_kit.errors import CapacityExhausted, InvalidRequest, NotFound
from reflux_sandbox.endings import cause, describe
from reflux_sandbox.isolation.handle import ChildHandle, Ending

ExecStatus = Literal[
    "ok", "exception", "timeout", "memory", "pids", "disk", "output", "policy", "cpu", "signal", "exited", "infra_error"
]
_ALIVE: tuple[ExecStatus, ...] = ("ok", "exception", "timeout", "memory", "pids", "disk")
_REPORTED: dict[str, ExecStatus] = {status: status for status in _ALIVE}
"""What the interpreter of a session that lives on can say."""

_BROKEN = "broken: its code spoke on the service's channel"
_GRACE_SECONDS = 2.0
"""How long an interrupted call may take to react."""
_READY_SECONDS = 30.0
_FILE_SECONDS = 30.0
_LAST_WORDS_SECONDS = 2.0

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class SessionLimits:
    """Of one session; seconds count from ready."""

    idle_seconds: float
    ttl_seconds: float
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class ExecResult:
    """How one call ended; `ended_cause` is empty while the session lives."""

    status: ExecStatus
    stdout: bytes
    stderr: bytes
    output_truncated: bool
    wall_seconds: float
    ended_cause: str


class _Lost(Exception):
    """The child is gone or broken; the session has ended."""


class Session:
    """Owns its child. Calls run one after the other; a caller that goes away does not stop its call.

    `on_end` is called once with the cause.
    """

    def __init__(self, name: str, run: str, child: ChildHandle, limits: SessionLimits, on_end: Callable[[str], None]):
        self.name = name
        self.run = run
        self.execs = 0
        self._child = child
        self._limits = limits
        self._cpu_seconds = int(limits.ttl_seconds) + 1
        self._on_end = on_end
        self._lock = asyncio.Lock()
        self._requests = 0
        self._ready_at = self._touched_at = time.monotonic()
        self._ending: asyncio.Task[Ending] | None = None
        self._ended_cause = ""
        self._guard: asyncio.Task[None] | None = None
        self._calls: set[asyncio.Task[Any]] = set()

    async def make_ready(self) -> None:
        """Tells the child what it is; time counts from here on. Raises ConnectionError when it dies at that."""
        limits = {"memory_bytes": self._limits.memory_bytes, "cpu_seconds": self._cpu_seconds}
        await self._child.send({"profile": "session", **limits})
        try:
            async with asyncio.timeout(_READY_SECONDS):
                greeting = await self._child.receive()
        except TimeoutError:
            greeting = None
        if greeting != {"ready": True}:
            raise ConnectionError("the session's child did not become ready")
        self._ready_at = self._touched_at = time.monotonic()
        self._guard = asyncio.create_task(self._watch())

    @property
    def age_seconds(self) -> float:
        return time.monotonic() - self._ready_at

    @property
    def idle_left_seconds(self) -> float:
        idle = 0.0 if self._lock.locked() else time.monotonic() - self._touched_at
        return max(0.0, self._limits.idle_seconds - idle)

    @property
    def left_seconds(self) -> float:
        return max(0.0, self._limits.ttl_seconds - self.age_seconds)

    async def exec(self, code: str, seconds: float) -> ExecResult:
        """Runs text; a session that ends at that says so in the result. Raises NotFound when it had ended before."""
        return await self._call(lambda: self._exec(code, seconds))

    async def write(self, path: str, data: bytes, *, append: bool) -> int:
        """Writes a file; its size. Raises InvalidRequest for a path that leads out, CapacityExhausted for no room."""
        request = {"op": "write", "path": path, "data": base64.b64encode(data).decode(), "append": append}
        answer = await self._call(lambda: self._file_request(request))
        try:
            return max(0, int(answer["size"]))
        except (KeyError, TypeError, ValueError):
            raise await self._broken() from None

    async def read(self, path: str, offset: int, most: int) -> tuple[bytes, int]:
        """Part of a file, and its size. Raises NotFound without such a file, InvalidRequest for a bad path."""
        request = {"op": "read", "path": path, "offset": offset, "most": most}
        answer = await self._call(lambda: self._file_request(request))
        try:
            return base64.b64decode(answer["data"], validate=True)[:most], max(0, int(answer["size"]))
        except (KeyError, TypeError, ValueError):
            raise await self._broken() from None

    async def _broken(self) -> NotFound:
        await self.end(_BROKEN)
        return gone(self.name, self._ended_cause)

    async def end(self, why: str = "") -> Ending:
        """Kills the child and everything in it; the first cause counts. Without one the child's own end is it."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._finish(why))
        return await asyncio.shield(self._ending)

    async def _finish(self, why: str) -> Ending:
        ending = await self._child.end()
        self._ended_cause = why or describe("died: its interpreter", ending, self._cpu_seconds)
        if self._guard is not None:
            self._guard.cancel()
        self._on_end(self._ended_cause)
        return ending

    async def _call(self, work: Callable[[], Awaitable[T]]) -> T:
        """One at a time, to its end: an answer that nobody takes would be the next call's."""
        task = asyncio.create_task(self._locked(work))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return await asyncio.shield(task)

    async def _locked(self, work: Callable[[], Awaitable[T]]) -> T:
        async with self._lock:
            if self._ending is not None:
                await self.end()
                raise gone(self.name, self._ended_cause)
            try:
                return await work()
            except _Lost:
                raise gone(self.name, self._ended_cause) from None
            finally:
                self._touched_at = time.monotonic()

    async def _exec(self, code: str, seconds: float) -> ExecResult:
        self.execs += 1
        start = time.monotonic()
        request = {"op": "exec", "code": code, "seconds": seconds, "number": self.execs}
        try:
            answer = await self._ask(request, seconds + _GRACE_SECONDS)
            status = _REPORTED.get(str(answer.get("status")), "infra_error")
        except _Lost:
            status = await self._status_of_death()
        stdout, stdout_cut = self._child.stdout.take()
        stderr, stderr_cut = self._child.stderr.take()
        return ExecResult(
            status=status,
            stdout=stdout,
            stderr=stderr,
            output_truncated=stdout_cut or stderr_cut,
            wall_seconds=time.monotonic() - start,
            ended_cause=self._ended_cause,
        )

    async def _status_of_death(self) -> ExecStatus:
        ending = await self.end()
        if self._ended_cause == _BROKEN:  # whether it was killed or left by itself is a matter of time
            return "infra_error"
        late = self._ended_cause.startswith(("timeout", "ttl"))
        status = cause(ending, timed_out=late, cpu_limit_seconds=self._cpu_seconds)
        return "exited" if status in ("ok", "nonzero") else status

    async def _file_request(self, request: dict[str, Any]) -> dict[str, Any]:
        answer = await self._ask(request, _FILE_SECONDS)
        kind, message = answer.get("error"), f"{str(request['path'])[:200]!r}: {str(answer.get('message'))[:200]}"
        if kind == "missing":
            raise NotFound(message)
        if kind == "disk":
            raise CapacityExhausted(f"the session's disk is full: {message}")
        if kind is not None:
            raise InvalidRequest(f"path is refused: {message}")
        return answer

    async def _ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The child's answer; else ends the session and raises _Lost."""
        self._requests += 1
        try:
            async with asyncio.timeout(seconds):
                await self._child.send({"id": self._requests, **request})
                answer = await self._child.receive()
        except TimeoutError:
            await self.end("timeout: the session did not react to its interrupt")
            raise _Lost from None
        except ConnectionError:  # what came is no frame
            answer = {}
        if answer is None:
            with contextlib.suppress(TimeoutError):  # its supervisor is about to say how it ended
                async with asyncio.timeout(_LAST_WORDS_SECONDS):
                    await self._child.until_dead()
            await self.end()
            raise _Lost
        if answer.get("id") != self._requests:
            await self.end(_BROKEN)
            raise _Lost
        return answer

    async def _watch(self) -> None:
        """Ends the session when its time is over or its child dies between calls."""
        while True:
            if self.left_seconds <= 0:
                await self.end(f"ttl: it lived its {self._limits.ttl_seconds:g} s")
            elif self.idle_left_seconds <= 0:
                await self.end(f"idle: no call for {self._limits.idle_seconds:g} s")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(self.left_seconds, self.idle_left_seconds)):
                    await self._child.until_dead()
                await self.end()


def gone(name: str, why: str) -> NotFound:
    """What a call to a session that has ended is told."""
    return NotFound(f"{name} has ended: {why}", cause=why)
