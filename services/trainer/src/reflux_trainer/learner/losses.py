"""Token losses in torch; each function gives one value per token, aggregation is a weight per token (algo.aggregation).

Notation: lp = log-prob under the policy being optimised (gradient), lp_old = proximal policy, r = exp(lp - lp_old),
A = advantage, [lo, hi] = [1 - clip_low, 1 + clip_high], sg = stop-gradient. Formulas are losses, to be minimised.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from reflux_trainer.learner.ops import LossName, LossSpec

_MAX_LOG_RATIO = 20.0
"""exp() of more than this says nothing any more and overflows soon after."""


@dataclass(frozen=True)
class TokenBatch:
    """Flat tokens of whole completions; `completion_T` numbers the completion of each token, from 0."""

    logprobs_T: Tensor
    old_logprobs_T: Tensor
    advantages_T: Tensor
    completion_T: Tensor
    mask_T: Tensor
    """1.0 where a token counts."""


@dataclass(frozen=True)
class TokenLosses:
    """Loss per token, and where the clip was active."""

    loss_T: Tensor
    clipped_T: Tensor


def cross_entropy(batch: TokenBatch, spec: LossSpec) -> TokenLosses:
    """-w * lp, with the example's weight w in place of the advantage."""
    del spec
    return TokenLosses(-batch.advantages_T * batch.logprobs_T, _nowhere(batch))


def reinforce(batch: TokenBatch, spec: LossSpec) -> TokenLosses:
    """-A * lp."""
    del spec
    return TokenLosses(-batch.advantages_T * batch.logprobs_T, _nowhere(batch))


def importance_sampling(batch: TokenBatch, spec: LossSpec) -> TokenLosses:
    """-r * A, with the sampler as lp_old: unbiased for off-policy tokens, unbounded variance."""
    del spec
    return TokenLosses(-_ratio(batch) * batch.advantages_T, _nowhere(batch))


def ppo(batch: TokenBatch, spec: LossSpec) -> TokenLosses:
    """max(-r * A, -clip(r, lo, hi) * A). arXiv 1707.06347; with clip_high > clip_low the clip-higher of DAPO."""
    return _clipped(_ratio(batch), batch.advantages_T, spec)


def dual_clip(batch: TokenBatch, spec: LossSpec) -> TokenLosses:
    """PPO clip, and min(that, -c * A) where A < 0 (c = `dual_clip_bound` > 1)."""
    inner = ppo(batch, spec)
    bound_T = -spec.dual_clip_bound * batch.advantages_T
    bounded_T = (batch.advantages_T < 0) & (inner.loss_T > bound_T)
    return TokenLosses(torch.where(bounded_T, bound_T, inner.loss_T), inner.clipped_T | bounded_T)


def cispo(batch: TokenBatch, spec: LossSpec) -> TokenLosses:
    """-sg[clip(r, lo, hi)] * A * lp: clipped tokens go on learning. arXiv 2506.13585."""
    ratio_T = _ratio(batch).detach()
    weights_T = ratio_T.clamp(1 - spec.clip_low, 1 + spec.clip_high)
    return TokenLosses(-weights_T * batch.advantages_T * batch.logprobs_T, weights_T != ratio_T)


def gspo(batch: TokenBatch, spec: LossSpec) -> TokenLosses:
    """PPO clip on s = exp(mean over the completion of (lp - lp_old)), the same for all its tokens. arXiv 2507.18071."""
    return _clipped(_sequence_ratio(batch), batch.advantages_T, spec)


def gspo_token(batch: TokenBatch, spec: LossSpec) -> TokenLosses:
    """PPO clip on sg[s] * exp(lp - sg[lp]): the value of s, with each token's own gradient. arXiv 2507.18071."""
    ratio_T = _sequence_ratio(batch).detach() * (batch.logprobs_T - batch.logprobs_T.detach()).exp()
    return _clipped(ratio_T, batch.advantages_T, spec)


LOSS_FUNCTIONS: dict[LossName, Callable[[TokenBatch, LossSpec], TokenLosses]] = {
    "cross_entropy": cross_entropy,
    "reinforce": reinforce,
    "ppo": ppo,
    "dual_clip": dual_clip,
    "cispo": cispo,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "importance_sampling": importance_sampling,
}


def token_losses(
    spec: LossSpec,
    logprobs_T: Tensor,
    sampler_logprobs_T: Tensor,
    advantages_T: Tensor,
    completion_T: Tensor,
    mask_T: Tensor,
) -> TokenLosses:
    """The loss of `spec` per token, off-policy correction included.

    With `tis_cap` = 0 the sampler is the proximal policy. Otherwise the policy at the time of this call is (decoupled
    PPO, arXiv 2110.00641), and each token's loss is multiplied by min(exp(lp_old - lp_mu), cap).
    """
    corrected = spec.tis_cap > 0
    old_T = logprobs_T.detach() if corrected else sampler_logprobs_T
    losses = LOSS_FUNCTIONS[spec.name](TokenBatch(logprobs_T, old_T, advantages_T, completion_T, mask_T), spec)
    if not corrected:
        return losses
    weights_T = (old_T - sampler_logprobs_T).clamp(max=_MAX_LOG_RATIO).exp().clamp_max(spec.tis_cap)
    return TokenLosses(losses.loss_T * weights_T, losses.clipped_T)


def _ratio(batch: TokenBatch) -> Tensor:
    return (batch.logprobs_T - batch.old_logprobs_T).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def _sequence_ratio(batch: TokenBatch) -> Tensor:
    """exp of the masked mean of lp - lp_old over each completion, spread over its tokens."""
    count = int(batch.completion_T.max()) + 1 if batch.completion_T.numel() else 0
    zeros = torch.zeros(count, dtype=batch.logprobs_T.dtype)
    sums = zeros.index_add(0, batch.completion_T, (batch.logprobs_T - batch.old_logprobs_T) * batch.mask_T)
    lengths = zeros.index_add(0, batch.completion_T, batch.mask_T)
    means = (sums / lengths.clamp_min(1.0)).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return means.exp()[batch.completion_T]


def _clipped(ratio_T: Tensor, advantages_T: Tensor, spec: LossSpec) -> TokenLosses:
    free_T = -ratio_T * advantages_T
    clipped_T = -ratio_T.clamp(1 - spec.clip_low, 1 + spec.clip_high) * advantages_T
    return TokenLosses(torch.maximum(free_T, clipped_T), (clipped_T > free_T).detach())


def _nowhere(batch: TokenBatch) -> Tensor:
    return torch.zeros_like(batch.logprobs_T, dtype=torch.bool)
