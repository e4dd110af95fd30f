"""What the broker remembers about replicas and versions, and what it decides to do next. Plain values."""

from dataclasses import dataclass, field, replace
from enum import Enum

from reflux_transfer.layout import Layout
from reflux_weight_broker.plan import Manifest


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
    """What a replica owes for an epoch."""

    PREPARE = "prepare"
    WAIT = "wait"
    COMMIT = "commit"


@dataclass
class Duty:
    """The epoch that a replica is being brought to."""

    epoch: int
    manifest: Manifest
    step: Step = Step.PREPARE


@dataclass
class Replica:
    """A registered replica. `lost_at` is when its stream ended or its registration began, None while it listens."""

    name: str
    incarnation: str
    layout: Layout
    epoch: int = 0
    version: int = 0
    error: str = ""
    pause_ms: float = 0.0
    transfer_seconds: float = 0.0
    fingerprint: int = 0
    lost_at: float | None = None
    duty: Duty | None = None

    def owes(self, epoch: int) -> bool:
        """Whether it takes part in the epoch and has not committed it yet."""
        return self.duty is not None and self.duty.epoch == epoch


@dataclass
class Transaction:
    """One version on its way; times are monotonic seconds."""

    epoch: int
    manifest: Manifest
    timeout_seconds: float
    min_replicas: int
    started_at: float
    deadline: float
    phase: Phase = Phase.PREPARING
    prepared_at: float = 0.0
    ended_at: float = 0.0
    error: str = ""
    bytes: int = 0
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
        return replace(self, members={name: replace(member) for name, member in self.members.items()})


@dataclass(frozen=True)
class Committed:
    """The version that every late joiner gets."""

    epoch: int
    manifest: Manifest


@dataclass(frozen=True)
class Prepare:
    """Ask a replica to pull."""

    replica: str
    incarnation: str
    epoch: int
    manifest: Manifest


@dataclass(frozen=True)
class Commit:
    """Ask a replica to swap."""

    replica: str
    incarnation: str
    epoch: int
    version: int


@dataclass(frozen=True)
class Abort:
    """Tell a replica to forget an epoch."""

    replica: str
    incarnation: str
    epoch: int
    version: int


@dataclass(frozen=True)
class Dismiss:
    """End a replica's stream; it has to register again."""

    replica: str
    incarnation: str
    reason: str


@dataclass(frozen=True)
class Persist:
    """Store this snapshot before any later action is carried out."""

    transaction: Transaction


Action = Prepare | Commit | Abort | Dismiss | Persist


@dataclass(frozen=True)
class Report:
    """A replica's acknowledgement. Exactly one of the three outcomes."""

    replica: str
    incarnation: str
    epoch: int
    outcome: str
    """"prepared", "committed" or "failed"."""

    error: str = ""
    bytes: int = 0
    transfer_seconds: float = 0.0
    pause_ms: float = 0.0
    fingerprint: int = 0
