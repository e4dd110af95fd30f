"""95 % confidence intervals of what an evaluation measures. Pure."""

import math
from collections.abc import Sequence

_Z = 1.959963984540054
"""97.5 % quantile of the normal distribution."""


def share_interval(hits: float, count: int) -> tuple[float, float]:
    """Of a share of `count` > 0 independent trials, after Wilson (J. Am. Stat. Assoc. 22, 209, 1927): it keeps its
    coverage for few trials and for shares near 0 and 1."""
    share, weight = hits / count, _Z**2 / count
    centre = (share + weight / 2) / (1 + weight)
    half = _Z * math.sqrt(share * (1 - share) / count + weight / (4 * count)) / (1 + weight)
    return max(0.0, centre - half), min(1.0, centre + half)


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Of the mean of two or more independent values, by Student's t."""
    count = len(values)
    mean = sum(values) / count
    error = math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1) / count)
    half = _student_quantile(count - 1) * error
    return mean - half, mean + half


def _student_quantile(freedom: int) -> float:
    """97.5 % quantile of Student's t, exact for 1 and 2 degrees of freedom.

    Else the expansion of Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5.
    """
    if freedom <= 2:
        return math.tan(math.pi * 0.475) if freedom == 1 else 0.95 * math.sqrt(2 / (1 - 0.95**2))
    z, v = _Z, freedom
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * v**4)
    )
