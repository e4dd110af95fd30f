"""GSPO: the PPO clip on s = exp(mean over the completion of (lp - lp_old)), one for all its tokens. arXiv 2507.18071.

GSPO-token has the value of s and each token's own gradient: s_t = sg[s] * exp(lp - sg[lp]).
"""

from reflux_trainer.learner.losses.batch import TokenBatch, TokenLosses, clipped, sequence_ratio
from reflux_trainer.learner.ops import LossSpec


def gspo(batch: TokenBatch, spec: LossSpec) -> TokenLosses:
    """PPO clip on s."""
    return clipped(sequence_ratio(batch), batch.advantages_T, spec)


def gspo_token(batch: TokenBatch, spec: LossSpec) -> TokenLosses:
    """PPO clip on sg[s] * exp(lp - sg[lp])."""
    ratio_T = sequence_ratio(batch).detach() * (batch.logprobs_T - batch.logprobs_T.detach()).exp()
    return clipped(ratio_T, batch.advantages_T, spec)
