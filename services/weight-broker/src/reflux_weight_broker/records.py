"""What the broker remembers about replicas and versions. Plain values."""

from dataclasses import dataclass, field, replace
from enum import Enum

from reflux_transfer.client.offer import Kind, SourceRegion
from reflux_transfer.modes import Mode
from reflux_weight_broker.health import Thresholds
from reflux_weight_broker.plan import Manifest, Tensors

PUBLISHER = "publisher"
"""Name of the publisher as a source; replicas are sources by their own names."""


@dataclass(frozen=True)
class Rules:
    """What an operator can set: patience, how many read from one source at a time (0: any), and what is a fault."""

    reconnect_seconds: float = 2.0
    join_seconds: float = 60.0
    readers_per_source: int = 0
    thresholds: Thresholds = field(default_factory=Thresholds)


class Phase(Enum):
    """Progress of a version."""

    PREPARING = "preparing"
    COMMITTING = "committing"
    COMMITTED = "committed"
    ABORTED = "aborted"

    @property
    def ended(self) -> bool:
        """Whether nothing will change any more."""
        return self in (Phase.COMMITTED, Phase.ABORTED)


class Step(Enum):
    """What a rank owes for an epoch; QUEUE waits until a source has room for another reader."""

    QUEUE = "queue"
    PREPARE = "prepare"
    WAIT = "wait"
    COMMIT = "commit"


@dataclass(frozen=True)
class Source:
    """From whom the bytes of an epoch can be read, and what lies there."""

    name: str
    layout_hash: str
    regions: tuple[SourceRegion, ...]
    kind: Kind


@dataclass
class Duty:
    """The epoch that a replica is being brought to. `deadline` is a monotonic time, `tried` are sources that failed.

    `base_served`: whether the replica can apply a delta; without it the publisher's tensors are read in full.
    """

    epoch: int
    manifest: Manifest
    deadline: float
    base_served: bool
    source: Source | None = None
    leased: bool = False
    tried: set[str] = field(default_factory=set)


@dataclass
class Seat:
    """The process of one rank. `lost_at` is when its stream ended or its registration began, None while it listens."""

    rank: int
    incarnation: str
    mode: Mode = "swap"
    epoch: int = 0
    version: int = 0
    fingerprint: int = 0
    lost_at: float | None = None
    step: Step | None = None
    bytes: int = 0
    transfer_seconds: float = 0.0
    pause_ms: float = 0.0
    offered_epoch: int = 0
    offers: tuple[SourceRegion, ...] = ()
    """What others may read of this rank: its bytes of `offered_epoch`."""


@dataclass
class Replica:
    """A replica and the ranks that have registered for it; it takes part when all of them are there."""

    name: str
    tensors: Tensors
    seats: dict[int, Seat] = field(default_factory=dict)
    duty: Duty | None = None
    error: str = ""
    source: str = ""
    doubts: dict[str, str] = field(default_factory=dict)
    """Why requests must not go to it, by what found out: "probe", "fingerprint of rank <rank>"."""

    @property
    def complete(self) -> bool:
        """Whether all ranks have registered."""
        return len(self.seats) == self.tensors.ranks

    @property
    def epoch(self) -> int:
        """What all ranks serve; 0 when it is nothing, or not the same."""
        epochs = {seat.epoch for seat in self.seats.values()}
        return epochs.pop() if self.complete and len(epochs) == 1 else 0

    @property
    def version(self) -> int:
        """The version of `epoch`."""
        return next(iter(self.seats.values())).version if self.epoch else 0

    @property
    def unhealthy(self) -> str:
        """Why requests must not go to it, empty when they may."""
        if not self.complete:
            return f"{len(self.seats)} of {self.tensors.ranks} ranks are there"
        if len({seat.epoch for seat in self.seats.values()}) > 1:
            return "its ranks serve different epochs"
        if any(seat.mode == "in_place" and seat.step is Step.COMMIT for seat in self.seats.values()):
            return "its weights are being overwritten"
        return "; ".join(self.doubts.values())

    def at(self, step: Step) -> bool:
        """Whether a rank is at this step."""
        return any(seat.step is step for seat in self.seats.values())

    def all_at(self, step: Step | None) -> bool:
        """Whether every rank is at this step."""
        return all(seat.step is step for seat in self.seats.values())

    def owes(self, epoch: int) -> bool:
        """Whether it takes part in the epoch and has not committed it yet."""
        return self.duty is not None and self.duty.epoch == epoch

    def offers(self, epoch: int) -> tuple[SourceRegion, ...]:
        """Regions of all ranks that hold the epoch, or none."""
        if not self.complete or any(not s.offers or s.offered_epoch != epoch for s in self.seats.values()):
            return ()
        return tuple(region for rank in sorted(self.seats) for region in self.seats[rank].offers)


@dataclass
class Transaction:
    """One version on its way; times are monotonic seconds."""

    epoch: int
    manifest: Manifest
    min_replicas: int
    started_at: float
    deadline: float
    phase: Phase = Phase.PREPARING
    prepared_at: float = 0.0
    ended_at: float = 0.0
    error: str = ""
    bytes: int = 0
    control_messages: int = 2
    """Of which the publisher has asked for target layouts and begun the version."""

    fingerprint: int = 0
    witness: str = ""
    """Who reported the fingerprint first."""

    members: dict[str, Replica] = field(default_factory=dict)
    """Everyone who took part, by name; those who were removed keep their last state and error."""

    @property
    def prepare_seconds(self) -> float:
        """From the begin until the last replica was prepared, 0 before that."""
        return max(0.0, self.prepared_at - self.started_at) if self.prepared_at else 0.0

    @property
    def commit_seconds(self) -> float:
        """From the last PREPARED until all were committed, 0 before that."""
        return max(0.0, self.ended_at - self.prepared_at) if self.prepared_at and self.ended_at else 0.0

    def snapshot(self) -> "Transaction":
        """A copy that later changes leave alone."""
        members = {
            name: replace(member, seats={rank: replace(seat) for rank, seat in member.seats.items()})
            for name, member in self.members.items()
        }
        return replace(self, members=members)


@dataclass(frozen=True)
class Committed:
    """The version that every late joiner gets, and the fingerprint that it must report; 0 when nobody has."""

    epoch: int
    manifest: Manifest
    fingerprint: int = 0


@dataclass(frozen=True)
class Registration:
    """One rank that announces itself, and what it serves already."""

    replica: str
    incarnation: str
    tensors: Tensors
    rank: int = 0
    mode: Mode = "swap"
    epoch: int = 0
    version: int = 0
    fingerprint: int = 0


@dataclass(frozen=True)
class Report:
    """A rank's acknowledgement. Exactly one of the three outcomes."""

    replica: str
    incarnation: str
    epoch: int
    outcome: str
    """"prepared", "committed" or "failed"."""

    rank: int = 0
    error: str = ""
    reason: str = ""
    """Of a failure: "checksum", "generation_gone", "peer_gone", "deadline", "base_mismatch", "layout" or "engine"."""

    bytes: int = 0
    transfer_seconds: float = 0.0
    pause_ms: float = 0.0
    fingerprint: int = 0
    regions: tuple[SourceRegion, ...] = ()
