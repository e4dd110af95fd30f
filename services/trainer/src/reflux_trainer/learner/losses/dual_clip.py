"""Dual clip: the PPO clip, and min(that, -c * A) where A < 0, with c = `dual_clip_bound` > 1. arXiv 1912.09729."""

import torch

from reflux_trainer.learner.losses.batch import TokenBatch, TokenLosses
from reflux_trainer.learner.losses.ppo import ppo
from reflux_trainer.learner.ops import LossSpec


def dual_clip(batch: TokenBatch, spec: LossSpec) -> TokenLosses:
    """min(PPO clip, -c * A) for A < 0, the PPO clip otherwise."""
    inner = ppo(batch, spec)
    bound_T = -spec.dual_clip_bound * batch.advantages_T
    bounded_T = (batch.advantages_T < 0) & (inner.loss_T > bound_T)
    return TokenLosses(torch.where(bounded_T, bound_T, inner.loss_T), inner.clipped_T | bounded_T)
