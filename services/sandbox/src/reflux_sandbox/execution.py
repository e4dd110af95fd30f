"""One piece of work in one child: code that a model wrote, or a batch for one verifier. Few causes end it."""

import asyncio
import contextlib
import secrets
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

from reflux_sandbox.isolation.base import Isolation, Profile
from reflux_sandbox.isolation.handle import ChildHandle, Ending
from reflux_sandbox.isolation.worker import MEMORY_SIGNAL, PIDS_SIGNAL

Status = Literal["ok", "nonzero", "signal", "timeout", "memory", "pids", "infra_error"]

_SIGKILL, _SIGXCPU = 9, 24
_LAST_WORDS_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True)
class CodeRequest:
    """Python text and its limits."""

    code: str
    wall_seconds: float
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class CodeResult:
    """How a run ended. `exit_code` is negative for a signal; output is what fitted under the cap."""

    status: Status
    exit_code: int
    stdout: bytes
    stderr: bytes
    output_truncated: bool
    wall_seconds: float
    cpu_seconds: float


async def run_code(child: ChildHandle, request: CodeRequest) -> CodeResult:
    """Runs untrusted text in `child` and uses it up. Processor time is capped near the wall-clock limit."""
    start = time.monotonic()
    timed_out = False
    try:
        await child.send(
            {
                "profile": "code",
                "code": request.code,
                "memory_bytes": request.memory_bytes,
                "cpu_seconds": int(request.wall_seconds) + 2,
            }
        )
        async with asyncio.timeout(request.wall_seconds):
            await child.until_dead()
    except TimeoutError:
        timed_out = True
    finally:
        ending = await child.end()
    return CodeResult(
        status=_status(ending, timed_out),
        exit_code=-_SIGKILL if ending.exit_code is None else ending.exit_code,
        stdout=child.stdout.kept,
        stderr=child.stderr.kept,
        output_truncated=child.stdout.truncated or child.stderr.truncated,
        wall_seconds=time.monotonic() - start,
        cpu_seconds=ending.cpu_seconds,
    )


def _status(ending: Ending, timed_out: bool) -> Status:
    code = ending.exit_code
    if timed_out or code == -_SIGXCPU:
        return "timeout"
    if code == -MEMORY_SIGNAL or (ending.memory_kills and code != 0):
        return "memory"
    if code is None:
        return "infra_error"
    if code == -PIDS_SIGNAL:
        return "pids"
    if code < 0:
        return "signal"
    return "ok" if code == 0 else "nonzero"


class SessionLost(ConnectionError):
    """The child died in the middle of a job, for `memory` when the kernel killed it for that; the reward is unknown."""

    def __init__(self, message: str, *, memory: bool = False) -> None:
        super().__init__(message)
        self.memory = memory


class GradeSession:
    """A child that serves one batch of one verifier: jobs one after the other, answers bound to a nonce.

    Use as a context manager; leaving it ends the child. After an error the session is over.
    """

    def __init__(self, isolation: Isolation, profile: Profile, memory_bytes: int, cpu_seconds: int) -> None:
        self._isolation = isolation
        self._request = {"profile": profile, "memory_bytes": memory_bytes, "cpu_seconds": cpu_seconds}
        self._nonce = secrets.token_hex(16)
        self._child: ChildHandle | None = None

    async def __aenter__(self) -> Self:
        self._child = await self._isolation.acquire()
        try:
            await self._child.send({**self._request, "nonce": self._nonce})
        except BaseException:  # the child is ours already: a cancelled start must not leak it
            await self._child.end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._child is not None, "entered first"
        await self._child.end()

    async def grade(self, verifier: str, payload: str, answers: list[str]) -> dict[str, Any]:
        """The child's answer: {"grades": [...]} or {"error": kind, "message": text}. Raises SessionLost when it died.

        A TimeoutError of the caller leaves the child hanging in the job: leave the session, which kills it.
        """
        assert self._child is not None, "entered first"
        await self._child.send({"verifier": verifier, "payload": payload, "answers": answers})
        answer = await self._child.receive()
        if answer is None:
            with contextlib.suppress(TimeoutError):  # its supervisor is about to say how it ended
                async with asyncio.timeout(_LAST_WORDS_SECONDS):
                    await self._child.until_dead()
            ending = await self._child.end()
            text = self._child.stderr.kept.decode(errors="replace").strip()[-500:]
            raise SessionLost(_why(ending, text), memory=bool(ending.memory_kills))
        if answer.pop("nonce", None) != self._nonce:
            raise SessionLost("the child's answer does not carry this session's nonce")
        return answer


def _why(ending: Ending, text: str) -> str:
    if ending.memory_kills:
        return "the verifier was killed for memory"
    how = "was killed" if ending.exit_code is None else f"ended with {ending.exit_code}"
    return f"the verifier's child {how}: {text}" if text else f"the verifier's child {how}"
