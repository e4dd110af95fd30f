"""Names, shapes and random initialisation of a model's parameters (Hugging Face names)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from reflux_model.config import ModelConfig
from reflux_model.errors import ParameterMismatchError

Parameters = Mapping[str, Tensor]
"""Named tensors; a tied head has no entry of its own."""


@dataclass(frozen=True, kw_only=True)
class FourierRows:
    """Embedding rows [first, first + count) that stand for a continuous axis, such as two-theta bins.

    Row j gets sines and cosines of x = j / count at `hidden_size // 4` frequencies, geometric from half a turn to
    count / 5 turns over the whole axis, so neighbours start out similar and far rows do not.
    """

    first: int
    count: int
    scale: float = 0.04
    """Amplitude of the features."""
    noise: float = 0.004
    """Standard deviation of the Gaussian noise added to each number."""


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter's shape in the canonical order (embedding, layers, norm, head)."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_size
    queries, keys = config.num_heads * head, config.num_kv_heads * head
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        attention = prefix + "self_attn."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            shapes[f"{attention}{name}.weight"] = (rows, hidden)
            if config.attention_bias:
                shapes[f"{attention}{name}.bias"] = (rows,)
        if config.query_key_norm:
            shapes[attention + "q_norm.weight"] = (head,)
            shapes[attention + "k_norm.weight"] = (head,)
        shapes[attention + "o_proj.weight"] = (hidden, queries)
        if config.output_bias:
            shapes[attention + "o_proj.bias"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        shapes[prefix + "mlp.gate_proj.weight"] = (inner, hidden)
        shapes[prefix + "mlp.up_proj.weight"] = (inner, hidden)
        shapes[prefix + "mlp.down_proj.weight"] = (hidden, inner)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def num_parameters(config: ModelConfig) -> int:
    """Trainable numbers; a tied head counts once."""
    return sum(math.prod(shape) for shape in parameter_shapes(config).values())


def initial_parameters(
    config: ModelConfig, seed: int, *, fourier: FourierRows | None = None, std: float = 0.02
) -> dict[str, Tensor]:
    """Random float32 parameters: N(0, std) for matrices, ones for norms, zeros for biases. Same seed, same bits."""
    generator = torch.Generator().manual_seed(seed)
    params: dict[str, Tensor] = {}
    for name, shape in parameter_shapes(config).items():
        if name.endswith(".bias"):
            params[name] = torch.zeros(shape)
        elif len(shape) == 1:
            params[name] = torch.ones(shape)
        else:
            params[name] = torch.empty(shape).normal_(0.0, std, generator=generator)
    if fourier:
        _fill_fourier(params["model.embed_tokens.weight"], fourier, generator)
    return params


def check_parameters(params: Parameters, config: ModelConfig) -> None:
    """Raises `ParameterMismatchError` that names the first parameter that is missing, extra or misshapen."""
    shapes = parameter_shapes(config)
    for name, shape in shapes.items():
        if name not in params:
            raise ParameterMismatchError(f"parameter {name} is missing")
        if tuple(params[name].shape) != shape:
            raise ParameterMismatchError(f"parameter {name} has shape {tuple(params[name].shape)}, expected {shape}")
    extra = sorted(set(params) - set(shapes))
    if extra:
        raise ParameterMismatchError(f"parameter {extra[0]} does not belong to this configuration")


def _fill_fourier(embedding_VE: Tensor, rows: FourierRows, generator: torch.Generator) -> None:
    vocab_size, hidden = embedding_VE.shape
    if rows.first < 0 or rows.count < 1 or rows.first + rows.count > vocab_size:
        raise ParameterMismatchError(
            f"Fourier rows {rows.first}..{rows.first + rows.count} are outside the vocabulary of {vocab_size}"
        )
    axis = torch.arange(rows.count, dtype=torch.float32)[:, None] / rows.count
    octaves = torch.linspace(0.0, max(0.0, math.log2(rows.count / 2.5)), hidden // 4)
    phase = math.pi * axis * torch.exp2(octaves)[None]
    features = torch.cat([phase.sin(), phase.cos()], 1) * rows.scale
    target = embedding_VE[rows.first : rows.first + rows.count]
    target.normal_(0.0, rows.noise, generator=generator)
    target[:, : features.shape[1]] += features
