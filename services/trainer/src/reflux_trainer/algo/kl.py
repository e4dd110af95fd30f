"""Per-token estimators of KL(policy || reference), with d = lp_ref - lp. Schulman, "Approximating KL divergence"."""

from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

Estimator = Literal["k1", "k2", "k3"]
ESTIMATORS: tuple[Estimator, ...] = get_args(Estimator)


def kl_estimate(
    logprobs: NDArray[np.float64], reference: NDArray[np.float64], estimator: Estimator, clamp: float = 60.0
) -> NDArray[np.float64]:
    """k1 = -d; k2 = d^2 / 2; k3 = exp(d) - d - 1 (never negative; d is clamped because exp overflows)."""
    difference = reference - logprobs
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference**2 / 2
    bounded = np.clip(difference, -clamp, clamp)
    return np.exp(bounded) - bounded - 1


def penalised_rewards(
    reward: float, logprobs_L: NDArray[np.float64], reference_L: NDArray[np.float64], beta: float, estimator: Estimator
) -> NDArray[np.float64]:
    """KL as a reward, one per token: -beta * KL at every token, and the response's reward at its last one.

    In the loss the same estimators have a gradient of their own (`learner.losses.kl`); here they shape advantages.
    """
    rewards_L = -beta * kl_estimate(logprobs_L, reference_L, estimator)
    rewards_L[-1] += reward
    return rewards_L
