"""What a full verification is worth: the expected change of its group's advantages, per CPU second. Pure.

The full reward of an answer is forecast by the full rewards of its nearest neighbours in the calibration window, where
near means: a similar reward on the cheap rung, and a similar lead over the rest of the group (advantages are relative,
and so is the surrogate's verdict: the same reward means less when another answer of the group fits better). An answer
that is not verified counts with the mean of its forecast.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from reflux_sandbox.ladder.calibration import Array, Record

Estimator = Literal["grpo", "centred"]
"""Advantages that the run computes: over the sample deviation (GRPO), or the distance to the mean (Dr.GRPO; RLOO's are
a constant multiple of it)."""
ESTIMATORS: tuple[Estimator, ...] = get_args(Estimator)

ATOMS = 64
"""Equally likely full rewards that stand for a forecast."""
_LEAST_NEIGHBOURS = 8
"""Of n pairs the nearest sqrt(n) count, at least these: the usual compromise of bias and variance."""
_LEVELS = (np.arange(ATOMS) + 0.5) / ATOMS
_EPS = 1e-6
"""Beside the deviation, as in the trainer's GRPO."""
_SEED = 20_261_201


@dataclass(frozen=True)
class Outlook:
    """What is known of one different answer of a group: equally likely full rewards [ATOMS], all equal once known."""

    atoms: Array
    copies: int
    """Samples of the group that gave this answer."""
    cpu_seconds: float = 0.0
    """What its verification will take; 0 when nothing is known."""

    @property
    def estimate(self) -> float:
        """Reward to count with: the mean of the forecast."""
        return float(self.atoms.mean())

    @property
    def known(self) -> bool:
        return bool(np.ptp(self.atoms) == 0)

    @property
    def interval(self) -> tuple[float, float]:
        """Middle 90 % of the forecast."""
        low, high = np.quantile(self.atoms, (0.05, 0.95), method="inverted_cdf")
        return float(low), float(high)


def settled(reward: float, copies: int) -> Outlook:
    """The outlook of an answer whose full reward is known."""
    return Outlook(np.full(ATOMS, reward), copies)


class Forecaster:
    """Forecasts from the pairs of a calibration window; an empty one cannot forecast."""

    def __init__(self, window: Sequence[Record]) -> None:
        pairs = [record for record in window if record.full is not None]
        self._cheap = np.array([record.cheap for record in pairs])
        self._lead = np.array([record.lead for record in pairs])
        self._full = np.array([record.full for record in pairs], dtype=np.float64)
        self._weights = np.array([record.weight for record in pairs])
        self._cpu_seconds = np.array([record.cpu_seconds for record in pairs])
        self._nearest = max(_LEAST_NEIGHBOURS, round(math.sqrt(len(pairs))))

    def __len__(self) -> int:
        return len(self._full)

    def outlook(self, cheap: float, lead: float, copies: int) -> Outlook:
        """The forecast for an answer. Raises ValueError when nothing was ever verified."""
        if not len(self):
            raise ValueError("there is no pair to forecast from")
        distance = np.hypot(self._cheap - cheap, self._lead - lead)
        near = np.argsort(distance, kind="stable")[: self._nearest]
        order = near[np.argsort(self._full[near], kind="stable")]
        weights = self._weights[order]
        share = np.cumsum(weights) / weights.sum()
        atoms = self._full[order][np.searchsorted(share, _LEVELS).clip(max=len(order) - 1)]
        return Outlook(atoms, copies, float((self._cpu_seconds[order] * weights).sum() / weights.sum()))


def leads(cheap: Sequence[float]) -> list[float]:
    """Each reward minus the best of the others; 0 when there is no other."""
    if len(cheap) < 2:
        return [0.0] * len(cheap)
    best, second = sorted(cheap)[-1], sorted(cheap)[-2]
    return [reward - (second if reward == best else best) for reward in cheap]


def advantages(rewards_DC: Array, copies_C: NDArray[np.int64], estimator: Estimator) -> Array:
    """Advantage of one sample of each different answer, for D cases at once; equal rewards give 0.

    `grpo`: (R - mean R) / (std R + 1e-6) with ddof 1 over all samples of the group (arXiv 2402.03300).
    """
    count = int(copies_C.sum())
    mean = (rewards_DC * copies_C).sum(axis=-1, keepdims=True) / count
    centred = rewards_DC - mean
    flat = np.ptp(rewards_DC, axis=-1, keepdims=True) == 0
    if estimator == "centred":
        return np.where(flat, 0.0, centred)
    variance = (centred**2 * copies_C).sum(axis=-1, keepdims=True) / max(1, count - 1)
    return np.where(flat, 0.0, centred / (np.sqrt(variance) + _EPS))


def _mean_change(before_DC: Array, after_DC: Array, copies_C: NDArray[np.int64]) -> float:
    """Mean over cases and samples of the absolute difference."""
    return float((np.abs(after_DC - before_DC) * copies_C).sum(axis=-1).mean() / copies_C.sum())


def gains(group: Sequence[Outlook], estimator: Estimator) -> list[float]:
    """Expected mean |change| of the group's advantages when the full reward of one answer becomes known, for each.

    >= 0; 0 for a known answer, and for all of a group whose samples gave one answer. For `centred` it grows in
    proportion to the spread of the forecast; for `grpo` the group's own deviation sets the scale.
    """
    if not group:
        return []
    copies = np.array([outlook.copies for outlook in group])
    estimates = np.array([outlook.estimate for outlook in group])
    now = advantages(estimates[None], copies, estimator)
    worth = []
    for position, outlook in enumerate(group):
        if outlook.known:
            worth.append(0.0)
            continue
        cases = np.tile(estimates, (ATOMS, 1))
        cases[:, position] = outlook.atoms
        worth.append(_mean_change(now, advantages(cases, copies, estimator), copies))
    return worth


def expected_error(group: Sequence[Outlook], estimator: Estimator) -> float:
    """Expected mean |A with all full rewards - A with the estimates| over the samples of the group, by Monte Carlo.

    The draws have a fixed seed and are dealt in an order of the answers' own, so that the order of the group does not
    matter; each forecast is drawn without replacement (a Latin hypercube), so that it is met exactly.
    """
    if all(outlook.known for outlook in group):
        return 0.0
    ordered = sorted(group, key=lambda outlook: (outlook.copies, *outlook.atoms.tolist()))
    dice = np.random.default_rng(_SEED)
    draws = np.stack([dice.permutation(outlook.atoms) for outlook in ordered], axis=-1)
    copies = np.array([outlook.copies for outlook in ordered])
    estimates = np.array([outlook.estimate for outlook in ordered])
    used = advantages(estimates[None], copies, estimator)
    return _mean_change(used, advantages(draws, copies, estimator), copies)
