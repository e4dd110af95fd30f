"""Shapes of Llama (Hugging Face `LlamaForCausalLM`; SmolLM2 and Llama 3 are of this family)."""

from reflux_weightplan.families.base import Config, Model, attention, ends, gated, norms


def model(config: Config) -> Model:
    """All tensors. Raises LayoutRefused naming a field that is missing."""
    layers, width = config.size("num_hidden_layers"), config.size("intermediate_size")
    table, behind = ends(config)
    tensors = [table]
    for layer in range(layers):
        tensors += attention(config, layer, head_norms=False)
        tensors += gated(config, layer, f"model.layers.{layer}.mlp.", width)
        tensors += norms(config, layer)
    return Model(config.family, (*tensors, *behind), layers)
