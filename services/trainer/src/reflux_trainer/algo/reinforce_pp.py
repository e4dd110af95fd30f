"""REINFORCE++: discounted per-token returns, whitened over the global batch. arXiv 2501.03262."""

from collections.abc import Sequence

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


def reinforce_pp_advantages(rewards: Sequence[NDArray[np.float64]], gamma: float = 1.0) -> list[NDArray[np.float64]]:
    """Advantages per token of every response of the *global* batch, from its rewards per token.

    Every token's return is whitened over all tokens of all responses, so that no group and no critic is needed.
    """
    returns = [discounted_returns(rewards_L, gamma) for rewards_L in rewards]
    flat = np.concatenate([np.zeros(0), *returns])
    whitened = whiten(flat, np.ones(flat.size, bool))
    return np.split(whitened, np.cumsum([each.size for each in returns])[:-1]) if returns else []
