"""One small model of every family."""

from typing import Any

from reflux_weightplan.families.base import Model
from reflux_weightplan.families.registry import model_of

SMALL: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 4},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 4},
    "qwen3_moe": {"num_key_value_heads": 2, "head_dim": 4, "num_experts": 4, "moe_intermediate_size": 6},
    "deepseek_v3": {
        "q_lora_rank": 6,
        "kv_lora_rank": 4,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 2,
        "v_head_dim": 4,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "moe_intermediate_size": 6,
        "first_k_dense_replace": 1,
    },
}


def small(family: str) -> Model:
    base = {
        "model_type": family,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "intermediate_size": 12,
        "vocab_size": 256,
        "attention_bias": family == "qwen3",
    }
    return model_of(base | SMALL[family])
