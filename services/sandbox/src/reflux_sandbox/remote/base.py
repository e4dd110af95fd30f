"""The contract of a place outside this service where jobs run, and of a session of work in it."""

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Any, Protocol, Self

from reflux_sandbox.isolation.base import VerifierInfo


class GradingSession(Protocol):
    """Grades jobs of one verifier, one after the other; a context manager. `execution.GradeSession` is the local one.

    `grade` returns {"grades": [...]} or {"error": kind, "message": text} like a child, and raises SessionLost when
    nobody works on the job any more. It has no limit of time: the caller keeps the job's lease and deadline. Leaving
    `progress` says how far the present job has come, 0 to 1, where the place tells it. Leaving
    the session with an error ends the work wherever it runs. Leaving it by cancellation, which is how the service
    stops, leaves a job that outlives the service where it is; the same job finds it again later.
    """

    progress: float

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def grade(self, verifier: str, payload: str, answers: list[str]) -> dict[str, Any]: ...


class OpenSession(ABC):
    """A session that holds nothing: cancelling `grade` ends the work."""

    progress = 0.0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return

    @abstractmethod
    async def grade(self, verifier: str, payload: str, answers: list[str]) -> dict[str, Any]:
        """As in GradingSession."""


class Backend(ABC):
    """One mechanism. `start` brings it up and raises StartupError when it is not set up rightly; a cluster or a server
    that is away at that time is no error, jobs wait for it until their deadline. `close` ends what is ours here."""

    @property
    def verifiers(self) -> list[VerifierInfo]:
        """Verifiers that only this place has; those of the installed tasks are not listed."""
        return []

    @abstractmethod
    async def start(self) -> None: ...

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    def session(self, info: VerifierInfo) -> GradingSession:
        """A session for jobs of `info`; nothing happens before it is entered."""
