"""Shape of a Llama-like model, and its translation from and to a Hugging Face `config.json`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from reflux_model.errors import UnsupportedModelError

Architecture = Literal["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
_MODEL_TYPES: dict[Architecture, str] = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Stretching of the rotary frequencies; `linear` uses `factor` only, `llama3` all four numbers."""

    kind: Literal["linear", "llama3"]
    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """All numbers that fix the parameter shapes and the forward pass. Sizes are counts of elements."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_positions: int
    """Longest sequence, prompt plus completion, in tokens."""
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = True
    attention_bias: bool = False
    """Biases on the query, key and value projections (Qwen2)."""
    output_bias: bool = False
    """Bias on the attention's output projection (Llama with `attention_bias`)."""
    query_key_norm: bool = False
    """RMSNorm on each head's queries and keys (Qwen3)."""
    architecture: Architecture = "LlamaForCausalLM"
    eos_token_id: int | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise UnsupportedModelError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_size % 2:
            raise UnsupportedModelError(f"head_size must be even for rotary embeddings, got {self.head_size}")


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads the dictionary of a `config.json`; raises `UnsupportedModelError` naming the field that does not fit."""
    architecture = (hf.get("architectures") or ["LlamaForCausalLM"])[0]
    if architecture not in _MODEL_TYPES:
        raise UnsupportedModelError(f"architecture {architecture!r} is not one of {', '.join(_MODEL_TYPES)}")
    missing = [key for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers") if key not in hf]
    if missing:
        raise UnsupportedModelError(f"config.json lacks {', '.join(missing)}")
    if hf.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError(f"hidden_act {hf['hidden_act']!r} is not supported; only 'silu' is")
    if hf.get("mlp_bias"):
        raise UnsupportedModelError("mlp_bias = true is not supported")
    num_heads = int(hf.get("num_attention_heads", 32))
    bias = bool(hf.get("attention_bias", False))
    theta, scaling = _rope(hf)
    return ModelConfig(
        vocab_size=int(hf["vocab_size"]),
        hidden_size=int(hf["hidden_size"]),
        intermediate_size=int(hf["intermediate_size"]),
        num_layers=int(hf["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=int(hf.get("num_key_value_heads") or num_heads),
        head_size=int(hf.get("head_dim") or int(hf["hidden_size"]) // num_heads),
        max_positions=int(hf.get("max_position_embeddings", 2048)),
        rms_norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
        attention_bias=bias or architecture == "Qwen2ForCausalLM",
        output_bias=bias and architecture != "Qwen2ForCausalLM",
        query_key_norm=architecture == "Qwen3ForCausalLM",
        architecture=architecture,
        eos_token_id=_first(hf.get("eos_token_id")),
        pad_token_id=_first(hf.get("pad_token_id")),
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` that `transformers` loads; keys of old and new releases are both written."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling:
        rope |= {"rope_type": config.rope_scaling.kind, "factor": config.rope_scaling.factor}
        if config.rope_scaling.kind == "llama3":
            rope |= {
                "low_freq_factor": config.rope_scaling.low_frequency_factor,
                "high_freq_factor": config.rope_scaling.high_frequency_factor,
                "original_max_position_embeddings": config.rope_scaling.original_max_positions,
            }
    return {
        "architectures": [config.architecture],
        "model_type": _MODEL_TYPES[config.architecture],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": rope,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": False,
        "hidden_act": "silu",
        "bos_token_id": None,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
        "dtype": "float32",
    }


def _rope(hf: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    rope = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    theta = float(rope.get("rope_theta", hf.get("rope_theta", 10_000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind not in ("linear", "llama3"):
        raise UnsupportedModelError(f"rope_type {kind!r} is not one of default, linear, llama3")
    return theta, RopeScaling(
        kind=kind,
        factor=float(rope["factor"]),
        low_frequency_factor=float(rope.get("low_freq_factor", 1.0)),
        high_frequency_factor=float(rope.get("high_freq_factor", 4.0)),
        original_max_positions=int(rope.get("original_max_position_embeddings", 8192)),
    )


def _first(token: int | list[int] | None) -> int | None:
    return token[0] if isinstance(token, list) and token else token if isinstance(token, int) else None
