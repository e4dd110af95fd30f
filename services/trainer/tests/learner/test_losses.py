"""Token losses: vectors worked out by hand from the formulas that `learner.losses` names, and agreement on-policy."""

from typing import Any

import numpy as np
import pytest
import torch

from reflux_trainer.algo.aggregation import token_weights
from reflux_trainer.learner.losses import LOSS_FUNCTIONS, TokenBatch, TokenLosses, token_losses
from reflux_trainer.learner.ops import LossName, LossSpec

ADVANTAGES, RATIOS = [1.0, -1, 2], [0.5, 1, 1.5]


def _run(name: LossName, advantages: list[float], **settings: Any) -> TokenLosses:
    """Loss of tokens given by `ratios` (with lp_old = -1), or by `logprobs` directly."""
    ratios = settings.pop("ratios", None)
    logprobs = settings.pop("logprobs", None)
    lp = torch.tensor(ratios).log() - 1 if logprobs is None else torch.tensor(logprobs)
    old = lp - torch.tensor(ratios).log() if ratios is not None else lp.clone()
    batch = TokenBatch(lp, old, torch.tensor(advantages), torch.arange(lp.shape[0]), torch.ones(lp.shape[0]))
    return LOSS_FUNCTIONS[name](batch, LossSpec(name=name, **settings))


def close(actual: torch.Tensor, expected: list[float]) -> None:
    np.testing.assert_allclose(actual.detach().numpy(), expected, atol=2e-6)


@pytest.mark.parametrize(
    ("clip_high", "expected", "mean"), [(0.2, [-0.5, 1, -2.4], -0.633333), (0.28, [-0.5, 1, -2.56], -0.686667)]
)
def test_ppo_vectors(clip_high: float, expected: list[float], mean: float) -> None:
    losses = _run("ppo", ADVANTAGES, ratios=RATIOS, clip_low=0.2, clip_high=clip_high)
    close(losses.loss_T, expected)
    close(losses.loss_T.mean(), mean)  # type: ignore[arg-type]
    assert losses.clipped_T.tolist() == [False, False, True]


def test_reinforce_vector() -> None:
    close(_run("reinforce", ADVANTAGES, logprobs=[-0.5, -1, -1.5]).loss_T, [0.5, -1, 3])


def test_cispo_vector() -> None:
    losses = _run("cispo", ADVANTAGES, ratios=RATIOS)
    close(losses.loss_T, [1.354518, -1, 1.426884])
    close(losses.loss_T.mean(), 0.593800)  # type: ignore[arg-type]


def test_cispo_vector_with_its_gradient() -> None:
    lp = torch.tensor([-0.7, -1.2, -0.4, -2.1], requires_grad=True)
    old = (lp - torch.tensor([1, 1.14, 1.56, 0.4]).log()).detach()
    advantages = torch.tensor([1, -0.5, 2, -1])
    batch = TokenBatch(lp, old, advantages, torch.arange(4), torch.ones(4))
    losses = LOSS_FUNCTIONS["cispo"](batch, LossSpec(name="cispo", clip_low=0.2, clip_high=0.28))
    close(losses.loss_T, [0.7, -0.684, 1.024, -1.68])
    close(losses.loss_T.mean(), -0.16)  # type: ignore[arg-type]
    losses.loss_T.sum().backward()
    assert lp.grad is not None
    close(lp.grad, [-1, 0.57, -2.56, 0.8])


def test_dual_clip_vectors() -> None:
    close(_run("dual_clip", [2.0, -2, 2], ratios=[2.0, 2, 0.5], dual_clip_bound=1.5).loss_T, [-2.4, 3, -1])
    close(_run("dual_clip", [1.0, -1, -4], ratios=[0.5, 1, 10.0], dual_clip_bound=3.0).loss_T, [-0.5, 1, 12])


def test_gspo_vector_has_one_ratio_per_sequence() -> None:
    gaps = torch.tensor([0.1, -0.1, 0.3, -0.2, 0.4])
    old = torch.full((5,), -1.0)
    names: tuple[Any, ...] = ("gspo", "gspo_token")
    for name in names:
        batch = TokenBatch(old + gaps, old, torch.ones(5), torch.tensor([0, 0, 0, 1, 1]), torch.ones(5))
        free = LOSS_FUNCTIONS[name](batch, LossSpec(name=name, clip_low=10.0, clip_high=10.0))
        close(-free.loss_T, [1.105171] * 5)
        cut = LOSS_FUNCTIONS[name](batch, LossSpec(name=name, clip_low=3e-4, clip_high=4e-4))
        close(-cut.loss_T, [1.0004] * 5)


