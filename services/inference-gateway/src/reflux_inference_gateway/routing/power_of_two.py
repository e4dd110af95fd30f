"""The less loaded of two replicas drawn at random."""

import random
from collections.abc import Sequence

from reflux_inference_gateway.routing.base import Ask, Candidate, RoutingPolicy
from reflux_inference_gateway.routing.least_loaded import least_loaded


class PowerOfTwo(RoutingPolicy):
    """Two distinct replicas by a seeded generator, then the one with fewer tokens in flight.

    With several gateways in front of one fleet each knows its own load only; the draw keeps them from all choosing
    the same replica, and the second choice keeps the longest queue at O(log log n) (Mitzenmacher, "The Power of Two
    Choices in Randomized Load Balancing", 2001).
    """

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def choose(self, candidates: Sequence[Candidate], ask: Ask) -> str:
        """Returns the less loaded of two."""
        return least_loaded(self._random.sample(candidates, min(2, len(candidates)))).name
