"""One part of a request on its way, and how its way can end before its answer does."""

from dataclasses import dataclass, field

from reflux_inference_gateway.fleet import Stay
from reflux_inference_gateway.replicas import Replica, ReplicaInfo
from reflux_inference_gateway.retry import Attempts
from reflux_inference_gateway.want import Want


class ReplicaLost(Exception):
    """The connection to a replica broke before its answer was complete. Adapters raise it; only it is retried."""


class GivenUp(Exception):
    """The request was aborted while it waited for a replica."""


class Parked(Exception):
    """A share was stopped for a pause and goes on after it. Senders raise it; they know what is missing."""


@dataclass(eq=False)
class Share:
    """One part of a request on its way: samples `first .. first + count - 1`."""

    want: Want
    """The request as far as it is this part."""
    first: int
    count: int
    stay: Stay
    deadline: float
    attempts: Attempts = field(default_factory=Attempts.none)
    replica: Replica | None = None
    """Where its load is counted now."""
    info: ReplicaInfo | None = None
    """What that replica said of itself when it got it: this arm has to answer for what comes of it."""
    load: int = 0
    """Tokens that are counted there."""
    num_open: int = 0
    """Samples that are counted there."""
    verdict: bool | None = None
    """Whether that replica answered or failed; None while it is open, or when the end says nothing about it."""
    given_up: bool = False
