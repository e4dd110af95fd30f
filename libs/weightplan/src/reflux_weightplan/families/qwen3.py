"""Shapes of Qwen3 and Qwen3-MoE (Hugging Face `Qwen3ForCausalLM`, `Qwen3MoeForCausalLM`): attention with norms of its
heads; a sparse layer has a router and experts instead of the feed-forward part."""

from reflux_weightplan.families.base import Config, Model, ModelTensor, attention, ends, gated, norms


def dense(config: Config) -> Model:
    """All tensors of a dense one. Raises LayoutRefused naming a field that is missing."""
    return _model(config, experts=0)


def sparse(config: Config) -> Model:
    """All tensors of one with experts. Raises LayoutRefused naming a field that is missing."""
    return _model(config, config.size("num_experts"))


def _model(config: Config, experts: int) -> Model:
    layers = config.size("num_hidden_layers")
    table, behind = ends(config)
    tensors = [table]
    for layer in range(layers):
        tensors += attention(config, layer, head_norms=True)
        tensors += _feed_forward(config, layer, experts)
        tensors += norms(config, layer)
    return Model(config.family, (*tensors, *behind), layers, experts)


def _feed_forward(config: Config, layer: int, experts: int) -> list[ModelTensor]:
    prefix = f"model.layers.{layer}.mlp."
    # The reference's rule: sparse is every `decoder_sparse_step`-th layer, counted from 1, that is not listed as dense.
    step = config.size("decoder_sparse_step", 1)
    if not experts or layer in config.numbers("mlp_only_layers") or (layer + 1) % step:
        return gated(config, layer, prefix, config.size("intermediate_size"))
    shape = (experts, config.size("hidden_size"))
    found = [ModelTensor(f"{prefix}gate.weight", shape, config.dtype, layer, "replicated")]
    width = config.size("moe_intermediate_size")
    for expert in range(experts):
        found += gated(config, layer, f"{prefix}experts.{expert}.", width, expert)
    return found
