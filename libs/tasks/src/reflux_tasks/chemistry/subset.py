"""A small, fixed part of a task's problems, for trials."""

from typing import TypeVar

import numpy as np

SUBSET_SEED = 7
P = TypeVar("P")


def small_parts(parts: tuple[list[P], list[P]], count: int) -> tuple[list[P], list[P]]:
    """A fixed random choice of `count` problems for training and a quarter as many held-out ones; 0 takes all."""
    if count == 0:
        return parts
    counts = (count, max(1, count // 4))
    orders = [np.random.default_rng(SUBSET_SEED).permutation(len(part)) for part in parts]
    first, second = (
        [part[i] for i in sorted(order[:most].tolist())]
        for part, order, most in zip(parts, orders, counts, strict=True)
    )
    return first, second
