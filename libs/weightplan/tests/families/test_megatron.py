"""Synthetic Megatron ranks: sharded by the reference's own rules, exported, and compared with the whole tensors."""

from dataclasses import dataclass

import numpy as np
import pytest
from small_models import SMALL, small

from reflux_weightplan.errors import LayoutRefused
from reflux_weightplan.families.base import Model, ModelTensor
from reflux_weightplan.families.layouts import Parallelism, parallel
from reflux_weightplan.naming.checkpoint import from_hugging_face, to_hugging_face
from reflux_weightplan.naming.fused import merge, split
from reflux_weightplan.naming.megatron import Names, Slot

TENSOR, STAGES, OWNERS = 2, 2, 2


@dataclass(frozen=True)
class Rank:
    """One Megatron rank: its pipeline stage, its tensor rank, and which experts it owns."""

    stage: int
    tensor: int
    owner: int

    def first_layer(self, model: Model) -> int:
        return self.stage * model.layers // STAGES

    def holds(self, model: Model, tensor: ModelTensor) -> bool:
        layer = min(max(tensor.layer, 0), model.layers - 1)
        if layer * STAGES // model.layers != self.stage:
            return False
        return tensor.expert < 0 or tensor.expert * OWNERS // model.experts == self.owner

    def part(self, tensor: ModelTensor, whole: np.ndarray) -> np.ndarray:
        """The reference's rule: column parallel halves the rows, row parallel the columns; experts stay whole."""
        if tensor.part == "replicated" or tensor.expert >= 0:
            return whole
        return np.split(whole, TENSOR, axis=1 if tensor.part == "row" else 0)[self.tensor]


