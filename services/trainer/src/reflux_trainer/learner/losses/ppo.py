"""PPO: max(-r * A, -clip(r, lo, hi) * A). arXiv 1707.06347. Clip-higher (DAPO, 2503.14476) is clip_high > clip_low.

GRPO (arXiv 2402.03300), Dr.GRPO, DAPO and RLOO use this loss; they differ in advantages and aggregation.
"""

from reflux_trainer.learner.losses.batch import TokenBatch, TokenLosses, clipped, ratio
from reflux_trainer.learner.ops import LossSpec


def ppo(batch: TokenBatch, spec: LossSpec) -> TokenLosses:
    """max(-r * A, -clip(r, lo, hi) * A)."""
    return clipped(ratio(batch), batch.advantages_T, spec)
