"""KL to a reference policy as a loss term, with gradient; estimators as in `algo.kl`. Schulman, "Approximating KL
divergence".

With d = lp_ref - lp: k1 = -d (its gradient has mean 0, so that as a loss it does nothing in expectation), k2 = d^2 / 2,
k3 = exp(d) - d - 1. The reward form of the same estimators is `algo.kl.penalised_rewards`.
"""

from torch import Tensor

from reflux_trainer.learner.losses.batch import TokenBatch
from reflux_trainer.learner.ops import LossSpec

_MAX_DIFFERENCE = 60.0


def kl_term(batch: TokenBatch, spec: LossSpec) -> Tensor:
    """The estimate per token; tokens without a reference log-prob (NaN) have none: 0."""
    known_T = ~batch.reference_logprobs_T.isnan()
    reference_T = batch.reference_logprobs_T.where(known_T, batch.logprobs_T.detach())
    difference_T = reference_T - batch.logprobs_T
    if spec.kl_estimator == "k1":
        estimate_T = -difference_T
    elif spec.kl_estimator == "k2":
        estimate_T = difference_T**2 / 2
    else:
        bounded_T = difference_T.clamp(-_MAX_DIFFERENCE, _MAX_DIFFERENCE)
        estimate_T = bounded_T.exp() - bounded_T - 1
    return estimate_T.where(known_T, 0.0)
