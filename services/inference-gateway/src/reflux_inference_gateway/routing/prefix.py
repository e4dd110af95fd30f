"""Where most of the prompt was computed before, as long as that replica is not much busier than the others."""

from collections.abc import Sequence

from reflux_inference_gateway.routing.base import Ask, Candidate, RoutingPolicy
from reflux_inference_gateway.routing.least_loaded import least_loaded
from reflux_inference_gateway.routing.prefix_tree import PrefixTree, prompt_bytes


class Prefix(RoutingPolicy):
    """Of the replicas within the load bound, the one that has seen the longest part of the prompt.

    Within the bound: at most `max_lead_tokens` more in flight than the least loaded replica, or at most `max_ratio`
    times its load. When the longest match is under `min_match` of the prompt the least loaded replica takes it. The
    bound is that of sglang's cache_aware policy, but counts tokens, and is put to the matching replica instead of to
    the fleet: one busy replica does not cost the others their caches. A new prompt never goes to the replica with the
    smallest tree (the rule that feeds the busiest one, sgl-project/sglang#14305).
    """

    def __init__(self, min_match: float = 0.3, max_lead_tokens: int = 16_384, max_ratio: float = 1.5) -> None:
        self._min_match = min_match
        self._max_lead_tokens = max_lead_tokens
        self._max_ratio = max_ratio
        self._tree = PrefixTree()

    def choose(self, candidates: Sequence[Candidate], ask: Ask) -> str:
        """Returns the best match within the bound, and notes the prompt for it."""
        idlest = least_loaded(candidates)
        bound = max(idlest.inflight_tokens + self._max_lead_tokens, self._max_ratio * idlest.inflight_tokens)
        prompt = prompt_bytes(ask.prompt)
        matched = self._tree.matched(prompt, ask.salt)
        near = [one for one in candidates if one.inflight_tokens <= bound and one.name in matched]
        longest = max((matched[one.name] for one in near), default=0.0)
        chosen = idlest
        if longest >= self._min_match:
            chosen = least_loaded([one for one in near if matched[one.name] == longest])
        self._tree.insert(prompt, ask.salt, chosen.name)
        return chosen.name

    def forget(self, name: str) -> None:
        """Takes the replica's cache for empty."""
        self._tree.forget(name)
