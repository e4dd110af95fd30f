"""LoRA adapters: what they compute, side by side on one base, and what stays of them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from reflux_model.errors import UnsupportedModelError
from reflux_model.lora import LoraSpec, TargetGroup, merged, target_shapes
from reflux_model.parameters import initial_parameters
from reflux_storage.stores import open_store
from reflux_storage.stores.base import ObjectStore
from reflux_storage.stream import write_tensors
from reflux_trainer.learner.adapter_state import capture, restore_adapter
from reflux_trainer.learner.core import AdapterJob, Learner
from reflux_trainer.learner.lora import LoraAdapter
from reflux_trainer.learner.ops import CompletionData, GroupData, LossSpec, StepSpec
from reflux_trainer.learner.state import StateMismatchError

from .tiny import CONFIG, tiny_groups

torch.set_num_threads(1)
UNTIED = replace(CONFIG, tie_embeddings=False)
ALL: tuple[TargetGroup, ...] = ("attention", "mlp", "unembed")
LOSS = LossSpec(name="importance_sampling", aggregation="sum")
STEP = StepSpec(learning_rate=1e-2, eps=1e-12)
KEY = "adapters/1/adapter-00000.safetensors"


def untied_learner() -> Learner:
    return Learner(UNTIED, initial_parameters(UNTIED, 0, std=0.2), 0)


def adapter_of(seed: int, rank: int = 4, groups: tuple[TargetGroup, ...] = ALL, steps: int = 0) -> LoraAdapter:
    """An adapter; with `steps` one that has learned something, so that B is no longer zero."""
    adapter = LoraAdapter.fresh(UNTIED, LoraSpec(rank=rank, groups=groups), seed)
    learner = untied_learner()
    for _ in range(steps):
        learner.adapters_forward_backward([AdapterJob(adapter, tiny_groups(), LOSS)])
        adapter.optim_step(STEP)
    return adapter


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(f"file://{tmp_path}/store")


def test_a_fresh_adapter_changes_nothing_and_depends_on_its_seed_only() -> None:
    learner, groups = untied_learner(), tiny_groups()
    adapter = adapter_of(3)
    got = learner.rescored(groups, adapter, None).logprobs
    expected = [tuple(row) for group in learner.score(groups) for row in group]
    for row, plain in zip(got, expected, strict=True):
        assert row == pytest.approx(plain, abs=1e-6)
    assert torch.equal(adapter.flat, adapter_of(3).flat)
    assert not torch.equal(adapter.flat, adapter_of(4).flat)


@pytest.mark.parametrize("groups", [("attention",), ("mlp",), ("unembed",), ALL])
def test_factors_beside_the_base_compute_what_merged_weights_compute(groups: tuple[TargetGroup, ...]) -> None:
    learner, adapter = untied_learner(), adapter_of(1, groups=groups, steps=3)
    whole = Learner(UNTIED, merged(learner.params, adapter.params, adapter.spec), 0)
    beside = learner.rescored(tiny_groups(), adapter, None).logprobs
    inside = [row for group in whole.score(tiny_groups()) for row in group]
    plain = [row for group in learner.score(tiny_groups()) for row in group]
    assert (
        max(abs(a - b) for one, two in zip(beside, inside, strict=True) for a, b in zip(one, two, strict=True)) < 1e-5
    )
    assert max(abs(a - b) for one, two in zip(beside, plain, strict=True) for a, b in zip(one, two, strict=True)) > 1e-2


def test_the_gradient_is_that_of_the_merged_weights_by_the_chain_rule() -> None:
    learner, adapter = untied_learner(), adapter_of(1, steps=2)
    whole = Learner(UNTIED, merged(learner.params, adapter.params, adapter.spec), 0)
    whole.forward_backward(tiny_groups(), LOSS)
    learner.adapters_forward_backward([AdapterJob(adapter, tiny_groups(), LOSS)])
    for module in target_shapes(UNTIED, ALL):
        upstream = whole.params[module + ".weight"].grad
        a, b = adapter.params[module + ".lora_A.weight"], adapter.params[module + ".lora_B.weight"]
        assert upstream is not None
        scale = adapter.spec.scale
        torch.testing.assert_close(b.grad, scale * upstream @ a.detach().t(), atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(a.grad, scale * b.detach().t() @ upstream, atol=1e-4, rtol=1e-3)


def test_adapters_of_other_ranks_and_targets_share_a_pass_and_do_not_mix() -> None:
    learner = untied_learner()
    kinds: list[tuple[int, tuple[TargetGroup, ...]]] = [(4, ALL), (2, ("mlp",)), (8, ("attention", "unembed"))]
    together = [adapter_of(seed, rank, groups, steps=1) for seed, (rank, groups) in enumerate(kinds)]
    alone = [adapter_of(seed, rank, groups, steps=1) for seed, (rank, groups) in enumerate(kinds)]
    batches = [tiny_groups(3), tiny_groups(1, 5), tiny_groups(5, 2)]
    losses = [LOSS, LossSpec(name="cross_entropy", aggregation="sum"), LossSpec(name="ppo", aggregation="sum")]
    jobs = [AdapterJob(*job) for job in zip(together, batches, losses, strict=True)]
    seen = learner.adapters_forward_backward(jobs)
    for adapter, other, batch, loss, figures in zip(together, alone, batches, losses, seen, strict=True):
        (expected,) = learner.adapters_forward_backward([AdapterJob(other, batch, loss)])
        torch.testing.assert_close(adapter.gradient, other.gradient, atol=1e-5, rtol=1e-4)
        assert figures.loss == pytest.approx(expected.loss, rel=1e-5)
        for row, plain in zip(figures.logprobs, expected.logprobs, strict=True):
            assert row == pytest.approx(plain, abs=1e-5)
    assert not learner.gradient.any()


def test_a_poisoned_batch_costs_its_own_adapter_a_step_and_no_other() -> None:
    learner, good, bad = untied_learner(), adapter_of(1), adapter_of(2)
    poison = [GroupData([3, 4], [CompletionData([5, 6], [-1.0, -1.0], float("nan"))])]
    learner.adapters_forward_backward([AdapterJob(good, tiny_groups(), LOSS), AdapterJob(bad, poison, LOSS)])
    assert good.optim_step(STEP).applied
    refused = bad.optim_step(STEP)
    assert (refused.applied, bad.version, bad.refused_steps) == (False, 0, 1)


def test_learning_moves_the_factors_and_leaves_the_base() -> None:
    learner, adapter = untied_learner(), adapter_of(1)
    before, base = learner.rescored(tiny_groups(), adapter, LOSS).loss, learner.flat.clone()
    for _ in range(5):
        learner.adapters_forward_backward([AdapterJob(adapter, tiny_groups(), LOSS)])
        adapter.optim_step(STEP)
    assert learner.rescored(tiny_groups(), adapter, LOSS).loss < before
    assert torch.equal(learner.flat, base)
    assert adapter.version == 5


def test_a_weight_of_zero_masks_a_token_and_others_scale_it() -> None:
    learner, first, second = untied_learner(), adapter_of(1), adapter_of(1)
    weighted = [GroupData([3], [CompletionData([5, 6, 7], weights=[2.0, 0.0, 1.0], fed_ids=[5, 6])])]
    plain = [
        GroupData([3], [CompletionData([5])]),
        GroupData([3], [CompletionData([5])]),
        GroupData([3, 5, 6], [CompletionData([7])]),
    ]
    loss = LossSpec(name="cross_entropy", aggregation="sum")
    (figures,) = learner.adapters_forward_backward([AdapterJob(first, weighted, loss)])
    learner.adapters_forward_backward([AdapterJob(second, plain, loss)])
    torch.testing.assert_close(first.gradient, second.gradient, atol=1e-5, rtol=1e-4)
    assert figures.tokens == 2
    assert len(figures.logprobs[0]) == 3


def saved(adapter: LoraAdapter, store: ObjectStore, *, weights_only: bool) -> None:
    write_tensors(store, KEY, capture(adapter, weights_only=weights_only))


def test_with_its_optimizer_a_loaded_adapter_goes_on_bit_for_bit(store: ObjectStore) -> None:
    learner, adapter = untied_learner(), adapter_of(1, steps=3)
    learner.adapters_forward_backward([AdapterJob(adapter, tiny_groups(), LOSS)])  # half way to the next step
    saved(adapter, store, weights_only=False)
    loaded = restore_adapter(store, KEY, UNTIED, weights_only=False)
    for each in (adapter, loaded):
        each.optim_step(STEP)
        learner.adapters_forward_backward([AdapterJob(each, tiny_groups(), LOSS)])
        each.optim_step(STEP)
    assert torch.equal(loaded.flat, adapter.flat)
    assert loaded.version == adapter.version == 5


@pytest.mark.parametrize("kept", [True, False])
def test_without_its_optimizer_a_loaded_adapter_starts_with_zero_moments(store: ObjectStore, kept: bool) -> None:
    learner, adapter = untied_learner(), adapter_of(1, steps=3)
    saved(adapter, store, weights_only=kept)
    loaded = restore_adapter(store, KEY, UNTIED, weights_only=True)
    assert torch.equal(loaded.flat, adapter.flat)
    assert (loaded.version, loaded.optimizer.steps, loaded.optimizer.mean) == (3, 0, None)
    for each in (adapter, loaded):
        learner.adapters_forward_backward([AdapterJob(each, tiny_groups(), LOSS)])
        each.optim_step(replace(STEP, reset_optimizer=each is adapter))
    assert torch.equal(loaded.flat, adapter.flat)


def test_states_that_do_not_fit_are_refused_by_name(store: ObjectStore) -> None:
    saved(adapter_of(1), store, weights_only=True)
    with pytest.raises(StateMismatchError, match="weights of an adapter only"):
        restore_adapter(store, KEY, UNTIED, weights_only=False)
    with pytest.raises(StateMismatchError, match=r"expected F32\[4, 32\]"):
        restore_adapter(store, KEY, replace(UNTIED, hidden_size=32), weights_only=True)
    with pytest.raises(UnsupportedModelError, match="ties its output head"):
        restore_adapter(store, KEY, CONFIG, weights_only=True)


def test_targets_that_are_absent_and_empty_adapters_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"no lm_head\.weight"):
        LoraAdapter.fresh(CONFIG, LoraSpec(rank=2, groups=("unembed",)), 0)
    with pytest.raises(UnsupportedModelError, match="at least 1"):
        LoraSpec(rank=0, groups=ALL)
    with pytest.raises(UnsupportedModelError, match="attention, mlp, unembed"):
        LoraSpec(rank=1, groups=())