def test_gspo_leaves_masked_tokens_out_of_the_ratio() -> None:
    lp = torch.tensor([-1.0 + 0.1, 5.0, -1.0 + 0.3])
    batch = TokenBatch(
        lp, torch.full((3,), -1.0), torch.ones(3), torch.zeros(3, dtype=torch.int64), torch.tensor([1.0, 0, 1])
    )
    losses = LOSS_FUNCTIONS["gspo"](batch, LossSpec(name="gspo", clip_low=10.0, clip_high=10.0))
    close(-losses.loss_T, [float(np.exp(0.2))] * 3)


def test_importance_sampling_is_minus_ratio_times_advantage() -> None:
    close(_run("importance_sampling", ADVANTAGES, ratios=RATIOS).loss_T, [-0.5, 1, -3])


def test_on_policy_gradients_agree() -> None:
    names: list[LossName] = ["reinforce", "ppo", "dual_clip", "cispo", "gspo_token", "importance_sampling"]
    gradients = []
    for name in names:
        lp = torch.tensor([-0.5, -1.5, -2.0, -0.1, -0.7], requires_grad=True)
        advantages = torch.tensor([1.0, 1.0, 1.0, -2.0, -2.0])
        batch = TokenBatch(lp, lp.detach(), advantages, torch.tensor([0, 0, 0, 1, 1]), torch.ones(5))
        LOSS_FUNCTIONS[name](batch, LossSpec(name=name)).loss_T.sum().backward()
        assert lp.grad is not None
        gradients.append(lp.grad)
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0])


def test_gspo_on_policy_spreads_the_gradient_over_the_sequence() -> None:
    lp = torch.tensor([-0.5, -1.5, -2.0], requires_grad=True)
    batch = TokenBatch(lp, lp.detach(), torch.full((3,), 2.0), torch.zeros(3, dtype=torch.int64), torch.ones(3))
    weights = torch.from_numpy(token_weights([np.ones(3, bool)], "sequence_mean")[0])
    (LOSS_FUNCTIONS["gspo"](batch, LossSpec(name="gspo")).loss_T * weights).sum().backward()
    assert lp.grad is not None
    close(lp.grad, [-2 / 3] * 3)


def test_tis_multiplies_the_loss_by_the_truncated_weight() -> None:
    old, sampler = torch.tensor([-1, -1.5, -0.5]), torch.tensor([-1.5, -1, -1.5])
    losses = token_losses(
        LossSpec(name="ppo", tis_cap=2.0), old, sampler, torch.ones(3), torch.zeros(3, dtype=torch.int64), torch.ones(3)
    )
    close(-losses.loss_T, [1.648721, 0.606531, 2.0])


def test_without_lag_the_correction_is_the_identity() -> None:
    gradients = []
    for cap in (0.0, 2.0):
        lp = torch.tensor([-1.0, -2.0, -0.2], requires_grad=True)
        losses = token_losses(
            LossSpec(name="ppo", tis_cap=cap),
            lp,
            lp.detach(),
            torch.tensor([1.0, -1, 2]),
            torch.zeros(3, dtype=torch.int64),
            torch.ones(3),
        )
        losses.loss_T.sum().backward()
        assert lp.grad is not None
        gradients.append((losses.loss_T.detach(), lp.grad))
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("name", LOSS_FUNCTIONS)
def test_absurd_ratios_stay_finite(name: LossName) -> None:
    lp = torch.tensor([-0.1, -900.0], requires_grad=True)
    batch = TokenBatch(lp, torch.tensor([-900.0, -0.1]), torch.tensor([1.0, -1.0]), torch.tensor([0, 1]), torch.ones(2))
    losses = LOSS_FUNCTIONS[name](batch, LossSpec(name=name)).loss_T
    losses.sum().backward()
    assert torch.isfinite(losses).all()
    assert lp.grad is not None
    assert torch.isfinite(lp.grad).all()
