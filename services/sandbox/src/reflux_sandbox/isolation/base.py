"""The contract of an isolation mechanism, and the values that cross it."""

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any, Literal

from reflux_sandbox.isolation.handle import ChildHandle
from reflux_tasks.canonical import Form

TierName = Literal["prefork", "process"]
Profile = Literal["code", "grade", "native"]
"""code: text of a model. grade: a verifier in the warm interpreter. native: one that may start programs."""


class Tier(IntEnum):
    """Strength; higher is stronger. Gaps are for bwrap and gvisor."""

    PROCESS = 10
    PREFORK = 30


@dataclass(frozen=True, kw_only=True)
class ChildLimits:
    """Ceilings of every child, set before it gets work; a request can only lower them."""

    memory_bytes: int = 2 << 30
    """Address space on top of the warm interpreter's, and the cgroup's memory where there is one."""
    processes: int = 64
    """Processes and threads inside one child."""
    disk_bytes: int = 64 << 20
    """Size of each of the tmpfs folders /box, /tmp and /dev/shm."""
    files: int = 4096
    """Inodes of each tmpfs folder."""
    open_files: int = 256
    cpu_seconds: int = 3600

    def to_json(self) -> dict[str, int]:
        return asdict(self)


class IsolationUnavailable(RuntimeError):
    """This machine cannot run the mechanism; the message says which primitive failed."""


@dataclass(frozen=True)
class VerifierInfo:
    """What the service must know about a verifier without importing it."""

    name: str
    version: str
    fidelity: Literal["rule", "surrogate", "full"]
    trusted: bool
    cost_seconds: float
    canonical_form: Form = "words"
    """Which answers are equal to it."""

    @property
    def profile(self) -> Profile:
        """Verifiers of full fidelity call native programs; nothing else may."""
        return "native" if self.fidelity == "full" else "grade"


class Isolation(ABC):
    """Hands out warm, confined, single-use children.

    `start` brings the mechanism up or raises IsolationUnavailable. `acquire` returns a child that has said hello and
    never had work; the caller gives it one piece of work (`execution`) and always calls its `end`. `close` leaves no
    process behind. A child that dies by itself shows as a closed channel, never as an exception of the mechanism.
    """

    name: TierName
    tier: Tier

    @property
    @abstractmethod
    def reasons(self) -> list[str]:
        """One sentence per primitive that is present or missing."""

    @property
    @abstractmethod
    def verifiers(self) -> list[VerifierInfo]:
        """Verifiers that a child of this mechanism can run."""

    @abstractmethod
    async def start(self) -> None: ...

    @abstractmethod
    async def acquire(self) -> ChildHandle: ...

    @abstractmethod
    async def close(self) -> None: ...

    @property
    @abstractmethod
    def idle_children(self) -> int: ...

    @property
    @abstractmethod
    def busy_children(self) -> int: ...


def verifier_infos(rows: list[dict[str, Any]]) -> list[VerifierInfo]:
    """Parses the `ready` frame of a warm parent."""
    return [VerifierInfo(**row) for row in rows]
