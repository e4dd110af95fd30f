"""What a routing policy sees and must answer."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One replica that may take the request, as the gateway knows it at this moment."""

    name: str
    """Resource name, `replicas/{replica}`."""

    inflight_tokens: int
    """Tokens that this gateway sent and that are not answered yet, counted from dispatch."""

    dispatched: int
    """Requests that this gateway ever sent there; breaks ties so that idle replicas share the work."""

    order: int
    """Order of registration; the last tie-break, so that a choice is a function of its input."""


class RoutingPolicy(ABC):
    """Picks one replica per request.

    Contract: `choose` gets at least one candidate, in order of registration, and returns the name of one of them. It
    reads no clock and does no I/O; what it remembers between calls is its own (a counter, a tree). It may be called
    again for the same request when the first choice turned out to be dead; that choice is then left out.
    """

    @abstractmethod
    def choose(self, candidates: Sequence[Candidate]) -> str:
        """Returns the name of the candidate that takes the request."""
