"""Weighted maximum likelihood: -w * lp, with the weight w of the token or example in place of the advantage."""

from reflux_trainer.learner.losses.batch import TokenBatch, TokenLosses, unclipped
from reflux_trainer.learner.ops import LossSpec


def cross_entropy(batch: TokenBatch, spec: LossSpec) -> TokenLosses:
    """-w * lp."""
    del spec
    return unclipped(-batch.advantages_T * batch.logprobs_T)
