"""From token losses to one number: each mode is a weight per token, fixed on the *global* batch.

Because the weights are known before the batch is cut into micro-batches or spread over ranks, every cut gives the same
sum.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

Aggregation = Literal["token_mean", "sequence_mean", "sequence_mean_token_sum", "constant", "sum"]
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)


def token_weights(
    masks: Sequence[NDArray[np.bool_]], mode: Aggregation, *, constant_length: int = 0
) -> list[NDArray[np.float64]]:
    """Weight of each token of each sequence, so that the loss is sum(weight * token loss).

    token_mean: 1 / sum(m) over all sequences (DAPO). sequence_mean: 1 / (sequences * own tokens) (GRPO). constant:
    1 / (sequences * `constant_length`) (Dr.GRPO). sequence_mean_token_sum: 1 / sequences. sum: 1. Masked tokens get 0,
    and a batch without counted tokens gets zeros. Sequences that are masked altogether do not count as sequences.
    """
    counts = np.array([int(mask.sum()) for mask in masks])
    sequences = max(1, int((counts > 0).sum()))
    if mode == "token_mean":
        scale = np.full(len(masks), 1.0 / max(1, int(counts.sum())))
    elif mode == "sequence_mean":
        scale = 1.0 / (sequences * np.maximum(counts, 1))
    elif mode == "constant":
        if constant_length < 1:
            raise ValueError(f"aggregation 'constant' needs constant_length >= 1, got {constant_length}")
        scale = np.full(len(masks), 1.0 / (sequences * constant_length))
    elif mode == "sequence_mean_token_sum":
        scale = np.full(len(masks), 1.0 / sequences)
    else:
        scale = np.ones(len(masks))
    return [mask * factor for mask, factor in zip(masks, scale, strict=True)]