def interleave(model: Model, rank: Rank, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A rank's Megatron state dict, with q, k and v put together row by row as its attention reads them."""
    held = [tensor for tensor in model.tensors if rank.holds(model, tensor)]
    names = Names(model, rank.first_layer(model), first_expert(model, rank))
    state: dict[str, np.ndarray] = {}
    for name, members in names.tensors(held).items():
        arrays = {member: rank.part(tensor, weights[tensor.name]) for member, tensor in members.items()}
        if list(members) == ["q", "k", "v"]:
            rows: list[np.ndarray] = []
            size = members["k"].head
            groups = len(arrays["k"]) // size
            queries = len(arrays["q"]) // size // groups
            for group in range(groups):
                rows += [arrays["q"][(group * queries + query) * size :][:size] for query in range(queries)]
                rows += [arrays[letter][group * size :][:size] for letter in ("k", "v")]
            state[name] = np.concatenate(rows)
        else:
            state[name] = np.concatenate(list(arrays.values()))
    return state


def first_expert(model: Model, rank: Rank) -> int:
    return rank.owner * model.experts // OWNERS


@pytest.mark.parametrize("family", SMALL)
def test_exported_ranks_hold_the_parts_of_the_whole_tensors_bit_for_bit(family: str) -> None:
    model = small(family)
    generator = np.random.default_rng(5)
    weights = {tensor.name: generator.standard_normal(tensor.shape).astype(np.float32) for tensor in model.tensors}
    seen: set[str] = set()
    for rank in [Rank(s, t, o) for s in range(STAGES) for t in range(TENSOR) for o in range(OWNERS)]:
        held = [tensor for tensor in model.tensors if rank.holds(model, tensor)]
        names = Names(model, rank.first_layer(model), first_expert(model, rank))
        members_of = names.tensors(held)
        for name, array in interleave(model, rank, weights).items():
            parts = split(array, members_of[name])
            for tensor in members_of[name].values():
                np.testing.assert_array_equal(parts[tensor.name], rank.part(tensor, weights[tensor.name]))
                seen.add(tensor.name)
            np.testing.assert_array_equal(merge(parts, members_of[name]), array)
    assert seen == set(weights)


@pytest.mark.parametrize("family", SMALL)
def test_every_name_goes_there_and_back_without_a_clash(family: str) -> None:
    model = small(family)
    names = Names(model)
    back = names.hugging_face(model.tensors)
    assert len(back) == len(model.tensors)
    assert all(back[names.slot(tensor.name)] == tensor.name for tensor in model.tensors)


def test_names_are_those_of_megatron_core() -> None:
    names = Names(small("llama"), first_layer=2)
    assert names.slot("model.layers.3.self_attn.k_proj.weight") == Slot(
        "decoder.layers.1.self_attention.linear_qkv.weight", "k"
    )
    assert names.slot("model.layers.2.input_layernorm.weight") == Slot(
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"
    )
    sparse = Names(small("qwen3_moe"), first_expert=2)
    assert sparse.slot("model.layers.0.mlp.experts.3.up_proj.weight") == Slot(
        "decoder.layers.0.mlp.experts.linear_fc1.weight1", "up"
    )
    assert sparse.slot("model.layers.0.post_attention_layernorm.weight").name == (
        "decoder.layers.0.pre_mlp_layernorm.weight"
    )


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.rotary_emb.inv_freq", "vision.patch.weight"])
def test_a_name_of_no_family_is_refused(name: str) -> None:
    with pytest.raises(LayoutRefused, match=name):
        Names(small("llama")).slot(name)


def test_rows_that_are_no_whole_blocks_are_refused() -> None:
    model = small("llama")
    members = Names(model).tensors(model.tensors)["decoder.layers.0.self_attention.linear_qkv.weight"]
    with pytest.raises(LayoutRefused, match="65 local rows"):
        split(np.zeros((65, 32), np.float32), members)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_a_checkpoint_of_all_ranks_becomes_the_hugging_face_weights_and_back_bit_for_bit(family: str) -> None:
    model = small(family)
    generator = np.random.default_rng(6)
    weights = {tensor.name: generator.standard_normal(tensor.shape).astype(np.float32) for tensor in model.tensors}
    sizes = Parallelism(pipeline=STAGES, expert_groups=1 if model.experts else 0, tensor=TENSOR)
    layout = parallel(model, sizes, engine="megatron", fused="megatron")
    ranks = [Rank(stage, tensor, tensor) for stage in range(STAGES) for tensor in range(TENSOR)]
    states = [interleave(model, rank, weights) for rank in ranks]
    found = to_hugging_face(model, layout, states)
    assert list(found) == [tensor.name for tensor in model.tensors]
    for name, array in found.items():
        np.testing.assert_array_equal(array, weights[name])
    rows = model.tensors[0].shape[0] // TENSOR
    for state, expected in zip(from_hugging_face(model, layout, weights, rows), states, strict=True):
        assert set(state) == set(expected)
        for name, array in state.items():
            np.testing.assert_array_equal(array, expected[name])


def test_a_padded_vocabulary_is_cut_and_filled_with_zeros() -> None:
    model = small("llama")
    weights = {tensor.name: np.ones(tensor.shape, np.float32) for tensor in model.tensors}
    layout = parallel(model, Parallelism(tensor=TENSOR), engine="megatron", fused="megatron")
    states = from_hugging_face(model, layout, weights, 160)
    table = "embedding.word_embeddings.weight"
    assert [state[table].shape[0] for state in states] == [160, 160]
    assert [float(state[table].sum()) for state in states] == [128 * 32, 128 * 32]
    np.testing.assert_array_equal(to_hugging_face(model, layout, states)["lm_head.weight"], weights["lm_head.weight"])


def test_states_that_do_not_fit_the_layout_are_refused_by_name() -> None:
    model = small("llama")
    weights = {tensor.name: np.ones(tensor.shape, np.float32) for tensor in model.tensors}
    layout = parallel(model, Parallelism(tensor=TENSOR), engine="megatron", fused="megatron")
    states = from_hugging_face(model, layout, weights, 128)
    with pytest.raises(LayoutRefused, match="1 states for a layout of 2 ranks"):
        to_hugging_face(model, layout, states[:1])
    states[1]["decoder.final_layernorm.weight"] = np.ones(3, np.float32)
    with pytest.raises(LayoutRefused, match=r"final_layernorm.weight of rank 1 holds \[3\] of model.norm.weight"):
        to_hugging_face(model, layout, states)
    del states[1]["decoder.final_layernorm.weight"]
    with pytest.raises(LayoutRefused, match=r"rank 1 lacks decoder.final_layernorm.weight"):
        to_hugging_face(model, layout, states)
