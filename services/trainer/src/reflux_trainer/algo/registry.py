"""Advantage estimators by the name that a run's configuration uses."""

from collections.abc import Callable
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from reflux_trainer.algo.dr_grpo import dr_grpo_advantages
from reflux_trainer.algo.grpo import grpo_advantages
from reflux_trainer.algo.leave_one_out import leave_one_out_advantages
from reflux_trainer.algo.rewards import Rewards
from reflux_trainer.algo.rloo import rloo_advantages

Algorithm = Literal["grpo", "dr_grpo", "rloo", "leave_one_out"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)

ADVANTAGES: dict[Algorithm, Callable[[Rewards], NDArray[np.float64]]] = {
    "grpo": grpo_advantages,
    "dr_grpo": dr_grpo_advantages,
    "rloo": rloo_advantages,
    "leave_one_out": leave_one_out_advantages,
}
"""Rewards of one group (NaN = unknown) -> advantages, 0 where unknown."""
