"""How many tokens a sample of a run will have: learned online from the samples that finished."""

import math
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from reflux_inference_gateway.routing.base import Ask

_WINDOW = 256
"""Lengths that are remembered per run: a policy changes its lengths over a few steps."""
_MAX_RUNS = 128
_NUM_BLOCKS = 8
_PRIOR_WEIGHT = 4
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


@dataclass
class _Window:
    """Lengths of one run; the summary is made when it is asked for: samples end more often than groups begin."""

    lengths: deque[int] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    known: tuple[float, list[int]] | None = None

    def add(self, lengths: list[int]) -> None:
        self.lengths.extend(lengths)
        self.known = None

    def summary(self) -> tuple[float, list[int]]:
        """Median of means, and the lengths in ascending order."""
        if self.known is None:
            self.known = (_median_of_means(list(self.lengths)), sorted(self.lengths))
        return self.known


class LengthBook:
    """The last lengths of each run; the runs that were silent longest are dropped.

    Mean: the median m of the means of 8 interleaved blocks of the window (median of means: Nemirovsky and Yudin 1983;
    error bounds for heavy tails in Lugosi and Mendelson, "Mean estimation and regression under heavy-tailed
    distributions", 2019), shrunk towards the prior on a scale of logarithms, because a limit may be 100 times what is
    used of it: prior ** (4 / (4 + count)) * m ** (count / (4 + count)). With fewer than 2 lengths per block m is the
    plain mean. Longest of n: the window's quantile at n / (n + 1), the expected rank of a maximum of n draws, shrunk
    towards the limit in the same way. The samples that finish first are the short ones, so the first estimates of a
    burst are low; it heals within a window.
    """

    def __init__(self) -> None:
        self._runs: OrderedDict[str, _Window] = OrderedDict()

    def learn(self, run: str, lengths: Iterable[int]) -> None:
        """Adds finished samples."""
        found = list(lengths)
        if not found:
            return
        self._runs.setdefault(run, _Window()).add(found)
        self._runs.move_to_end(run)
        if len(self._runs) > _MAX_RUNS:
            self._runs.popitem(last=False)

    def expect(self, ask: Ask) -> Lengths:
        """Expected lengths of the samples of a request, between 1 and its limit."""
        limit = ask.max_tokens or _UNKNOWN_LIMIT
        prior = _PRIOR_SHARE * limit
        window = self._runs.get(ask.run)
        if window is None:
            return Lengths(max(1.0, prior), float(limit))
        middle, ordered = window.summary()
        limit, seen = ask.max_tokens or max(limit, ordered[-1]), len(ordered)
        rank = min(seen - 1, seen * ask.num_samples // (ask.num_samples + 1))
        mean = min(_shrunk(middle, prior, seen), limit)
        longest = _shrunk(ordered[rank], limit, seen)
        return Lengths(mean, min(max(mean, longest), limit))


def _shrunk(seen: float, prior: float, count: int) -> float:
    part = _PRIOR_WEIGHT / (_PRIOR_WEIGHT + count)
    return math.exp(part * math.log(max(1.0, prior)) + (1 - part) * math.log(max(1.0, seen)))


def _median_of_means(values: list[int]) -> float:
    if len(values) < 2 * _NUM_BLOCKS:
        return sum(values) / len(values)
    means = sorted(sum(block) / len(block) for block in (values[start::_NUM_BLOCKS] for start in range(_NUM_BLOCKS)))
    return (means[_NUM_BLOCKS // 2 - 1] + means[_NUM_BLOCKS // 2]) / 2
