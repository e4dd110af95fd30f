"""REINFORCE: -A * lp. Williams, "Simple statistical gradient-following algorithms", Machine Learning 8 (1992)."""

from reflux_trainer.learner.losses.batch import TokenBatch, TokenLosses, unclipped
from reflux_trainer.learner.ops import LossSpec


def reinforce(batch: TokenBatch, spec: LossSpec) -> TokenLosses:
    """-A * lp."""
    del spec
    return unclipped(-batch.advantages_T * batch.logprobs_T)
