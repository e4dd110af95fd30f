"""Generalised advantage estimation for PPO with a critic. arXiv 1506.02438.

delta_t = r_t + gamma * V_{t+1} - V_t; A_t = sum_k (gamma * lambda)^k delta_{t+k}.
"""

import numpy as np
from numpy.typing import NDArray


def gae_advantages(
    rewards_L: NDArray[np.float64],
    values_L: NDArray[np.float64],
    *,
    gamma: float,
    lam: float,
    bootstrap_value: float = 0.0,
) -> NDArray[np.float64]:
    """Advantages of one response; `bootstrap_value` is the critic's value behind a truncated last token."""
    following_values = np.append(values_L[1:], bootstrap_value)
    deltas = rewards_L + gamma * following_values - values_L
    advantages = np.zeros(rewards_L.shape)
    running = 0.0
    for step in range(rewards_L.size - 1, -1, -1):
        running = deltas[step] + gamma * lam * running
        advantages[step] = running
    return advantages
