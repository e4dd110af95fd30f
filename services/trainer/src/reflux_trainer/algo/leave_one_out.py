"""Leave-one-out normalisation: A_i = (R_i - mean of the others) / std of the others (sample deviation)."""

import numpy as np
from numpy.typing import NDArray

from reflux_trainer.algo.rewards import Rewards, known, spread_known


def leave_one_out_statistics(values_G: Rewards) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean and sample deviation of the others, for each member; needs at least three known rewards (ValueError)."""
    count = values_G.size
    if count < 3:
        raise ValueError(f"leave-one-out deviation needs 3 members, got {count}")
    means = (values_G.sum() - values_G) / (count - 1)
    others = np.broadcast_to(values_G, (count, count))[~np.eye(count, dtype=bool)].reshape(count, count - 1)
    return means, others.std(axis=1, ddof=1)


def leave_one_out_advantages(rewards_G: Rewards, *, eps: float = 1e-6) -> NDArray[np.float64]:
    """Advantages of one group; 0 with fewer than three known members. Unknown members get 0 and do not count."""
    values = rewards_G[known(rewards_G)]
    if values.size < 3 or np.ptp(values) == 0:
        return np.zeros(rewards_G.shape)
    means, deviations = leave_one_out_statistics(values)
    return spread_known(rewards_G, (values - means) / (deviations + eps))
