"""The critic: its loss and gradient, what it shares with the policy, and that it survives the process."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from reflux_kit.errors import WrongState
from reflux_storage.stores import open_store
from reflux_trainer.learner.core import Learner
from reflux_trainer.learner.figures import explained_variance
from reflux_trainer.learner.journal import Journal
from reflux_trainer.learner.ops import GroupData, LossSpec, StepSpec
from reflux_trainer.learner.ranks.learner import ShardedLearner
from reflux_trainer.learner.state import StateCapture, restore

from .tiny import CONFIG, digest, tiny_groups, tiny_learner

torch.set_num_threads(1)
LOSS = LossSpec(name="ppo", clip_low=5.0, clip_high=5.0, value_coefficient=0.5)
STEP = StepSpec(learning_rate=3e-3, critic_learning_rate=3e-2)


def valued(learner: Learner) -> list[list[list[float]]]:
    rows = iter(learner.rescored(tiny_groups(), None, None, values=True).logprobs)
    return [[list(next(rows)) for _ in group.completions] for group in tiny_groups()]


def taught(learner: Learner, target: float = 1.0) -> list[GroupData]:
    """The groups with returns that depend on the completion, and the present values."""
    return [
        GroupData(
            group.prompt,
            [
                replace(each, values=row, returns=[target * each.advantage] * len(row))
                for each, row in zip(group.completions, rows, strict=True)
            ],
        )
        for group, rows in zip(tiny_groups(), valued(learner), strict=True)
    ]


def test_values_are_zero_before_the_critic_has_learned() -> None:
    assert {value for group in valued(tiny_learner()) for row in group for value in row} == {0.0}


@pytest.mark.parametrize("clip", [0.0, 0.3])
def test_the_heads_gradient_is_that_of_finite_differences(clip: float) -> None:
    learner = tiny_learner()
    for _ in range(2):
        learner.forward_backward(taught(learner), LOSS)
        learner.optim_step(STEP)
    groups, loss = taught(learner), replace(LOSS, value_clip=clip)
    critic = learner.keep_critic()
    with torch.no_grad():
        critic.flat[:3] += 0.4  # away from the values at the start, so that the clip matters

    def value_loss() -> float:
        figures = learner.forward_backward(groups, loss)
        learner.forget_gradient()
        critic.forget_gradient()
        return figures.value_loss

    learner.forward_backward(groups, loss)
    gradient = critic.gradient.clone() / loss.value_coefficient
    learner.forget_gradient()
    critic.forget_gradient()
    for place in (0, 7, critic.offsets["bias"]):
        ends = []
        for step in (1e-2, -2e-2):
            with torch.no_grad():
                critic.flat[place] += step
            ends.append(value_loss())
        with torch.no_grad():
            critic.flat[place] += 1e-2
        assert float(gradient[place]) == pytest.approx((ends[0] - ends[1]) / 2e-2, rel=0.05, abs=2e-4)


def test_every_cut_into_micro_batches_gives_the_critic_the_same_gradient() -> None:
    whole, cut = tiny_learner(), tiny_learner()
    for learner in (whole, cut):
        learner.forward_backward(taught(learner), LOSS)
        learner.optim_step(STEP)
    first, second = whole.forward_backward(taught(whole), LOSS), cut.forward_backward(taught(cut), LOSS, 2)
    torch.testing.assert_close(cut.keep_critic().gradient, whole.keep_critic().gradient, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(cut.gradient, whole.gradient, atol=1e-6, rtol=1e-4)
    assert second.value_loss == pytest.approx(first.value_loss, abs=1e-6)
    assert second.explained_variance == pytest.approx(first.explained_variance, abs=1e-6)


def test_the_critic_learns_what_answers_bring_and_leaves_batches_without_returns_alone() -> None:
    learner, told = tiny_learner(), []
    for _ in range(60):
        told.append(learner.forward_backward(taught(learner), replace(LOSS, name="cross_entropy")))
        learner.optim_step(replace(STEP, learning_rate=1e-3))
    assert told[0].explained_variance == pytest.approx(0.0, abs=1e-6)
    assert told[-1].explained_variance > 0.6
    assert told[-1].value_loss < 0.25 * told[0].value_loss
    before = learner.keep_critic().flat.clone()
    learner.forward_backward(tiny_groups(), replace(LOSS, value_coefficient=0.0))
    learner.optim_step(STEP)
    assert torch.equal(learner.keep_critic().flat, before)


def test_a_refused_step_leaves_the_critic_as_it_was() -> None:
    learner = tiny_learner()
    learner.forward_backward(taught(learner), LOSS)
    learner.optim_step(STEP)
    before = learner.keep_critic().flat.clone()
    learner.forward_backward(taught(learner, float("inf")), LOSS)
    assert not learner.optim_step(STEP).applied
    assert torch.equal(learner.keep_critic().flat, before)
    assert not learner.keep_critic().accumulated


@pytest.mark.parametrize("between", [False, True])
def test_a_saved_critic_goes_on_bit_for_bit(tmp_path: Path, between: bool) -> None:
    store, key = open_store(f"file://{tmp_path}/store"), "learner-00000.safetensors"
    learner = tiny_learner()
    for _ in range(3):
        learner.forward_backward(taught(learner), LOSS)
        learner.optim_step(STEP)
    if between:
        learner.forward_backward(taught(learner), LOSS)
    capture = StateCapture()
    capture.take(learner, Journal(), 0)
    capture.write(store, key)
    loaded = restore(store, key, CONFIG, 0).learner
    for each in (learner, loaded):
        each.forward_backward(taught(each), LOSS)
        each.optim_step(STEP)
    assert digest(loaded) == digest(learner)
    assert torch.equal(loaded.keep_critic().flat, learner.keep_critic().flat)


def test_several_ranks_refuse_a_critic() -> None:
    sharded = ShardedLearner.__new__(ShardedLearner)  # refused before any rank is asked
    with pytest.raises(WrongState, match="REFLUX_LEARNER_RANKS"):
        sharded.forward_backward(tiny_groups(), LOSS)
    with pytest.raises(WrongState, match="REFLUX_LEARNER_RANKS"):
        sharded.rescored(tiny_groups(), None, None, values=True)


def test_explained_variance_is_that_of_the_textbook() -> None:
    random = np.random.default_rng(0)
    returns, values = random.normal(size=200), random.normal(size=200)
    rest = returns - values
    sums = (200, returns.sum(), (returns**2).sum(), rest.sum(), (rest**2).sum())
    assert explained_variance(*sums) == pytest.approx(1 - rest.var() / returns.var())
    assert explained_variance(5, 5.0, 5.0, 1.0, 1.0) == 0.0, "returns that do not vary"
