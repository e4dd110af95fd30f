"""Dr.GRPO: A_i = R_i - mean R, without division by the deviation. arXiv 2503.20783.

Its loss divides by a constant length, not by each response's own: aggregation "constant".
"""

import numpy as np
from numpy.typing import NDArray

from reflux_trainer.algo.rewards import Rewards, known, spread_known


def dr_grpo_advantages(rewards_G: Rewards) -> NDArray[np.float64]:
    """Advantages of one group; unknown members get 0 and do not count."""
    values = rewards_G[known(rewards_G)]
    if values.size == 0:
        return np.zeros(rewards_G.shape)
    return spread_known(rewards_G, values - values.mean())
