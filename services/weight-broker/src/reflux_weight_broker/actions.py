"""What the state machine decides to do next. Plain values; the coordinator carries them out in order."""

from dataclasses import dataclass

from reflux_weight_broker.plan import Manifest
from reflux_weight_broker.records import Source, Transaction


@dataclass(frozen=True)
class Prepare:
    """Ask a rank to pull from a source until `deadline`, a monotonic time."""

    replica: str
    incarnation: str
    epoch: int
    manifest: Manifest
    source: Source
    deadline: float


@dataclass(frozen=True)
class Commit:
    """Ask a rank to serve the epoch."""

    replica: str
    incarnation: str
    epoch: int
    manifest: Manifest


@dataclass(frozen=True)
class Abort:
    """Tell a rank to forget an epoch."""

    replica: str
    incarnation: str
    epoch: int
    version: int


@dataclass(frozen=True)
class Dismiss:
    """End a rank's stream; it has to register again."""

    replica: str
    incarnation: str
    reason: str


@dataclass(frozen=True)
class Lease:
    """Tell `owner` that `holder` reads a generation of it until `deadline`, a monotonic time; 0 ends that."""

    owner: str
    generation: int
    holder: str
    deadline: float


@dataclass(frozen=True)
class Persist:
    """Store this snapshot before any later action is carried out."""

    transaction: Transaction


Action = Prepare | Commit | Abort | Dismiss | Lease | Persist
Event = Prepare | Commit | Abort
