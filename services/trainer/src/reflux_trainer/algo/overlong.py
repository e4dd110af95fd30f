"""Soft overlong penalty of DAPO: 0 up to L_max - buffer, then linear to -1 at L_max. arXiv 2503.14476, section 3.4."""

import numpy as np
from numpy.typing import NDArray


def overlong_penalty(
    lengths: NDArray[np.int64], *, max_length: int, buffer: int, factor: float = 1.0, floor: bool = True
) -> NDArray[np.float64]:
    """Penalty per response, to be added to its reward (tokens in, <= 0 out).

    With `floor` it never falls below -`factor` (the paper); without, it goes on falling above `max_length`.
    """
    penalty = np.minimum((max_length - buffer - lengths) / buffer, 0.0)
    return factor * (np.maximum(penalty, -1.0) if floor else penalty)
