"""Least in-flight tokens first: requests differ in size by two orders of magnitude, their number does not tell."""

from collections.abc import Sequence

from reflux_inference_gateway.routing.base import Ask, Candidate, RoutingPolicy


def least_loaded(candidates: Sequence[Candidate]) -> Candidate:
    """argmin of (in-flight tokens, requests ever sent, order)."""
    return min(candidates, key=lambda one: (one.inflight_tokens, one.dispatched, one.order))


class LeastLoaded(RoutingPolicy):
    """argmin of (in-flight tokens, requests ever sent, order).

    The load is the gateway's own count from the moment of dispatch: reported loads are a heartbeat old, and a burst
    that arrives between two heartbeats would all go to one replica. Without the second key the first replica would
    win whenever all are idle.
    """

    def choose(self, candidates: Sequence[Candidate], ask: Ask) -> str:
        """Returns the candidate with the fewest tokens in flight."""
        return least_loaded(candidates).name
