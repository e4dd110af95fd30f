"""Token losses: vectors worked out by hand from the formulas that `learner.losses` names, and agreement on-policy."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from reflux_trainer.algo.aggregation import token_weights
from reflux_trainer.learner.losses.batch import TokenBatch, TokenLosses
from reflux_trainer.learner.losses.registry import LOSS_FUNCTIONS, token_losses
from reflux_trainer.learner.ops import LossName, LossSpec

ADVANTAGES, RATIOS = [1.0, -1, 2], [0.5, 1, 1.5]


def tokens(
    lp: Tensor, old: Tensor, advantages: Tensor, completion: Tensor, mask: Tensor, **others: Tensor
) -> TokenBatch:
    """A batch; the sampler is the proximal policy and there is no reference, unless `others` names them."""
    columns = {"sampler_logprobs_T": old, "reference_logprobs_T": torch.full_like(old, np.nan), **others}
    return TokenBatch(
        logprobs_T=lp, old_logprobs_T=old, advantages_T=advantages, completion_T=completion, mask_T=mask, **columns
    )


def _run(name: LossName, advantages: list[float], **settings: Any) -> TokenLosses:
    """Loss of tokens given by `ratios` (with lp_old = -1), or by `logprobs` directly."""
    ratios = settings.pop("ratios", None)
    logprobs = settings.pop("logprobs", None)
    lp = torch.tensor(ratios).log() - 1 if logprobs is None else torch.tensor(logprobs)
    old = lp - torch.tensor(ratios).log() if ratios is not None else lp.clone()
    batch = tokens(lp, old, torch.tensor(advantages), torch.arange(lp.shape[0]), torch.ones(lp.shape[0]))
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
    batch = tokens(lp, old, advantages, torch.arange(4), torch.ones(4))
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
        batch = tokens(old + gaps, old, torch.ones(5), torch.tensor([0, 0, 0, 1, 1]), torch.ones(5))
        free = LOSS_FUNCTIONS[name](batch, LossSpec(name=name, clip_low=10.0, clip_high=10.0))
        close(-free.loss_T, [1.105171] * 5)
        cut = LOSS_FUNCTIONS[name](batch, LossSpec(name=name, clip_low=3e-4, clip_high=4e-4))
        close(-cut.loss_T, [1.0004] * 5)


def test_gspo_leaves_masked_tokens_out_of_the_ratio() -> None:
    lp = torch.tensor([-1.0 + 0.1, 5.0, -1.0 + 0.3])
    batch = tokens(
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
        batch = tokens(lp, lp.detach(), advantages, torch.tensor([0, 0, 0, 1, 1]), torch.ones(5))
        LOSS_FUNCTIONS[name](batch, LossSpec(name=name)).loss_T.sum().backward()
        assert lp.grad is not None
        gradients.append(lp.grad)
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0])


def test_gspo_on_policy_spreads_the_gradient_over_the_sequence() -> None:
    lp = torch.tensor([-0.5, -1.5, -2.0], requires_grad=True)
    batch = tokens(lp, lp.detach(), torch.full((3,), 2.0), torch.zeros(3, dtype=torch.int64), torch.ones(3))
    weights = torch.from_numpy(token_weights([np.ones(3, bool)], "sequence_mean")[0])
    (LOSS_FUNCTIONS["gspo"](batch, LossSpec(name="gspo")).loss_T * weights).sum().backward()
    assert lp.grad is not None
    close(lp.grad, [-2 / 3] * 3)


OLD, SAMPLER = torch.tensor([-1, -1.5, -0.5]), torch.tensor([-1.5, -1, -1.5])
ONE_SEQUENCE = torch.zeros(3, dtype=torch.int64)


def corrected(mask: list[float] | None = None, **settings: Any) -> Tensor:
    """Minus the loss of three tokens of advantage 1 whose policy is the proximal one: the weights alone."""
    counts = torch.tensor(mask or [1.0, 1, 1])
    batch = tokens(OLD, OLD, torch.ones(3), ONE_SEQUENCE, counts, sampler_logprobs_T=SAMPLER)
    return -token_losses(LossSpec(name="ppo", **settings), batch).loss_T


def test_tis_vectors() -> None:
    close(corrected(tis_cap=2.0), [1.648721, 0.606531, 2.0])
    close(corrected(tis_cap=5.0, correction_level="sequence"), [2.718282] * 3)
    close(corrected([1.0, 0, 1], tis_cap=5.0, correction_level="sequence"), [4.481689] * 3)


def test_tis_sequence_cap_vector() -> None:
    old, sampler = torch.full((3,), -1.0), torch.full((3,), -2.0)
    batch = tokens(old, old, torch.ones(3), ONE_SEQUENCE, torch.ones(3), sampler_logprobs_T=sampler)
    for cap, expected in ((5.0, 5.0), (100.0, 20.085537)):
        spec = LossSpec(name="ppo", tis_cap=cap, correction_level="sequence")
        np.testing.assert_allclose(-token_losses(spec, batch).loss_T, [expected] * 3, rtol=2e-6)


def test_mis_vector() -> None:
    close(corrected(mis_low=0.5, mis_high=2.0), [1.648721, 0.606531, 0])


def test_decoupled_ppo_weighs_the_clip_by_proximal_over_sampler() -> None:
    lp = OLD + torch.tensor([0.5, 1, 1.5]).log()
    batch = tokens(lp, OLD, torch.tensor(ADVANTAGES), ONE_SEQUENCE, torch.ones(3), sampler_logprobs_T=SAMPLER)
    losses = token_losses(LossSpec(name="decoupled_ppo", clip_low=0.2, clip_high=0.2), batch)
    close(losses.loss_T, [1.648721 * -0.5, 0.606531 * 1, 2.718282 * -2.4])
    assert losses.clipped_T.tolist() == [False, False, True]


def test_dro_is_a_quadratic_pull_to_the_sampler() -> None:
    lp = torch.tensor([-1.0, -2.0], requires_grad=True)
    sampler = torch.tensor([-1.5, -1.0])
    batch = tokens(lp, sampler, torch.tensor([2.0, -1.0]), torch.arange(2), torch.ones(2))
    loss = token_losses(LossSpec(name="dro", dro_beta=0.1), batch).loss_T
    close(loss, [2.0 + 0.05 * 0.25, -2.0 + 0.05 * 1.0])
    loss.sum().backward()
    assert lp.grad is not None
    close(lp.grad, [-2.0 + 0.1 * 0.5, 1.0 + 0.1 * -1.0])


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("k1", [-1, 14, 29]), ("k2", [0.5, 98, 420.5]), ("k3", [0.718282, 13.000001, 28])],
)
def test_kl_vectors(estimator: Any, expected: list[float]) -> None:
    lp = torch.full((3,), -1.0)
    reference = torch.tensor([0.0, -15, -30])
    batch = tokens(lp, lp, torch.zeros(3), ONE_SEQUENCE, torch.ones(3), reference_logprobs_T=reference)
    spec = LossSpec(name="reinforce", kl_coefficient=1.0, kl_estimator=estimator)
    np.testing.assert_allclose(token_losses(spec, batch).loss_T, expected, rtol=2e-6)


def test_the_kl_term_pulls_to_the_reference_and_leaves_tokens_without_one() -> None:
    lp = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    reference = torch.tensor([-0.5, -2.0, np.nan], dtype=torch.float32)
    batch = tokens(lp, lp.detach(), torch.zeros(3), ONE_SEQUENCE, torch.ones(3), reference_logprobs_T=reference)
    spec = LossSpec(name="reinforce", kl_coefficient=0.5, kl_estimator="k3")
    token_losses(spec, batch).loss_T.sum().backward()
    assert lp.grad is not None
    close(lp.grad, [0.5 * (1 - np.exp(0.5)), 0.5 * (1 - np.exp(-1.0)), 0.0])


@pytest.mark.parametrize("correction", [{"tis_cap": 2.0}, {"mis_low": 0.5, "mis_high": 2.0}])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("name", ["ppo", "decoupled_ppo"])
def test_without_lag_the_correction_is_the_identity(name: Any, level: Any, correction: dict[str, float]) -> None:
    gradients = []
    plain, weighted = LossSpec(name="ppo"), LossSpec(name=name, correction_level=level, **correction)
    for spec in (plain, weighted):
        lp = torch.tensor([-1.0, -2.0, -0.2], requires_grad=True)
        batch = tokens(lp, lp.detach(), torch.tensor([1.0, -1, 2]), ONE_SEQUENCE, torch.ones(3))
        losses = token_losses(spec, batch)
        losses.loss_T.sum().backward()
        assert lp.grad is not None
        gradients.append((losses.loss_T.detach(), lp.grad))
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("name", LOSS_FUNCTIONS)
def test_absurd_ratios_stay_finite(name: LossName) -> None:
    lp = torch.tensor([-0.1, -900.0], requires_grad=True)
    batch = tokens(lp, torch.tensor([-900.0, -0.1]), torch.tensor([1.0, -1.0]), torch.tensor([0, 1]), torch.ones(2))
    losses = LOSS_FUNCTIONS[name](batch, LossSpec(name=name)).loss_T
    losses.sum().backward()
    assert torch.isfinite(losses).all()
    assert lp.grad is not None
    assert torch.isfinite(lp.grad).all()
