"""Shapes of DeepSeek-V3 (Hugging Face `DeepseekV3ForCausalLM`, without the multi-token prediction layer): multi-head
latent attention, a few dense layers, then shared and routed experts. The router's bias is float32 in any case."""

from reflux_weightplan.families.base import Config, Model, ModelTensor, Part, ends, gated, norms


def model(config: Config) -> Model:
    """All tensors. Raises LayoutRefused naming a field that is missing."""
    layers, experts = config.size("num_hidden_layers"), config.size("n_routed_experts")
    table, behind = ends(config)
    tensors = [table]
    for layer in range(layers):
        tensors += _latent_attention(config, layer)
        tensors += _feed_forward(config, layer, experts)
        tensors += norms(config, layer)
    return Model(config.family, (*tensors, *behind), layers, experts)


def _latent_attention(config: Config, layer: int) -> list[ModelTensor]:
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    plain, rotary, value = (config.size(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    query_rank, shared_rank = config.size("q_lora_rank"), config.size("kv_lora_rank")
    shapes: tuple[tuple[str, tuple[int, ...], Part, int], ...] = (
        ("q_a_proj", (query_rank, hidden), "replicated", 1),
        ("q_a_layernorm", (query_rank,), "replicated", 1),
        ("q_b_proj", (heads * (plain + rotary), query_rank), "query", plain + rotary),
        ("kv_a_proj_with_mqa", (shared_rank + rotary, hidden), "replicated", 1),
        ("kv_a_layernorm", (shared_rank,), "replicated", 1),
        ("kv_b_proj", (heads * (plain + value), shared_rank), "query", plain + value),
        ("o_proj", (hidden, heads * value), "row", value),
    )
    prefix = f"model.layers.{layer}.self_attn."
    return [
        ModelTensor(f"{prefix}{name}.weight", shape, config.dtype, layer, part, head)
        for name, shape, part, head in shapes
    ]


def _feed_forward(config: Config, layer: int, experts: int) -> list[ModelTensor]:
    prefix = f"model.layers.{layer}.mlp."
    if layer < config.count("first_k_dense_replace", 0):
        return gated(config, layer, prefix, config.size("intermediate_size"))
    width, hidden = config.size("moe_intermediate_size"), config.size("hidden_size")
    bias = f"{prefix}gate.e_score_correction_bias"
    found = [
        ModelTensor(f"{prefix}gate.weight", (experts, hidden), config.dtype, layer, "replicated"),
        ModelTensor(bias, (experts,), "float32", layer, "replicated"),
    ]
    shared = config.count("n_shared_experts", 0)
    if shared:
        found += gated(config, layer, f"{prefix}shared_experts.", width * shared)
    for expert in range(experts):
        found += gated(config, layer, f"{prefix}experts.{expert}.", width, expert)
    return found
