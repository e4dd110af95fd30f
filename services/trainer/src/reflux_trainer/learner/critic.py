"""The critic of PPO: a linear value head on the last hidden states, which its loss shapes together with the policy.

V(s_t) = w . h_t + b, h_t the state that token t is predicted from; w and b start at 0, so that the first advantages are
returns. Loss per token (arXiv 1707.06347, clipped as the ratio is): max((V - R)^2, (clip(V, V_old +- c) - R)^2) / 2.
"""

import torch
from torch import Tensor

from reflux_trainer.learner.batching import MicroBatch
from reflux_trainer.learner.ops import LossSpec
from reflux_trainer.learner.trainable import Trainable


class Critic(Trainable):
    """Head, gradient and moments; the hidden states are the policy's."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__({"weight": torch.zeros(hidden_size), "bias": torch.zeros(1)})

    def values(self, hidden_TE: Tensor) -> Tensor:
        """V of each state [T], float32."""
        return hidden_TE.float() @ self.params["weight"] + self.params["bias"]


def value_losses(values_T: Tensor, part: MicroBatch, loss: LossSpec) -> Tensor:
    """Loss of each token's value; 0 for tokens without a return."""
    known_T = ~part.returns_T.isnan()
    returns_T = part.returns_T.where(known_T, 0.0)
    old_T = part.values_T.where(~part.values_T.isnan(), values_T.detach())
    squared_T = (values_T - returns_T) ** 2
    if loss.value_clip > 0:
        clipped_T = old_T + (values_T - old_T).clamp(-loss.value_clip, loss.value_clip)
        squared_T = torch.maximum(squared_T, (clipped_T - returns_T) ** 2)
    return (squared_T / 2).where(known_T, 0.0)
