"""CISPO: -sg[clip(r, lo, hi)] * A * lp: clipped tokens go on learning. MiniMax-M1, arXiv 2506.13585."""

from reflux_trainer.learner.losses.batch import TokenBatch, TokenLosses, ratio
from reflux_trainer.learner.ops import LossSpec


def cispo(batch: TokenBatch, spec: LossSpec) -> TokenLosses:
    """-sg[clip(r, lo, hi)] * A * lp."""
    ratio_T = ratio(batch).detach()
    weights_T = ratio_T.clamp(1 - spec.clip_low, 1 + spec.clip_high)
    return TokenLosses(-weights_T * batch.advantages_T * batch.logprobs_T, weights_T != ratio_T)
