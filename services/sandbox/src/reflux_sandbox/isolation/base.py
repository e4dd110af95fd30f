"""The contract of an isolation mechanism, and the values that cross it."""

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any, Literal

from reflux_sandbox.isolation.handle import ChildHandle
from reflux_tasks.canonical import Form
from reflux_tasks.verify import TierName

Profile = Literal["code", "session", "grade", "native"]
"""code, session: text of a model. grade: a verifier in a warm interpreter. native: one that may start programs."""


class Tier(IntEnum):
    """Strength; higher is stronger. Text that a model wrote never runs below PREFORK."""

    PROCESS = 10
    """Limits only."""
    PREFORK = 30
    """Namespaces, read-only tree, call filter; the memory of the warm parent is shared."""
    BWRAP = 40
    """As prefork, in an interpreter that was started inside: no memory of a warm parent."""
    GVISOR = 50
    """A kernel of its own in user space."""


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
    cpu_cores: float = 2.0
    """Cores that all processes of one child get together, where there are cgroups."""

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
    weakest_tier: TierName = "prefork"
    """Weaker tiers do not offer it."""

    @property
    def family(self) -> str:
        """The task; verifiers of one task share a warm parent."""
        return self.name.partition("/")[0]

    @property
    def profile(self) -> Profile:
        """Verifiers of full fidelity call native programs; nothing else may."""
        return "native" if self.fidelity == "full" else "grade"


class Isolation(ABC):
    """Hands out warm, confined, single-use children.

    `start` brings the mechanism up or raises IsolationUnavailable. `acquire` returns a child that has said hello and
    never had work: one with the verifiers of a family, or without any (family "") for text that a model wrote. The
    caller gives it one piece of work (`execution`, `sessions`) and always calls its `end`. `close` leaves no process
    behind. A child that dies by itself shows as a closed channel, never as an exception of the mechanism.
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
        """Verifiers that children of this mechanism can run and that accept its tier."""

    @abstractmethod
    async def start(self) -> None: ...

    @abstractmethod
    async def acquire(self, family: str = "") -> ChildHandle: ...

    @abstractmethod
    async def close(self) -> None: ...

    @property
    @abstractmethod
    def idle_children(self) -> int: ...

    @property
    @abstractmethod
    def busy_children(self) -> int: ...


def offered(rows: list[dict[str, Any]], tier: Tier) -> tuple[list[VerifierInfo], list[str]]:
    """Parses the rows of a `ready` frame: the verifiers that accept `tier`, and a sentence for each that does not."""
    infos = [VerifierInfo(**row) for row in rows]
    refused = [info for info in infos if Tier[info.weakest_tier.upper()] > tier]
    notes = [f"verifier {info.name} is not offered: it wants {info.weakest_tier} or stronger" for info in refused]
    return [info for info in infos if info not in refused], notes
