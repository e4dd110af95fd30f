"""Each replica in turn, whatever its load."""

from collections.abc import Sequence

from reflux_inference_gateway.routing.base import Ask, Candidate, RoutingPolicy


class RoundRobin(RoutingPolicy):
    """Goes on with the first candidate whose order is above the last choice's.

    Keyed by order and not by position, so that a replica that comes or goes does not make another one wait twice.
    """

    def __init__(self) -> None:
        self._last = -1

    def choose(self, candidates: Sequence[Candidate], ask: Ask) -> str:
        """Returns the next candidate in order of registration."""
        chosen = next((one for one in candidates if one.order > self._last), candidates[0])
        self._last = chosen.order
        return chosen.name
