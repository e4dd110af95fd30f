"""The transformer block, as functions of named tensors: RMSNorm, rotary positions, attention, SwiGLU.

Every path (training, prefill, decoding) runs `run_layers`; they differ only in the attention they hand in. Arithmetic
is done in the dtype of the parameters; norms and rotary angles are float32, as in the Hugging Face classes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from reflux_model.config import ModelConfig, RopeScaling
from reflux_model.parameters import Parameters
from reflux_model.projections import PLAIN, Projections

Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, queries_BLHD, keys_BLKD, values_BLKD) -> mixed values_BLHD; queries and keys are already rotated."""


def embed(params: Parameters, tokens: Tensor) -> Tensor:
    """Token ids of any shape -> hidden states with one more dimension (E)."""
    return F.embedding(tokens, params["model.embed_tokens.weight"])


def project_to_vocab(params: Parameters, hidden: Tensor, projections: Projections = PLAIN) -> Tensor:
    """Normalised hidden states (..., E) -> logits (..., V); uses the embedding when the head is tied."""
    return projections.logits(params, hidden)


def run_layers(
    params: Parameters,
    config: ModelConfig,
    hidden_BLE: Tensor,
    rope: tuple[Tensor, Tensor],
    attention: Attention,
    projections: Projections = PLAIN,
    *,
    recompute: bool = False,
) -> Tensor:
    """All blocks and the final norm: hidden_BLE -> hidden_BLE; `rope` comes from `rotary_tables`.

    With `recompute` the backward pass finds a block's input only, and computes the rest of its activations again.
    """
    hidden = hidden_BLE
    for layer in range(config.num_layers):
        block = partial(run_block, params, config, layer, rope=rope, attention=attention, projections=projections)
        if recompute and torch.is_grad_enabled():
            hidden = checkpoint(block, hidden, use_reentrant=False, preserve_rng_state=False)
        else:
            hidden = block(hidden)
    return rms_norm(hidden, params["model.norm.weight"], config.rms_norm_eps)


def run_block(
    params: Parameters,
    config: ModelConfig,
    layer: int,
    hidden: Tensor,
    rope: tuple[Tensor, Tensor],
    attention: Attention,
    projections: Projections = PLAIN,
) -> Tensor:
    """One block: attention and feed-forward with their norms and residuals."""
    prefix = f"model.layers.{layer}."
    normed = rms_norm(hidden, params[prefix + "input_layernorm.weight"], config.rms_norm_eps)
    queries, keys, values = _project(params, config, prefix + "self_attn.", normed, rope, projections)
    mixed = attention(layer, queries, keys, values).flatten(-2)
    hidden = hidden + projections.linear(params, prefix + "self_attn.o_proj", mixed)
    normed = rms_norm(hidden, params[prefix + "post_attention_layernorm.weight"], config.rms_norm_eps)
    gate = projections.linear(params, prefix + "mlp.gate_proj", normed)
    up = projections.linear(params, prefix + "mlp.up_proj", normed)
    return hidden + projections.linear(params, prefix + "mlp.down_proj", F.silu(gate) * up)


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32 for narrower inputs."""
    if hidden.dtype == torch.float32:
        return F.rms_norm(hidden, weight.shape, weight, eps)
    return weight * F.rms_norm(hidden.float(), weight.shape, None, eps).to(hidden.dtype)


def rotary_tables(config: ModelConfig, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Positions (B, L) -> cosines and sines, each (B, L, 1, D/2), computed in float32 and cast to `dtype`."""
    half = config.head_size // 2
    exponents = torch.arange(half, dtype=torch.float32, device=positions.device) / half
    frequencies = config.rope_theta**-exponents
    if config.rope_scaling:
        frequencies = _scaled(frequencies, config.rope_scaling)
    angles = positions.float()[..., None, None] * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(heads_BLHD: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Turns each pair (i, i + D/2) of every head by its position's angle (the Hugging Face pairing)."""
    return _Rotate.apply(heads_BLHD, *rope)


def attend(queries_BLHD: Tensor, keys_BHSD: Tensor, values_BHSD: Tensor, mask: Tensor | None) -> Tensor:
    """Scaled dot-product attention; `mask` is additive and broadcasts to (B, H, L, S). Returns (B, L, H, D)."""
    grouped = keys_BHSD.shape[1] != queries_BLHD.shape[2]
    mixed = F.scaled_dot_product_attention(
        queries_BLHD.transpose(1, 2), keys_BHSD, values_BHSD, attn_mask=mask, enable_gqa=grouped
    )
    return mixed.transpose(1, 2)


def additive_mask(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """Boolean (True = may attend) -> 0 and -inf in `dtype`."""
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, float("-inf"))


class _Rotate(torch.autograd.Function):
    """One pass forward; the gradient is the rotation by the opposite angle."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        return _turn(heads, cosines, sines)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cosines, sines = ctx.saved_tensors
        return _turn(gradients[0], cosines, -sines), None, None


def _turn(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    first, second = heads.chunk(2, -1)
    turned = torch.empty_like(heads, memory_format=torch.contiguous_format)
    half = first.shape[-1]
    torch.mul(first, cosines, out=turned[..., :half]).addcmul_(second, sines, value=-1)
    torch.mul(second, cosines, out=turned[..., half:]).addcmul_(first, sines)
    return turned


def _project(
    params: Parameters,
    config: ModelConfig,
    prefix: str,
    normed_BLE: Tensor,
    rope: tuple[Tensor, Tensor],
    projections: Projections,
) -> tuple[Tensor, Tensor, Tensor]:
    shape = (*normed_BLE.shape[:-1], -1, config.head_size)
    queries = projections.linear(params, prefix + "q_proj", normed_BLE).view(shape)
    keys = projections.linear(params, prefix + "k_proj", normed_BLE).view(shape)
    values = projections.linear(params, prefix + "v_proj", normed_BLE).view(shape)
    if config.query_key_norm:
        queries = rms_norm(queries, params[prefix + "q_norm.weight"], config.rms_norm_eps)
        keys = rms_norm(keys, params[prefix + "k_norm.weight"], config.rms_norm_eps)
    return rotate(queries, rope), rotate(keys, rope), values


def _scaled(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1: long waves are stretched by `factor`, short ones kept, those between interpolated."""
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    turns = scaling.original_max_positions * frequencies / (2 * torch.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / scaling.factor)
