"""RLOO: A_i = R_i - mean of the others = G / (G - 1) * (R_i - mean R). arXiv 2402.14740."""

import numpy as np
from numpy.typing import NDArray

from reflux_trainer.algo.rewards import Rewards, known, spread_known


def rloo_advantages(rewards_G: Rewards) -> NDArray[np.float64]:
    """Advantages of one group; a group of one known member gets 0. Unknown members get 0 and do not count."""
    values = rewards_G[known(rewards_G)]
    if values.size < 2:
        return np.zeros(rewards_G.shape)
    return spread_known(rewards_G, values.size / (values.size - 1) * (values - values.mean()))
