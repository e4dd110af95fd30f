"""Groups of raw rewards: NaN stands for an unknown one, and what a group can teach is decided here."""

import numpy as np
from numpy.typing import NDArray

Rewards = NDArray[np.float64]
"""Rewards of one group, shape (G,); NaN = unknown (timed out, cancelled, infrastructure error)."""


def known(rewards_G: Rewards) -> NDArray[np.bool_]:
    """True where the reward is known."""
    return ~np.isnan(rewards_G)


def has_signal(raw_rewards_G: Rewards, tolerance: float = 1e-9) -> bool:
    """True when at least two known *raw* rewards differ: the group is worth a gradient (dynamic sampling of DAPO).

    Decide it on the raw reward: shaping (length penalties) makes an all-correct group look mixed. arXiv 2503.14476.
    """
    values = raw_rewards_G[known(raw_rewards_G)]
    return values.size >= 2 and bool(values.max() - values.min() > tolerance)


def spread_known(rewards_G: Rewards, advantages_of_known: NDArray[np.float64]) -> NDArray[np.float64]:
    """Puts the known members' advantages back in place; unknown members get 0 and must be masked out of the loss."""
    advantages = np.zeros(rewards_G.shape)
    advantages[known(rewards_G)] = advantages_of_known
    return advantages
