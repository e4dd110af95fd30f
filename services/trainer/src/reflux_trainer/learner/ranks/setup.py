"""What all ranks of a learner have to know."""

from dataclasses import dataclass

from reflux_kit.settings import ServiceSettings


@dataclass(frozen=True)
class RankSetup:
    """How many ranks there are, and what their publishers call."""

    ranks: int
    broker_address: str
    settings: ServiceSettings | None = None
    timeout_seconds: float = 60.0
    """Bound of one collective operation, in which a rank waits for all others."""


class RankLost(RuntimeError):
    """A rank's process ended or refused its part; the model cannot go on, the learner has to start anew."""
