"""The random numbers of problems: a stream per split, so that a problem is a function of (seed, split, index)."""

from collections.abc import Mapping

import numpy as np

from reflux_tasks.task import Split

STREAMS: Mapping[Split, int] = {"warmup": 1, "train": 2, "heldout": 3}


def problem_generator(split: Split, index: int, seed: int, heldout_seed: int) -> np.random.Generator:
    """The generator of one problem; held-out ones have a seed of their own, so that runs are judged on equal problems.

    Raises ValueError for a split that there is not, and for a negative index.
    """
    if split not in STREAMS or index < 0:
        raise ValueError(f"no problem {split}/{index}: splits are {', '.join(STREAMS)}, indices start at 0")
    return np.random.default_rng((STREAMS[split], heldout_seed if split == "heldout" else seed, index))
