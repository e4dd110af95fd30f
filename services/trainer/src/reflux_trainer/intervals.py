"""95 % confidence intervals of what an evaluation measures. Pure."""

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import ndtri, stdtrit

_UPPER = 0.975
"""Share of the distribution below the upper end."""


def share_interval(hits: float, count: int) -> tuple[float, float]:
    """Of a share of `count` > 0 independent trials, after Wilson (J. Am. Stat. Assoc. 22, 209, 1927): it keeps its
    coverage for few trials and for shares near 0 and 1."""
    z = float(ndtri(_UPPER))
    share, weight = hits / count, z**2 / count
    centre = (share + weight / 2) / (1 + weight)
    half = z * math.sqrt(share * (1 - share) / count + weight / (4 * count)) / (1 + weight)
    return max(0.0, centre - half), min(1.0, centre + half)


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Of the mean of two or more independent values, by Student's t."""
    count, mean = len(values), float(np.mean(values))
    half = float(stdtrit(count - 1, _UPPER) * np.std(values, ddof=1)) / math.sqrt(count)
    return mean - half, mean + half
