"""Weights that correct for sampling with another policy: w = exp(lp_old - lp_mu), truncated or masked.

TIS (truncated): min(w, cap). MIS / IcePop (masked): w where low <= w <= high, else 0. Per token or per sequence.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Level = Literal["token", "sequence"]


def importance_weights(
    old_logprobs_L: NDArray[np.float64],
    sampler_logprobs_L: NDArray[np.float64],
    mask_L: NDArray[np.bool_],
    level: Level = "token",
) -> NDArray[np.float64]:
    """Raw weights of one response; masked positions do not count and get 1 (token) or the sequence's weight."""
    difference = np.where(mask_L, old_logprobs_L - sampler_logprobs_L, 0.0)
    if level == "sequence":
        return np.full(difference.shape, np.exp(np.clip(difference.sum(), -60.0, 60.0)))
    return np.exp(np.clip(difference, -60.0, 60.0))


def truncated(weights_L: NDArray[np.float64], cap: float) -> NDArray[np.float64]:
    """TIS: min(w, cap)."""
    return np.minimum(weights_L, cap)


def masked(weights_L: NDArray[np.float64], low: float, high: float) -> NDArray[np.float64]:
    """MIS: w inside [low, high], 0 outside."""
    return np.where((weights_L >= low) & (weights_L <= high), weights_L, 0.0)


def effective_sample_share(weights: NDArray[np.float64]) -> float:
    """(sum w)^2 / (n * sum w^2) in (0, 1]; a small one announces collapse (arXiv 2602.17616). 0 for no weights."""
    total = float((weights**2).sum())
    return float(weights.sum()) ** 2 / (weights.size * total) if total > 0 else 0.0
