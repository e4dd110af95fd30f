"""GRPO: A_i = (R_i - mean R) / (std R + eps). DeepSeekMath, arXiv 2402.03300."""

import numpy as np
from numpy.typing import NDArray

from reflux_trainer.algo.rewards import Rewards, known, spread_known


def grpo_advantages(rewards_G: Rewards, *, ddof: int = 1, eps: float = 1e-6) -> NDArray[np.float64]:
    """Advantages of one group.

    `ddof` 1 is the sample deviation (common in trainers), 0 the population one (the paper); the two differ by a factor
    of sqrt(G / (G - 1)). A group whose known rewards are all equal gets 0. Unknown members get 0 and do not count.
    """
    values = rewards_G[known(rewards_G)]
    if values.size < 2 or np.ptp(values) == 0:
        return np.zeros(rewards_G.shape)
    return spread_known(rewards_G, (values - values.mean()) / (values.std(ddof=ddof) + eps))
