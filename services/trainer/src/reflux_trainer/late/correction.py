"""Which correction sample a late reward is worth. Pure.

A group was trained at once with advantages A_p from its provisional rewards. When its final rewards are known, the
same answers are trained once more with the difference:

    loss = - sum_t w_t (A_f - A_p) lp_t / N,    w_t = min(exp(lp_t - lp_mu_t), cap)

lp_mu are the log-probabilities of the sampler, so that the step is unbiased for the present policy up to the cap
(truncated importance sampling, or the decoupled objective of arXiv 2110.00641 at r = 1), and N is the token count of
the batch that it joins: the pair adds up to what the final rewards would have given in one step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from reflux_trainer.algo.corrections import importance_weights, truncated
from reflux_trainer.algo.registry import ADVANTAGES, Algorithm
from reflux_trainer.algo.rewards import Rewards, known

Drop = Literal["too_old", "unchanged", "unknown"]
"""too_old: beyond the lag bound. unchanged: the final rewards teach what the provisional ones taught. unknown: fewer
than two final rewards are known."""
DROPS: tuple[Drop, ...] = get_args(Drop)


@dataclass(frozen=True, kw_only=True)
class CorrectionPolicy:
    """Bounds of the corrections of a run."""

    algorithm: Algorithm = "grpo"
    max_lag: int = 16
    """Versions between an answer's oldest token and the step that corrects it; more of them, and it is dropped."""
    least_change: float = 1e-3
    """Largest |A_f - A_p| of a group below which it is not worth a step."""
    cap: float = 2.0
    """Truncation of the importance weights."""

    def __post_init__(self) -> None:
        if self.max_lag < 0 or self.least_change < 0 or self.cap <= 0:
            raise ValueError(f"corrections need max_lag >= 0, least_change >= 0 and cap > 0, got {self}")


@dataclass(frozen=True, kw_only=True)
class Provisional:
    """A group as it was released and trained. `oldest_version` is that of its oldest token."""

    index: int
    oldest_version: int
    advantages_G: NDArray[np.float64]
    """Trained ones; 0 for members that were not trained, and for a whole group that was filtered."""


def correct(
    provisional: Provisional, final_rewards_G: Rewards, version: int, policy: CorrectionPolicy
) -> NDArray[np.float64] | Drop:
    """Advantage differences [G] of a correction sample at the learner's `version`, or why there is none.

    A member whose final reward is unknown (NaN) gets 0: what it was trained on is not taken back for nothing, and it
    does not count in the baseline of the others.
    """
    if version - provisional.oldest_version > policy.max_lag:
        return "too_old"
    settled = known(final_rewards_G)
    if settled.sum() < 2:
        return "unknown"
    final_G = ADVANTAGES[policy.algorithm](final_rewards_G)
    change_G = np.where(settled, final_G - provisional.advantages_G, 0.0)
    return change_G if float(np.abs(change_G).max()) >= policy.least_change else "unchanged"


def scaled(changes: Sequence[NDArray[np.float64]], tokens: int, batch_tokens: int) -> list[NDArray[np.float64]]:
    """Changes for a loss that averages over the `tokens` of the correction samples alone, so that each of these tokens
    counts as much as one of the batch of `batch_tokens` beside it."""
    return [change_G * (tokens / max(1, batch_tokens)) for change_G in changes]


def correction_weights(
    present_logprobs_L: NDArray[np.float64],
    sampler_logprobs_L: NDArray[np.float64],
    policy: CorrectionPolicy,
) -> NDArray[np.float64]:
    """Weight of each token of one answer under the present policy (the learner computes the same from `tis_cap`)."""
    mask_L = np.ones(present_logprobs_L.shape, dtype=bool)
    return truncated(importance_weights(present_logprobs_L, sampler_logprobs_L, mask_L), policy.cap)
