"""REINFORCE++: discounted per-token returns, whitened over the global batch. arXiv 2501.03262."""

import numpy as np
from numpy.typing import NDArray


def discounted_returns(rewards_L: NDArray[np.float64], gamma: float) -> NDArray[np.float64]:
    """G_t = r_t + gamma * G_{t+1} for one response."""
    returns = np.zeros(rewards_L.shape)
    following = 0.0
    for step in range(rewards_L.size - 1, -1, -1):
        following = rewards_L[step] + gamma * following
        returns[step] = following
    return returns


def whiten(values: NDArray[np.float64], mask: NDArray[np.bool_], eps: float = 1e-8) -> NDArray[np.float64]:
    """(x - mean) / sample deviation over the masked entries of the whole batch; fewer than two stay as they are."""
    chosen = values[mask]
    if chosen.size < 2:
        return values
    return np.where(mask, (values - chosen.mean()) / (chosen.std(ddof=1) + eps), values)
