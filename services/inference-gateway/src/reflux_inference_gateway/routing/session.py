"""The same session on the same replica, with a bound on how much more than its part a replica gets."""

import math
from collections.abc import Sequence
from hashlib import blake2b

from reflux_inference_gateway.routing.base import Ask, Candidate, RoutingPolicy
from reflux_inference_gateway.routing.least_loaded import least_loaded


class Session(RoutingPolicy):
    """Each session ranks the replicas by a hash of its own; the first one with room takes it.

    Ranking (rendezvous hashing: Thaler and Ravishankar 1998) needs no state: a replica that leaves moves its own
    sessions only, spread over the others, and one that comes takes an even part of all. Room means at most
    max(`min_requests`, ceil(`balance` * (in flight + 1) / replicas)) requests in flight with this one (bounded loads:
    Mirrokni, Thorup, Zadimoghaddam 2018): the least loaded replica always has room, and a replica that is stuck loses
    further requests of its sessions instead of stalling them. A request without a session goes to the least loaded
    replica, not to the one that the empty key would hash to.
    """

    def __init__(self, balance: float = 1.25, min_requests: int = 8) -> None:
        self._balance = balance
        self._min_requests = min_requests

    def choose(self, candidates: Sequence[Candidate], ask: Ask) -> str:
        """Returns the session's first replica with room."""
        if not ask.session:
            return least_loaded(candidates).name
        total = sum(one.inflight_requests for one in candidates)
        bound = max(self._min_requests, math.ceil(self._balance * (total + 1) / len(candidates)))
        roomy = [one.name for one in candidates if one.inflight_requests < bound]
        return max(roomy, key=lambda name: _score(ask.session, name))


def _score(session: str, name: str) -> bytes:
    return blake2b(f"{len(session)}:{session}{name}".encode(errors="backslashreplace"), digest_size=8).digest()
