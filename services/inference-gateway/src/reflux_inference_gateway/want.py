"""What a request asks of the fleet."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from reflux_inference_gateway.routing.base import Ask


def _never() -> bool:
    return False


@dataclass(frozen=True, kw_only=True)
class Want:
    """What a request asks of the fleet."""

    model_id: str
    num_tokens: int
    """Upper bound of prompt and generated tokens; the load counted on the replica until the answer is complete."""
    min_version: int = 0
    max_lag: int | None = None
    """Versions that the replica may be behind the newest one of the model in the fleet; None allows any."""
    version: int | None = None
    """The one weight version that will do, the trajectory's; None takes any."""
    ask: Ask | None = None
    """What the routing policy may know of the request; None lets it know nothing."""
    session: str = ""
    """Trajectory or session that it belongs to; empty when it stands alone."""
    tenant: str = ""
    """Who pays for it, where queues are shared fairly; empty when nobody in particular does."""
    priority: int = 0
    """Among a tenant's requests that queue, higher ones go first."""
    begins: bool = False
    """It begins a trajectory, and may be held back while others pass."""
    http: bool = False
    """Needs a replica with an OpenAI-compatible door."""
    deadline_seconds: float
    """Seconds from now after which the caller no longer waits."""
    given_up: Callable[[], bool] = _never
    """True once somebody aborted the request; looked at while it waits."""
    number: int = field(default_factory=itertools.count().__next__)
    """Tells requests of this process apart."""

    @property
    def key(self) -> str:
        """What belongs together where traffic is divided: the session, or this request."""
        return self.session or (self.ask.session if self.ask is not None else "") or str(self.number)

    @property
    def num_samples(self) -> int:
        """Samples that it draws, as far as the gateway knows."""
        return self.ask.num_samples if self.ask is not None else 1

    @property
    def particular(self) -> bool:
        """True when not any version will do."""
        return self.min_version > 0 or self.max_lag is not None or self.version is not None

    def narrowed(self, num_samples: int) -> "Want":
        """The same for a part of the samples."""
        if self.ask is None or num_samples == self.ask.num_samples:
            return self
        num_tokens = self.num_tokens - (self.ask.num_samples - num_samples) * self.ask.max_tokens
        return replace(self, num_tokens=num_tokens, ask=replace(self.ask, num_samples=num_samples))
