"""Owns what a simulation leaves: where and when each job ran, what it lost, and the state of the cluster over time."""

from dataclasses import dataclass, field
from typing import Literal

from reflux_placement.gang import Assignment
from reflux_placement.simulate.jobs import SimJob
from reflux_placement.topology import Ints, Topology

End = Literal["done", "preempted", "moved", "resized", "failed"]


@dataclass(frozen=True, slots=True)
class Stay:
    """One uninterrupted time of a job in one place."""

    start: float
    end: float
    assignment: Assignment
    node_M: Ints
    """Node of each member."""

    gpus_M: Ints
    """GPUs of each member as a bit mask over the node's GPU indices."""

    gpus: int
    num_racks: int
    """Domains of the tightest named level that it touches."""

    num_blocks: int
    """Domains of the next level; 1 where the topology has none."""

    cross_rack: float
    """Share of its traffic between racks, 0 to 1."""

    ended_by: End


@dataclass(slots=True)
class JobRecord:
    """The life of one job."""

    job: SimJob
    stays: list[Stay] = field(default_factory=list)
    ended_at: float | None = None
    lost_gpu_seconds: float = 0.0
    """Work that was done and is not in a checkpoint when it was stopped."""

    preemptions: int = 0
    failures: int = 0
    refused: str = ""
    """Why it could never run, as one sentence; empty if it could."""

    @property
    def started_at(self) -> float | None:
        """First start."""
        return self.stays[0].start if self.stays else None

    @property
    def wait_seconds(self) -> float:
        """From arrival to the first start."""
        assert self.stays, f"{self.job.name} never started"
        return self.stays[0].start - self.job.arrives_at

    @property
    def completion_seconds(self) -> float:
        """From arrival to the end (job completion time)."""
        assert self.ended_at is not None, f"{self.job.name} never ended"
        return self.ended_at - self.job.arrives_at


@dataclass(frozen=True, slots=True)
class Sample:
    """The cluster at one moment."""

    at: float
    used_gpus: int
    open_gpus: int
    """Free GPUs on nodes that take work."""

    fragmented_gpus: float
    """Of the free ones, those that the usual requests cannot use (simulate/fragmentation.py)."""

    pending_jobs: int
    pending_gpus: int


@dataclass(frozen=True)
class History:
    """Everything that happened."""

    topology: Topology
    records: tuple[JobRecord, ...]
    samples: tuple[Sample, ...]
    cycles: int

    @property
    def done(self) -> list[JobRecord]:
        """Jobs that ended."""
        return [record for record in self.records if record.ended_at is not None]

    @property
    def unfinished(self) -> list[JobRecord]:
        """Jobs that could run and never ended: the policy starved them."""
        return [record for record in self.records if record.ended_at is None and not record.refused]
