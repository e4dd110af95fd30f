"""Shapes of families against published totals, and against Hugging Face's own classes where those are at hand."""

import math
from dataclasses import replace
from typing import Any

import pytest
from explicit_layouts import sharded

from reflux_weightplan.errors import LayoutRefused
from reflux_weightplan.families.layouts import Fusing, Parallelism, fsdp_experts, parallel
from reflux_weightplan.families.presets import CONFIGS, PRESETS
from reflux_weightplan.families.registry import model_of


@pytest.mark.parametrize(
    ("name", "tensors", "parameters"),
    [
        ("smollm2-135m", 272, 134_515_008),
        ("llama-3.1-8b", 291, 8_030_261_248),
        ("qwen3-8b", 399, 8_190_735_360),
        ("qwen3-30b-a3b", 18_867, 30_532_122_624),
        ("deepseek-v3", 45_395, 671_026_419_200),
    ],
)
def test_a_family_has_the_published_number_of_parameters(name: str, tensors: int, parameters: int) -> None:
    model = model_of(CONFIGS[name])
    assert len(model.tensors) == tensors
    assert sum(math.prod(tensor.shape) for tensor in model.tensors) == parameters


def test_the_router_bias_of_deepseek_is_float32_and_nothing_else_is() -> None:
    others = {tensor.name.rpartition(".")[2] for tensor in model_of(CONFIGS["deepseek-v3"]).tensors
              if tensor.dtype == "float32"}  # fmt: skip
    assert others == {"e_score_correction_bias"}


def test_layers_that_are_listed_or_skipped_by_the_step_are_dense() -> None:
    config: dict[str, Any] = {**CONFIGS["qwen3-30b-a3b"], "num_hidden_layers": 6, "num_experts": 4}
    sparse = {tensor.layer for tensor in model_of(config | {"decoder_sparse_step": 2}).tensors if tensor.expert >= 0}
    assert sparse == {1, 3, 5}
    sparse = {tensor.layer for tensor in model_of(config | {"mlp_only_layers": [1, 2]}).tensors if tensor.expert >= 0}
    assert sparse == {0, 3, 4, 5}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 5}, "groups"),
    ],
)
def test_a_config_that_cannot_be_is_refused_by_field(change: dict[str, Any], named: str) -> None:
    with pytest.raises(LayoutRefused, match=named):
        model_of({**CONFIGS["llama-3.1-8b"], **change})


def test_experts_and_layers_that_do_not_divide_are_refused() -> None:
    model = model_of(CONFIGS["qwen3-30b-a3b"])
    with pytest.raises(LayoutRefused, match="128 experts do not divide among 3"):
        fsdp_experts(model, 2, 3)
    with pytest.raises(LayoutRefused, match="128 experts do not divide among 12"):
        parallel(model, Parallelism(expert_groups=3, tensor=4))
    with pytest.raises(LayoutRefused, match="48 layers are too few for 49"):
        parallel(model, Parallelism(pipeline=49))


@pytest.mark.parametrize("name", PRESETS)
def test_presets_name_the_same_tensors_on_both_sides(name: str) -> None:
    source, target = PRESETS[name].make()
    assert [tensor.name for tensor in source.tensors] == [tensor.name for tensor in target.tensors]
    assert source.nbytes == target.nbytes


@pytest.mark.parametrize(
    ("name", "ranks", "fused", "rows"),
    [
        ("llama-3.1-8b", 8, "engine", 16_032),
        ("qwen3-8b", 4, "engine", 37_984),
        ("deepseek-v3", 8, "engine", 16_160),
        ("llama-3.1-8b", 8, "megatron", 16_128),
    ],
)
def test_the_vocabulary_is_dealt_out_as_engines_do(name: str, ranks: int, fused: Fusing, rows: int) -> None:
    """vLLM: vocab_parallel_embedding.py; Megatron-LM: `_vocab_size_with_padding` of 128 x ranks."""
    layout = parallel(model_of(CONFIGS[name]), Parallelism(tensor=ranks), fused=fused)
    size = layout.tensors[0].shape[0]
    boxes = [shard.box for shard in sharded(replace(layout, tensors=layout.tensors[:1])).tensors[0].shards]
    assert [box.start[0] for box in boxes] == [rank * rows for rank in range(ranks)]
    assert boxes[-1].stop[0] == size


def test_megatron_deals_out_whole_groups_or_refuses() -> None:
    with pytest.raises(LayoutRefused, match="do not divide among 16"):
        parallel(model_of(CONFIGS["llama-3.1-8b"]), Parallelism(tensor=16), fused="megatron")
