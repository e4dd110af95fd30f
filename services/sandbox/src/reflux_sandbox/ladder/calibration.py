"""How far the cheap rung of a run can be trusted: figures of cheap against full grades over a sliding window. Pure.

Full grades are not a random sample of the answers: the value of information picks where they are needed. Each pair
counts with the inverse of the probability that it was verified (Horvitz and Thompson, 1952; with the weights' own sum
below, Hajek 1971): 1 for an answer that would have been verified anyway, 1 / audit share for one that was verified
only because its group was drawn for the audit. So the figures speak of all released answers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Record:
    """One released answer whose fate is settled. Equal answers of a group are one record."""

    cheap: float
    """Reward of the release rung."""
    lead: float
    """`cheap` minus the best of the other answers of its group; 0 when there is no other."""
    copies: int = 1
    """Samples of the group that gave this answer."""
    full: float | None = None
    """Reward of the full rung; None when it was skipped, or ended without a verdict."""
    weight: float = 1.0
    """1 / probability that the answer was to be verified."""
    cpu_seconds: float = 0.0
    """What the full verification took; 0 when it was skipped."""
    predicted: tuple[float, float] | None = None
    """Interval in which the full reward was expected, from what was known before; None while nothing was."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Cheap against full over the window; NaN where too little is known."""

    pairs: int
    """Answers with both grades."""
    effective_pairs: float
    """(sum w)^2 / sum w^2: equally weighted pairs that would say as much (Kish, 1965)."""
    bias: float
    """Mean of cheap minus full; above 0 the cheap rung flatters."""
    rank_correlation: float
    """Spearman's, by weighted mid-ranks."""
    coverage: float
    """Share of released samples that got a full grade."""
    interval_coverage: float
    """Share of full rewards inside the interval that was predicted before they were known."""
    spread: float
    """Standard deviation of full minus cheap."""


@dataclass(frozen=True, kw_only=True)
class TrustLimits:
    """When the cheap rung may release a group. `enter` above `leave`: trust does not flicker at one limit."""

    enter: float = 0.5
    leave: float = 0.35
    least_pairs: float = 32.0
    """Effective pairs below which nothing is trusted."""

    def __post_init__(self) -> None:
        if not (-1.0 <= self.leave <= self.enter <= 1.0 and 2 <= self.least_pairs < math.inf):
            raise ValueError(f"trust needs -1 <= leave <= enter <= 1 and a finite least_pairs >= 2, got {self}")


def figures(window: Sequence[Record]) -> Figures:
    """Calibration of the records in `window`."""
    pairs = [record for record in window if record.full is not None]
    weights = np.array([record.weight for record in pairs])
    cheap = np.array([record.cheap for record in pairs])
    full = np.array([record.full for record in pairs], dtype=np.float64)
    released = sum(record.copies for record in window)
    predicted = [record for record in pairs if record.predicted is not None]
    return Figures(
        pairs=len(pairs),
        effective_pairs=float(weights.sum() ** 2 / (weights**2).sum()) if pairs else 0.0,
        bias=_mean(cheap - full, weights),
        rank_correlation=rank_correlation(cheap, full, weights),
        coverage=sum(record.copies for record in pairs) / released if released else math.nan,
        interval_coverage=_mean(
            np.array([float(_inside(record)) for record in predicted]),
            np.array([record.weight for record in predicted]),
        ),
        spread=math.sqrt(_mean((full - cheap - _mean(full - cheap, weights)) ** 2, weights)) if pairs else math.nan,
    )


def is_trusted(before: bool, known: Figures, limits: TrustLimits) -> bool:
    """Whether the cheap rung releases groups from now on; `before` is the last answer of the same run."""
    if known.effective_pairs < limits.least_pairs or math.isnan(known.rank_correlation):
        return False
    return known.rank_correlation >= (limits.leave if before else limits.enter)


def rank_correlation(x: Array, y: Array, weights: Array) -> float:
    """Spearman's coefficient of weighted pairs; NaN when one side is constant or fewer than two pairs are known."""
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return math.nan
    first, second = _mid_ranks(x, weights), _mid_ranks(y, weights)
    first, second = first - _mean(first, weights), second - _mean(second, weights)
    spread = math.sqrt(float((weights * first**2).sum()) * float((weights * second**2).sum()))
    return float(np.clip((weights * first * second).sum() / spread, -1.0, 1.0))


def _mid_ranks(values: Array, weights: Array) -> Array:
    """Weight below each value plus half the weight at it."""
    different, position = np.unique(values, return_inverse=True)
    at = np.bincount(position, weights, minlength=len(different))
    return (np.cumsum(at) - at / 2)[position]


def _mean(values: Array, weights: Array) -> float:
    return float((values * weights).sum() / weights.sum()) if len(values) else math.nan


def _inside(record: Record) -> bool:
    assert record.predicted is not None
    assert record.full is not None
    return record.predicted[0] <= record.full <= record.predicted[1]
