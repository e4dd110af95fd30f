"""Token losses by name, and the whole of a token's loss: loss, off-policy correction, KL term."""

from collections.abc import Callable

from reflux_trainer.learner.losses.batch import TokenBatch, TokenLosses
from reflux_trainer.learner.losses.cispo import cispo
from reflux_trainer.learner.losses.corrections import correction_weights
from reflux_trainer.learner.losses.cross_entropy import cross_entropy
from reflux_trainer.learner.losses.decoupled_ppo import decoupled_ppo
from reflux_trainer.learner.losses.dro import dro
from reflux_trainer.learner.losses.dual_clip import dual_clip
from reflux_trainer.learner.losses.gspo import gspo, gspo_token
from reflux_trainer.learner.losses.importance_sampling import importance_sampling
from reflux_trainer.learner.losses.kl import kl_term
from reflux_trainer.learner.losses.ppo import ppo
from reflux_trainer.learner.losses.reinforce import reinforce
from reflux_trainer.learner.ops import LossName, LossSpec

LOSS_FUNCTIONS: dict[LossName, Callable[[TokenBatch, LossSpec], TokenLosses]] = {
    "cross_entropy": cross_entropy,
    "reinforce": reinforce,
    "ppo": ppo,
    "dual_clip": dual_clip,
    "cispo": cispo,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "importance_sampling": importance_sampling,
    "decoupled_ppo": decoupled_ppo,
    "dro": dro,
}


def token_losses(spec: LossSpec, batch: TokenBatch) -> TokenLosses:
    """Per token: the loss of `spec`, times its off-policy correction, plus its share of the KL to the reference."""
    losses = LOSS_FUNCTIONS[spec.name](batch, spec)
    loss_T = losses.loss_T * correction_weights(batch, spec) if spec.corrected else losses.loss_T
    if spec.kl_coefficient > 0:
        loss_T = loss_T + spec.kl_coefficient * kl_term(batch, spec)
    return TokenLosses(loss_T, losses.clipped_T)
