"""How many tokens a sample of a run will have: learned online from the samples that finished."""

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from reflux_inference_gateway.routing.base import Ask

_WINDOW = 256
"""Lengths that are remembered per run: a policy changes its lengths over a few steps."""
_MAX_RUNS = 128
_NUM_BLOCKS = 8
_PRIOR_WEIGHT = 8
"""The prior counts as much as so many finished samples."""
_UNKNOWN_LIMIT = 1024
"""Tokens that a sample without a limit is taken to be limited to, until a sample of its run was longer."""
_PRIOR_SHARE = 0.25
"""Part of its limit that a sample of an unknown run is expected to reach."""


@dataclass(frozen=True)
class Lengths:
    """What is expected of one sample, in tokens."""

    mean: float
    longest: float
    """Expected maximum over the samples of the group."""


class LengthBook:
    """The last lengths of each run; the runs that were silent longest are dropped.

    Mean: the median m of the means of 8 interleaved blocks of the window (median of means: Nemirovsky and Yudin 1983;
    error bounds for heavy tails in Lugosi and Mendelson, "Mean estimation and regression under heavy-tailed
    distributions", 2019), shrunk towards the prior: (8 prior + count m) / (8 + count). With fewer than 2 lengths per
    block m is the plain mean. Longest of n: the window's quantile at n / (n + 1), the expected rank of a maximum of n
    draws, blended the same way. The samples that finish first are the short ones, so the first estimates of a burst
    are low; it heals within a window.
    """

    def __init__(self) -> None:
        self._runs: OrderedDict[str, deque[int]] = OrderedDict()
        self._means: dict[str, float] = {}

    def learn(self, run: str, lengths: Iterable[int]) -> None:
        """Adds finished samples."""
        window = self._runs.setdefault(run, deque(maxlen=_WINDOW))
        self._runs.move_to_end(run)
        window.extend(lengths)
        if not window:
            del self._runs[run]
            return
        self._means[run] = _median_of_means(window)
        if len(self._runs) > _MAX_RUNS:
            silent, _ = self._runs.popitem(last=False)
            del self._means[silent]

    def expect(self, ask: Ask) -> Lengths:
        """Expected lengths of the samples of a request, between 1 and its limit."""
        limit = ask.max_tokens or _UNKNOWN_LIMIT
        prior = _PRIOR_SHARE * limit
        window = self._runs.get(ask.run)
        if window is None:
            return Lengths(max(1.0, prior), float(limit))
        limit = ask.max_tokens or max(limit, *window)
        seen = len(window)
        rank = min(seen - 1, seen * ask.num_samples // (ask.num_samples + 1))
        mean = (_PRIOR_WEIGHT * prior + seen * self._means[ask.run]) / (_PRIOR_WEIGHT + seen)
        longest = (_PRIOR_WEIGHT * limit + seen * sorted(window)[rank]) / (_PRIOR_WEIGHT + seen)
        mean = min(max(1.0, mean), limit)
        return Lengths(mean, min(max(mean, longest), limit))


def _median_of_means(window: deque[int]) -> float:
    values = list(window)
    if len(values) < 2 * _NUM_BLOCKS:
        return sum(values) / len(values)
    means = sorted(sum(block) / len(block) for block in (values[start::_NUM_BLOCKS] for start in range(_NUM_BLOCKS)))
    return (means[_NUM_BLOCKS // 2 - 1] + means[_NUM_BLOCKS // 2]) / 2
