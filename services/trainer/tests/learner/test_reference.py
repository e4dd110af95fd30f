"""The KL to the learner's own reference: what it is taken to, what it costs, and that it survives the process."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from reflux_model.lora import LoraSpec
from reflux_model.parameters import initial_parameters
from reflux_storage.stores import open_store
from reflux_trainer.learner.core import AdapterJob, Learner
from reflux_trainer.learner.journal import Journal
from reflux_trainer.learner.lora import LoraAdapter
from reflux_trainer.learner.numerics import FLOAT32, Numerics
from reflux_trainer.learner.ops import GroupData, LossSpec, StepSpec
from reflux_trainer.learner.state import StateCapture, restore

from .tiny import CONFIG, digest, tiny_groups, tiny_learner

torch.set_num_threads(1)
PLAIN = LossSpec(name="reinforce")
OWN = replace(PLAIN, kl_coefficient=0.5, own_reference=True)
STEP = StepSpec(learning_rate=3e-3)


def steps(learner: Learner, loss: LossSpec, count: int) -> list[float]:
    """KL to the reference in each step."""
    found = []
    for _ in range(count):
        found.append(learner.forward_backward(tiny_groups(), loss).kl_reference)
        learner.optim_step(STEP)
    return found


def referred(groups: Sequence[GroupData], scored: list[list[list[float]]]) -> list[GroupData]:
    """The groups with their reference's log-probs written down."""
    return [
        GroupData(
            group.prompt,
            [replace(each, reference_logprobs=row) for each, row in zip(group.completions, rows, strict=True)],
        )
        for group, rows in zip(groups, scored, strict=True)
    ]


@pytest.mark.parametrize("micro_batch", [0, 2])
def test_the_reference_is_the_policy_of_the_first_batch_that_asks(micro_batch: int) -> None:
    learner, told = tiny_learner(), tiny_learner()
    steps(learner, PLAIN, 2)
    steps(told, PLAIN, 2)
    groups = referred(tiny_groups(), told.score(tiny_groups()))
    assert steps(learner, OWN, 1) == pytest.approx([0.0], abs=1e-9)
    steps(told, PLAIN, 1)
    got = learner.forward_backward(tiny_groups(), OWN, micro_batch)
    expected = told.forward_backward(groups, replace(OWN, own_reference=False), micro_batch)
    assert got.kl_reference > 1e-4
    assert got.kl_reference == pytest.approx(expected.kl_reference, abs=1e-6)
    torch.testing.assert_close(learner.gradient, told.gradient, atol=1e-6, rtol=1e-4)


def test_log_probs_that_are_given_go_before_the_learners_own() -> None:
    learner, told = tiny_learner(), tiny_learner()
    scored = tiny_learner(seed=1).score(tiny_groups())
    first = learner.forward_backward(referred(tiny_groups(), scored), OWN)
    second = told.forward_backward(referred(tiny_groups(), scored), replace(OWN, own_reference=False))
    assert first.kl_reference == pytest.approx(second.kl_reference)
    assert first.kl_reference > 0.1


def test_a_large_coefficient_holds_the_policy_near_the_reference() -> None:
    free, held = tiny_learner(), tiny_learner()
    far = steps(free, replace(OWN, kl_coefficient=1e-9), 25)
    near = steps(held, replace(OWN, kl_coefficient=30.0), 25)
    assert far[-1] > 0.05
    assert near[-1] < far[-1] / 10


def test_an_adapters_reference_is_the_model_without_it() -> None:
    learner, told = tiny_learner(), tiny_learner()
    adapters = [LoraAdapter.fresh(CONFIG, LoraSpec(rank=4, groups=("attention", "mlp")), 3) for _ in range(2)]
    groups = referred(tiny_groups(), told.score(tiny_groups()))
    for _ in range(3):
        own = AdapterJob(adapters[0], tiny_groups(), OWN)
        given = AdapterJob(adapters[1], groups, replace(OWN, own_reference=False))
        [first], [second] = learner.adapters_forward_backward([own]), told.adapters_forward_backward([given])
        torch.testing.assert_close(adapters[0].gradient, adapters[1].gradient, atol=1e-6, rtol=1e-4)
        for adapter in adapters:
            adapter.optim_step(StepSpec(learning_rate=3e-2))
    assert first.kl_reference == pytest.approx(second.kl_reference, abs=1e-6)
    assert first.kl_reference > 1e-4
    assert learner.reference is None, "no second copy of the weights"


@pytest.mark.parametrize("numerics", [FLOAT32, Numerics(dtype=torch.bfloat16), Numerics(deterministic=True)])
def test_the_reference_answers_as_the_policy_did_when_it_was_kept(numerics: Numerics) -> None:
    learner = Learner(CONFIG, initial_parameters(CONFIG, 0, std=0.2), 0, numerics)
    before = learner.rescored(tiny_groups(), None, None).logprobs
    assert learner.rescored(tiny_groups(), None, None, reference=True).logprobs == before, "none is kept yet"
    steps(learner, replace(OWN, kl_coefficient=0.0), 2)
    assert learner.rescored(tiny_groups(), None, None, reference=True).logprobs == before
    assert learner.rescored(tiny_groups(), None, None).logprobs != before


def test_the_reference_is_kept_although_all_log_probs_came_with_the_batch() -> None:
    learner, scored = tiny_learner(), tiny_learner(seed=1).score(tiny_groups())
    start = learner.flat.clone()
    learner.forward_backward(referred(tiny_groups(), scored), OWN)
    learner.optim_step(STEP)
    assert learner.reference is not None
    assert torch.equal(learner.reference, start)


def test_a_saved_learner_keeps_its_reference_bit_for_bit(tmp_path: Path) -> None:
    store, key = open_store(f"file://{tmp_path}/store"), "learner-00000.safetensors"
    learner = tiny_learner()
    steps(learner, OWN, 3)
    capture = StateCapture()
    capture.take(learner, Journal(), 0)
    capture.write(store, key)
    loaded = restore(store, key, CONFIG, 0).learner
    assert steps(loaded, OWN, 2) == steps(learner, OWN, 2)
    assert digest(loaded) == digest(learner)
