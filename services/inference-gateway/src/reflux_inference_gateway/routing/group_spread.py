"""Groups whole on one replica, unless more replicas finish them sooner at hardly more work; ADR-0014 says why."""

import heapq
from collections.abc import Sequence

from reflux_inference_gateway.routing.base import Ask, Candidate, RoutingPolicy, Share
from reflux_inference_gateway.routing.cost import CostModel, Outlook
from reflux_inference_gateway.routing.lengths import LengthBook
from reflux_inference_gateway.routing.prefix_tree import PrefixTree, prompt_bytes

_ROUNDING = 1e-9
_BYTES_PER_TOKEN = 4
"""Of prompts that come as text, by which their length is guessed when nobody counted."""


class GroupSpread(RoutingPolicy):
    """Plans shares by the expected time until the group's last sample is done (`Outlook.finish`).

    A plan on m replicas is admitted when each further replica's prefill costs at most `max_prefill_part` of an m-th of
    the group's decoding: a full fleet never gets through less than by that part. Of the admitted plans the one that is
    done first wins, and of equal ones the one with fewer replicas. The whole group on one replica is always admitted.
    A single sample, and a group that cannot be split, goes where it is done first: the best sum of what is missing of
    the prompt and what is queued.
    """

    def __init__(self, costs: CostModel | None = None, max_prefill_part: float = 0.1) -> None:
        self._costs = costs or CostModel()
        self._max_prefill_part = max_prefill_part
        self._lengths = LengthBook()
        self._tree = PrefixTree()

    def choose(self, candidates: Sequence[Candidate], ask: Ask) -> str:
        """Returns the replica that finishes the whole group first."""
        prompt, chosen = prompt_bytes(ask.prompt), candidates[0]
        if len(candidates) > 1:
            outlooks = self.outlooks(candidates, ask, prompt)
            chosen = candidates[_first_to_finish(candidates, outlooks, ask.num_samples)]
        self._tree.insert(prompt, ask.salt, chosen.name)
        return chosen.name

    def split(self, candidates: Sequence[Candidate], ask: Ask) -> tuple[Share, ...]:
        """Returns the shares of the best admitted plan, the replica with the best prefix and queue first."""
        if ask.num_samples == 1 or len(candidates) == 1:
            return super().split(candidates, ask)
        prompt = prompt_bytes(ask.prompt)
        outlooks = self.outlooks(candidates, ask, prompt)
        single = _first_to_finish(candidates, outlooks, ask.num_samples)
        ranks = sorted(range(len(candidates)), key=lambda at: (outlooks[at].finish(1), *_idle_first(candidates[at])))
        most = self._admitted(outlooks, ranks, ask.num_samples)
        best = _fewest(outlooks, ranks[:most], ask.num_samples, {single: ask.num_samples})
        for at in best:
            self._tree.insert(prompt, ask.salt, candidates[at].name)
        return tuple(Share(candidates[at].name, count) for at, count in best.items())

    def finished(self, name: str, ask: Ask, generated_tokens: Sequence[int]) -> None:
        """Learns the lengths of the run."""
        self._lengths.learn(ask.run, generated_tokens)

    def forget(self, name: str) -> None:
        """Takes the replica's cache for empty."""
        self._tree.forget(name)

    def outlooks(self, candidates: Sequence[Candidate], ask: Ask, prompt: bytes) -> list[Outlook]:
        """What the model says about each candidate and this group.

        What is in flight is taken to be made of groups like this one: of their upper bound, prompt included, the part
        that this group is expected to generate.
        """
        expected = self._lengths.expect(ask)
        prompt_tokens = ask.num_prompt_tokens or _guessed_tokens(ask.prompt)
        limit = ask.max_tokens or expected.longest
        bound = max(1.0, prompt_tokens + ask.num_samples * limit)
        matched = self._tree.matched(prompt, ask.salt)
        return [
            Outlook(
                costs=self._costs,
                capacity=one.capacity,
                prefill_tokens=prompt_tokens * (1 - matched.get(one.name, 0.0)),
                backlog_tokens=one.inflight_tokens * ask.num_samples * expected.mean / bound,
                sequences=one.inflight_tokens * ask.num_samples / bound,
                mean=expected.mean,
                longest=expected.longest,
            )
            for one in candidates
        ]

    def _admitted(self, outlooks: Sequence[Outlook], ranks: Sequence[int], num_samples: int) -> int:
        """How many of the ranked replicas may share the group."""
        lead, admitted = outlooks[ranks[0]], 1
        decoding = num_samples * lead.mean * self._costs.decode_per_token(lead.capacity)
        for at in ranks[1:num_samples]:
            if outlooks[at].prefill > self._max_prefill_part * decoding / (admitted + 1):
                break
            admitted += 1
        return admitted


def makespan(outlooks: Sequence[Outlook], counts: dict[int, int]) -> float:
    """Expected time until the last share is done; counts by index of the outlook."""
    return max(outlooks[at].finish(count) for at, count in counts.items())


def _first_to_finish(candidates: Sequence[Candidate], outlooks: Sequence[Outlook], num_samples: int) -> int:
    return min(range(len(candidates)), key=lambda at: (outlooks[at].finish(num_samples), *_idle_first(candidates[at])))


def _idle_first(one: Candidate) -> tuple[int, int]:
    return one.dispatched, one.order


def _level(outlooks: Sequence[Outlook], ranks: Sequence[int], num_samples: int) -> dict[int, int]:
    """Gives each sample to the replica that would finish first with it: no other counts have a smaller makespan."""
    heap = [(outlooks[at].finish(1), rank, at, 1) for rank, at in enumerate(ranks)]
    counts: dict[int, int] = {}
    for _ in range(num_samples):
        _, rank, at, count = heap[0]
        counts[at] = count
        heapq.heapreplace(heap, (outlooks[at].finish(count + 1), rank, at, count + 1))
    return counts


def _fewest(
    outlooks: Sequence[Outlook], ranks: Sequence[int], num_samples: int, single: dict[int, int]
) -> dict[int, int]:
    """The plan on the fewest of the ranked replicas that is done as early as the one on all of them."""
    best = _level(outlooks, ranks, num_samples)
    goal = makespan(outlooks, best) * (1 + _ROUNDING)
    if makespan(outlooks, single) <= goal:
        return single
    low, high = 1, len(ranks)
    while low < high:
        middle = (low + high) // 2
        plan = _level(outlooks, ranks[:middle], num_samples)
        if makespan(outlooks, plan) <= goal:
            best, high = plan, middle
        else:
            low = middle + 1
    return best


def _guessed_tokens(prompt: tuple[int, ...] | bytes) -> int:
    return len(prompt) // _BYTES_PER_TOKEN if isinstance(prompt, bytes) else len(prompt)
