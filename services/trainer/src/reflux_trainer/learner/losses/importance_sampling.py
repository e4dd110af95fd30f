"""Importance sampling: -r * A, with the sampler as lp_old: unbiased for off-policy tokens, unbounded variance."""

from reflux_trainer.learner.losses.batch import TokenBatch, TokenLosses, ratio, unclipped
from reflux_trainer.learner.ops import LossSpec


def importance_sampling(batch: TokenBatch, spec: LossSpec) -> TokenLosses:
    """-r * A."""
    del spec
    return unclipped(-ratio(batch) * batch.advantages_T)
