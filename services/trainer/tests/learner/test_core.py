"""Gradients, steps and refusals of the learner."""

import math

import pytest
import torch

from reflux_model.packing import pack_rows
from reflux_model.training import packed_scores
from reflux_trainer.algo.aggregation import AGGREGATIONS, Aggregation
from reflux_trainer.learner import adamw
from reflux_trainer.learner.core import Learner
from reflux_trainer.learner.numerics import Numerics
from reflux_trainer.learner.ops import LOSSES, CompletionData, GroupData, LossName, LossSpec, StepSpec

from .tiny import CONFIG, tiny_groups, tiny_learner

torch.set_num_threads(1)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("micro_batch", [1, 2, 3, 4, 5])
def test_every_cut_into_micro_batches_gives_the_same_gradient(aggregation: Aggregation, micro_batch: int) -> None:
    loss = LossSpec(name="ppo", aggregation=aggregation, constant_length=6, clip_low=5.0, clip_high=5.0)
    whole, cut = tiny_learner(), tiny_learner()
    expected = whole.forward_backward(tiny_groups(), loss, 1000)
    got = cut.forward_backward(tiny_groups(), loss, micro_batch)
    largest = whole.gradient.abs().max()
    torch.testing.assert_close(cut.gradient / largest, whole.gradient / largest, atol=1e-6, rtol=1e-4)
    assert largest > 1e-3
    assert got.loss == pytest.approx(expected.loss, abs=1e-5)
    assert got.tokens == expected.tokens
    assert got.entropy == pytest.approx(expected.entropy, abs=1e-5)
    assert got.kl_sample_train == pytest.approx(expected.kl_sample_train, abs=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_moves_the_weights_and_stays_finite(name: LossName) -> None:
    learner = tiny_learner()
    before = learner.flat.clone()
    figures = learner.forward_backward(tiny_groups(), LossSpec(name=name, clip_low=5.0, clip_high=5.0))
    step = learner.optim_step(StepSpec(learning_rate=1e-2))
    assert math.isfinite(figures.loss)
    assert step.applied
    assert step.version == 1
    assert not torch.equal(learner.flat, before)


def test_masked_tokens_and_their_log_probs_do_not_matter() -> None:
    plain = [GroupData([3, 4], [CompletionData([5, 6, 7], [-1.0, -1, -1], 1.0, [True, True, False])])]
    other = [GroupData([3, 4], [CompletionData([5, 6, 9], [-1.0, -1, -50], 1.0, [True, True, False])])]
    first, second = tiny_learner(), tiny_learner()
    first.forward_backward(plain, LossSpec(name="ppo"))
    second.forward_backward(other, LossSpec(name="ppo"))
    torch.testing.assert_close(first.gradient, second.gradient)


def test_the_order_of_groups_and_members_does_not_matter() -> None:
    loss = LossSpec(name="gspo", aggregation="sequence_mean", clip_low=5.0, clip_high=5.0)
    plain, turned = tiny_learner(), tiny_learner()
    plain.forward_backward(tiny_groups(), loss)
    turned.forward_backward([GroupData(g.prompt, g.completions[::-1]) for g in reversed(tiny_groups())], loss, 2)
    torch.testing.assert_close(turned.gradient, plain.gradient, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_member_that_is_masked_out_counts_as_absent(aggregation: Aggregation) -> None:
    loss = LossSpec(name="ppo", aggregation=aggregation, constant_length=6, clip_low=5.0, clip_high=5.0)
    absent, masked = tiny_learner(), tiny_learner()
    unknown = CompletionData([5, 6], [-1.0, -1.0], 0.7, [False, False])
    absent.forward_backward(tiny_groups(), loss)
    masked.forward_backward([GroupData(g.prompt, [*g.completions, unknown]) for g in tiny_groups()], loss)
    torch.testing.assert_close(masked.gradient, absent.gradient, atol=1e-6, rtol=1e-4)


def test_a_batch_without_counted_tokens_gives_a_zero_gradient() -> None:
    learner = tiny_learner()
    masked = [GroupData([3, 4], [CompletionData([5, 6], [-1.0, -1], 1.0, [False, False])])]
    figures = learner.forward_backward(masked, LossSpec(name="ppo"))
    assert (figures.loss, figures.tokens) == (0.0, 0)
    assert not learner.gradient.any()
    assert learner.optim_step(StepSpec(learning_rate=1.0)).applied


def test_gradients_of_several_calls_add_up() -> None:
    groups, loss = tiny_groups(), LossSpec(name="reinforce", aggregation="sum")
    once, twice = tiny_learner(), tiny_learner()
    once.forward_backward(groups, loss)
    twice.forward_backward(groups[:2], loss)
    twice.forward_backward(groups[2:], loss)
    torch.testing.assert_close(twice.gradient, once.gradient, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("part", [adamw._PART, 48])
def test_the_step_is_torch_adamw_with_clipped_gradient(monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    monkeypatch.setattr(adamw, "_PART", part)
    learner = tiny_learner()
    oracle = {name: tensor.detach().clone().requires_grad_() for name, tensor in learner.params.items()}
    optimizer = torch.optim.AdamW(oracle.values(), lr=1e-2, betas=(0.9, 0.98), weight_decay=0.1)
    for _ in range(3):
        loss = LossSpec(name="cross_entropy")
        learner.forward_backward(tiny_groups(), loss)
        for name, tensor in oracle.items():
            tensor.grad = learner.params[name].grad.clone()  # type: ignore[union-attr]
        expected_norm = torch.nn.utils.clip_grad_norm_(oracle.values(), 0.05)
        optimizer.step()
        step = StepSpec(learning_rate=1e-2, beta1=0.9, beta2=0.98, weight_decay=0.1, max_grad_norm=0.05)
        assert learner.optim_step(step).grad_norm == pytest.approx(float(expected_norm), rel=1e-5)
    for name, tensor in oracle.items():
        torch.testing.assert_close(learner.params[name].detach(), tensor.detach(), atol=2e-6, rtol=1e-4)


def test_resetting_the_optimizer_forgets_the_moments() -> None:
    used, fresh = tiny_learner(), tiny_learner()
    used.forward_backward(tiny_groups(), LossSpec(name="reinforce"))
    used.optim_step(StepSpec(learning_rate=0.0))
    for learner in (used, fresh):
        learner.forward_backward(tiny_groups(), LossSpec(name="reinforce"))
        learner.optim_step(StepSpec(learning_rate=1e-2, reset_optimizer=True))
    assert torch.equal(used.flat, fresh.flat)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_that_is_not_finite_is_refused_counted_and_forgotten(bad: float) -> None:
    learner, untouched = tiny_learner(), tiny_learner()
    poison = [GroupData([3, 4], [CompletionData([5, 6], [-1.0, -1], bad)])]
    learner.forward_backward(poison, LossSpec(name="reinforce"))
    step = learner.optim_step(StepSpec(learning_rate=1e-2))
    assert (step.applied, step.version, learner.refused_steps) == (False, 0, 1)
    assert torch.equal(learner.flat, untouched.flat)
    for survivor in (learner, untouched):
        survivor.forward_backward(tiny_groups(), LossSpec(name="reinforce"))
        assert survivor.optim_step(StepSpec(learning_rate=1e-2)).applied
    assert torch.equal(learner.flat, untouched.flat)


def test_half_a_gradient_of_a_call_that_failed_is_never_applied() -> None:
    learner = tiny_learner()
    outside = [GroupData([3, 4, 5, 6, 7, 8, 9, 10, 11], [CompletionData([5, 10_000, 6], [-1.0, -1, -1])])]
    with pytest.raises(IndexError):
        learner.forward_backward(tiny_groups() + outside, LossSpec(name="ppo"), 1)
    assert learner.gradient.any()
    assert not learner.optim_step(StepSpec(learning_rate=1e-2)).applied
    assert not learner.gradient.any()


def test_scores_are_the_log_probs_that_training_uses() -> None:
    learner, groups = tiny_learner(), tiny_groups()
    scored = learner.score(groups, micro_batch=2)
    packed = pack_rows([g.prompt for g in groups], [[c.token_ids for c in g.completions] for g in groups])
    expected = packed_scores(learner.params, learner.config, packed).logprobs_T
    flat = torch.tensor([value for group in scored for row in group for value in row])
    torch.testing.assert_close(flat, expected.detach(), atol=1e-5, rtol=0)
    on_policy = [
        GroupData(g.prompt, [CompletionData(c.token_ids, row) for c, row in zip(g.completions, rows, strict=True)])
        for g, rows in zip(groups, scored, strict=True)
    ]
    figures = learner.forward_backward(on_policy, LossSpec(name="ppo"))
    assert figures.max_logprob_gap < 1e-5
    assert figures.clip_fraction == 0


def test_learning_raises_the_probability_of_what_was_rewarded() -> None:
    learner, groups = tiny_learner(), tiny_groups()
    before = learner.score(groups)
    for _ in range(5):
        learner.forward_backward(groups, LossSpec(name="reinforce"))
        learner.optim_step(StepSpec(learning_rate=1e-2))
    after = learner.score(groups)
    gains = {True: 0.0, False: 0.0}
    for group, old_rows, new_rows in zip(groups, before, after, strict=True):
        for completion, old, new in zip(group.completions, old_rows, new_rows, strict=True):
            gains[completion.advantage > 0] += sum(new) - sum(old)
    assert gains[True] > 0 > gains[False]


def test_recomputing_activations_changes_no_bit() -> None:
    plain = tiny_learner()
    saving = Learner(CONFIG, plain.params, 0, Numerics(recompute=True))
    for learner in (plain, saving):
        learner.forward_backward(tiny_groups(), LossSpec(name="ppo"))
    assert torch.equal(saving.gradient, plain.gradient)
    assert plain.gradient.any()


def test_bfloat16_passes_follow_float32_and_leave_weights_and_moments_in_it() -> None:
    plain = tiny_learner()
    narrow = Learner(CONFIG, plain.params, 0, Numerics(dtype=torch.bfloat16))
    loss = LossSpec(name="cross_entropy")
    expected, got = (learner.forward_backward(tiny_groups(), loss) for learner in (plain, narrow))
    assert got.loss == pytest.approx(expected.loss, rel=2e-2)
    assert got.loss != expected.loss
    cosine = torch.nn.functional.cosine_similarity(narrow.gradient, plain.gradient, dim=0)
    assert cosine > 0.99
    assert narrow.optim_step(StepSpec(learning_rate=1e-4)).applied
    assert narrow.flat.dtype == torch.float32
    moved = (narrow.flat - plain.flat).abs()
    assert 0 < moved.max() < 2e-4  # a step that bfloat16 weights would mostly have rounded away
