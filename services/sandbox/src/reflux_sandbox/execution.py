"""One piece of work in one child: code that a model wrote, or a batch for one verifier. Few causes end it."""

import asyncio
import contextlib
import secrets
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from reflux_sandbox.endings import Status, cause, describe
from reflux_sandbox.isolation.base import Isolation, Profile
from reflux_sandbox.isolation.handle import ChildHandle

_SIGKILL = 9
_SPARE_CPU_SECONDS = 2
_LAST_WORDS_SECONDS = 2.0
_NEWS_AT_ONCE, _NEWS_PER_SECOND = 100, 10
"""Reports of progress that a job may send: a child that nobody has taken over sends two a second."""


@dataclass(frozen=True, kw_only=True)
class CodeRequest:
    """Python text and its limits."""

    code: str
    wall_seconds: float
    memory_bytes: int
    cpu_seconds: int = 0
    """Per process; 0: somewhat more than the wall clock allows one core."""


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
    cpu_seconds = request.cpu_seconds or int(request.wall_seconds) + _SPARE_CPU_SECONDS
    timed_out = False
    try:
        await child.send(
            {"profile": "code", "code": request.code, "memory_bytes": request.memory_bytes, "cpu_seconds": cpu_seconds}
        )
        async with asyncio.timeout(request.wall_seconds):
            await child.until_dead()
    except TimeoutError:
        timed_out = True
    finally:
        ending = await child.end()
    return CodeResult(
        status=cause(ending, timed_out=timed_out, cpu_limit_seconds=cpu_seconds),
        exit_code=-_SIGKILL if ending.exit_code is None else ending.exit_code,
        stdout=child.stdout.kept,
        stderr=child.stderr.kept,
        output_truncated=child.stdout.truncated or child.stderr.truncated,
        wall_seconds=time.monotonic() - start,
        cpu_seconds=ending.cpu_seconds,
    )


class SessionLost(ConnectionError):
    """The child died in the middle of a job, for `memory` when the kernel killed it for that; the reward is unknown."""

    def __init__(self, message: str, *, memory: bool = False) -> None:
        super().__init__(message)
        self.memory = memory


class GradeSession:
    """A child that serves one batch of one verifier: jobs one after the other, answers bound to a nonce.

    Use as a context manager; leaving it ends the child. After an error the session is over.
    """

    def __init__(
        self, isolation: Isolation, profile: Profile, memory_bytes: int, cpu_seconds: int, *, family: str
    ) -> None:
        """`family` names the verifiers that the child must have (`VerifierInfo.family`)."""
        self._isolation = isolation
        self._family = family
        self._request = {"profile": profile, "memory_bytes": memory_bytes, "cpu_seconds": cpu_seconds}
        self._nonce = secrets.token_hex(16)
        self._child: ChildHandle | None = None
        self.progress = 0.0
        """How far the present job has come by the verifier's own account, 0 to 1."""

    async def __aenter__(self) -> Self:
        self._child = await self._isolation.acquire(self._family)
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
        self.progress, heard, began = 0.0, 0, time.monotonic()
        await self._child.send({"verifier": verifier, "payload": payload, "answers": answers})
        while (news := (answer := await self._frame()).get("progress")) is not None:
            if isinstance(news, int | float) and 0 <= news <= 1:
                self.progress = max(self.progress, float(news))
            heard += 1
            if heard > _NEWS_AT_ONCE + _NEWS_PER_SECOND * (time.monotonic() - began):
                raise SessionLost("the child floods its channel with reports of progress")
        return answer

    async def _frame(self) -> dict[str, Any]:
        assert self._child is not None, "entered first"
        answer = await self._child.receive()
        if answer is None:
            with contextlib.suppress(TimeoutError):  # its supervisor is about to say how it ended
                async with asyncio.timeout(_LAST_WORDS_SECONDS):
                    await self._child.until_dead()
            ending = await self._child.end()
            text = self._child.stderr.kept.decode(errors="replace").strip()[-500:]
            why = describe("the verifier", ending, int(self._request["cpu_seconds"]), text)
            raise SessionLost(why, memory=bool(ending.memory_kills))
        if answer.pop("nonce", None) != self._nonce:
            raise SessionLost("the child's answer does not carry this session's nonce")
        return answer
