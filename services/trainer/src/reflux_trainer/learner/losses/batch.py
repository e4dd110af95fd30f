"""What every token loss gets and gives, and the ratios that several of them share."""

from dataclasses import dataclass

import torch
from torch import Tensor

from reflux_trainer.learner.ops import LossSpec

MAX_LOG_RATIO = 20.0
"""exp() of more than this says nothing any more and overflows soon after."""


@dataclass(frozen=True)
class TokenBatch:
    """Flat tokens of whole completions; `completion_T` numbers the completion of each token, from 0."""

    logprobs_T: Tensor
    old_logprobs_T: Tensor
    """Of the proximal policy, which the ratio is taken to."""
    sampler_logprobs_T: Tensor
    reference_logprobs_T: Tensor
    advantages_T: Tensor
    completion_T: Tensor
    mask_T: Tensor
    """1.0 where a token counts."""


@dataclass(frozen=True)
class TokenLosses:
    """Loss per token, and where the clip was active."""

    loss_T: Tensor
    clipped_T: Tensor


def ratio(batch: TokenBatch) -> Tensor:
    """r = exp(lp - lp_old) per token."""
    return (batch.logprobs_T - batch.old_logprobs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def sequence_ratio(batch: TokenBatch) -> Tensor:
    """exp of the masked mean of lp - lp_old over each completion, spread over its tokens."""
    sums = per_completion(batch, batch.logprobs_T - batch.old_logprobs_T)
    lengths = per_completion(batch, torch.ones_like(batch.mask_T))
    means = (sums / lengths.clamp_min(1.0)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return means.exp()[batch.completion_T]


def per_completion(batch: TokenBatch, values_T: Tensor) -> Tensor:
    """Masked sum of the values over each completion, one per completion."""
    count = int(batch.completion_T.max()) + 1 if batch.completion_T.numel() else 0
    zeros = torch.zeros(count, dtype=values_T.dtype, device=values_T.device)
    return zeros.index_add(0, batch.completion_T, values_T * batch.mask_T)


def clipped(ratio_T: Tensor, advantages_T: Tensor, spec: LossSpec) -> TokenLosses:
    """max(-r * A, -clip(r, lo, hi) * A)."""
    free_T = -ratio_T * advantages_T
    clipped_T = -ratio_T.clamp(1 - spec.clip_low, 1 + spec.clip_high) * advantages_T
    return TokenLosses(torch.maximum(free_T, clipped_T), (clipped_T > free_T).detach())


def unclipped(loss_T: Tensor) -> TokenLosses:
    """A loss that knows no clip."""
    return TokenLosses(loss_T, torch.zeros_like(loss_T, dtype=torch.bool))
