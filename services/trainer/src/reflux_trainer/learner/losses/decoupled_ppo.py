"""Decoupled PPO: w * PPOclip(r, A), w = sg[exp(lp_old - lp_mu)], r = exp(lp - lp_old). arXiv 2110.00641.

The proximal policy lp_old is the one at the start of the step, the behaviour policy lp_mu the one that sampled.
"""

from reflux_trainer.learner.losses.batch import TokenBatch, TokenLosses
from reflux_trainer.learner.losses.corrections import raw_weights
from reflux_trainer.learner.losses.ppo import ppo
from reflux_trainer.learner.ops import LossSpec


def decoupled_ppo(batch: TokenBatch, spec: LossSpec) -> TokenLosses:
    """The PPO clip to the proximal policy, weighted towards it from the sampler."""
    inner = ppo(batch, spec)
    return TokenLosses(inner.loss_T * raw_weights(batch, "token"), inner.clipped_T)
