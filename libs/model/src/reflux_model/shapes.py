"""Names and shapes of a model's parameters (Hugging Face names). Free of torch."""

import math

from reflux_model.config import ModelConfig

LORA_ALPHA = 32.0
"""The product of an adapter's factors counts this by its rank, for every adapter."""


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
