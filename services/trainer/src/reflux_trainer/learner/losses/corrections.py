"""Weights for having sampled with another policy, w = exp(lp_old - lp_mu), as in `algo.corrections` but in torch.

TIS: min(w, cap). Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".
MIS / IcePop: w where low <= w <= high, else 0. Per token, or one per completion: the product of its tokens'.
"""

import torch
from torch import Tensor

from reflux_trainer.algo.corrections import Level
from reflux_trainer.learner.losses.batch import MAX_LOG_RATIO, TokenBatch, per_completion
from reflux_trainer.learner.ops import LossSpec


def raw_weights(batch: TokenBatch, level: Level) -> Tensor:
    """exp(lp_old - lp_mu) without gradient, one per token; a completion's is that of all its tokens."""
    difference_T = (batch.old_logprobs_T - batch.sampler_logprobs_T).detach()
    if level == "sequence":
        difference_T = per_completion(batch, difference_T)[batch.completion_T]
    return difference_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def correction_weights(batch: TokenBatch, spec: LossSpec) -> Tensor:
    """What each token's loss is multiplied by: ones when the spec has no correction."""
    if not spec.corrected:
        return torch.ones_like(batch.mask_T)
    weights_T = raw_weights(batch, spec.correction_level)
    if spec.mis_high > 0:
        weights_T = torch.where((weights_T >= spec.mis_low) & (weights_T <= spec.mis_high), weights_T, 0.0)
    return weights_T.clamp_max(spec.tis_cap) if spec.tis_cap > 0 else weights_T
