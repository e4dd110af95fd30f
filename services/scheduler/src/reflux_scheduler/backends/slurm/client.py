"""The face of Slurm that the backend needs, behind which are commands or slurmrestd."""

import os
import pwd
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from reflux_placement.sources.slurm_nodes import NodeRecord
from reflux_scheduler.backends.base import BackendAway, GrantRefused

Version = tuple[int, ...]

_PASSING = re.compile(
    r"contact slurm controller|connection (refused|failure)|connect failure|timed out|zero bytes|endpoint|"
    r"protocol authentication|munge|temporarily|backup mode|try again|unexpected message|no route|"
    r"submit ?limit|submit jobs? limit|SubmitJob|job count exceeds",
    re.IGNORECASE,
)
"""Complaints about a submission that pass: the controller is away or busy, or a limit of queued jobs is reached."""

_GONE = re.compile(r"invalid job id|already completing|job/step already", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Component:
    """Nodes that give the same: a whole job, or a component of a heterogeneous one."""

    nodes: tuple[str, ...]
    cpus: int
    memory_mib: int
    gpus: int


@dataclass(frozen=True, slots=True)
class JobOrder:
    """What to submit. The first component has the job's name, the others NAME.1, NAME.2, ...

    Dependency `singleton` holds a second job of the same name and user back while the first lives: two submissions of
    one grant never run at the same time. Components would hold back each other, hence their names.
    """

    name: str
    components: tuple[Component, ...]
    script: str
    environment: Mapping[str, str]
    pin: Literal["nodelist", "exclude"] = "nodelist"
    others: tuple[str, ...] = ()
    """All nodes of the cluster outside the job; only for pin "exclude"."""

    switches: int = 0
    segment_size: int = 0
    output: str = "/dev/null"

    def named(self) -> list[tuple[str, Component]]:
        """The components with the names of their jobs."""
        return [(f"{self.name}.{i}" if i else self.name, each) for i, each in enumerate(self.components)]


@dataclass(frozen=True, slots=True)
class JobRecord:
    """One job in Slurm's queue, or a component. `state` is upper case, `comment` what we wrote at submission."""

    id: int
    name: str
    state: str
    reason: str
    nodes: tuple[str, ...]
    """Allocated now; nodes that failed are taken out."""

    asked: tuple[str, ...]
    comment: str = ""


class SlurmClient(ABC):
    """Every call has a deadline and raises BackendAway when Slurm does not answer."""

    async def close(self) -> None:
        """Gives connections back."""
        return

    @abstractmethod
    async def version(self) -> Version:
        """Slurm's version, for example (22, 5, 8)."""

    @abstractmethod
    async def submit(self, order: JobOrder) -> int:
        """Submits a job; its id. Raises GrantRefused when Slurm will never take it."""

    @abstractmethod
    async def cancel(self, job_ids: Iterable[int]) -> None:
        """Cancels jobs; one that is gone already is no error."""

    @abstractmethod
    async def jobs(self, prefix: str) -> list[JobRecord]:
        """Jobs of our user whose name begins with `prefix`, those that ended a short while ago included."""

    @abstractmethod
    async def nodes(self) -> list[NodeRecord]:
        """All nodes."""

    @abstractmethod
    async def topology(self) -> str:
        """The topology in the notation of topology.conf; empty when it cannot be asked."""

    @abstractmethod
    async def cluster(self) -> str:
        """The cluster's name."""


def parse_version(text: str) -> Version:
    """ "slurm-wlm 22.05.8" or "24.11.0-rc1" as (22, 5, 8) or (24, 11, 0); empty when there is none."""
    match = re.search(r"(\d+)\.(\d+)\.(\d+)", text)
    return tuple(int(number) for number in match.groups()) if match else ()


def complaint(what: str, text: str) -> BackendAway | GrantRefused:
    """The error for a submission that Slurm did not take: for good, or because of something that passes."""
    kind = BackendAway if _PASSING.search(text) else GrantRefused
    return kind(f"{what}: {shorten(text)}")


def own_user() -> str:
    """The user that Slurm takes this process for; not what LOGNAME says, or our own jobs would not be found."""
    uid = os.geteuid()
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def is_gone(text: str) -> bool:
    """Whether Slurm says that a job to cancel has ended already."""
    return _GONE.search(text) is not None


def shorten(text: str) -> str:
    """What Slurm said, on one line."""
    return " ".join(text.split())[:400] or "no reason given"
