"""DRO: -(A * lp - beta / 2 * (lp - lp_mu)^2): a quadratic pull to the sampler in place of a clip. arXiv 2405.19107."""

from reflux_trainer.learner.losses.batch import TokenBatch, TokenLosses, unclipped
from reflux_trainer.learner.ops import LossSpec


def dro(batch: TokenBatch, spec: LossSpec) -> TokenLosses:
    """-(A * lp - beta / 2 * (lp - lp_mu)^2)."""
    distance_T = batch.logprobs_T - batch.sampler_logprobs_T
    return unclipped(-batch.advantages_T * batch.logprobs_T + spec.dro_beta / 2 * distance_T**2)
