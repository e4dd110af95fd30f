"""Names of Megatron-Core's GPT model (Transformer Engine layers, `TEGroupedMLP` experts) to and from Hugging Face's.

Source of the names: megatron/core/models/gpt/gpt_layer_specs.py and gpt_model.py of Megatron-Core 0.12. Layers count
from the first one of a pipeline stage, experts from the first one of a rank. Layer norms that Transformer Engine fuses
belong to the linear behind them.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from reflux_weightplan.errors import LayoutRefused
from reflux_weightplan.families.base import Model, ModelTensor

_ENDS = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
    "lm_head.weight": "output_layer.weight",
}
_ATTENTION = {
    "o_proj.weight": "linear_proj.weight",
    "q_norm.weight": "q_layernorm.weight",
    "k_norm.weight": "k_layernorm.weight",
    "q_a_proj.weight": "linear_q_down_proj.weight",
    "q_a_layernorm.weight": "linear_q_up_proj.layer_norm_weight",
    "q_b_proj.weight": "linear_q_up_proj.weight",
    "kv_a_proj_with_mqa.weight": "linear_kv_down_proj.weight",
    "kv_a_layernorm.weight": "linear_kv_up_proj.layer_norm_weight",
    "kv_b_proj.weight": "linear_kv_up_proj.weight",
}
_ROUTER = {"mlp.gate.weight": "mlp.router.weight", "mlp.gate.e_score_correction_bias": "mlp.router.expert_bias"}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_HEADS = re.compile(r"self_attn\.([qkv])_proj\.(weight|bias)")
_FEED_FORWARD = re.compile(r"mlp\.(?:(shared_experts)\.|experts\.(\d+)\.)?(gate|up|down)_proj\.weight")


@dataclass(frozen=True, slots=True)
class Slot:
    """A Megatron tensor and the member of it that a Hugging Face tensor is: "q", "k", "v", "gate", "up", or "" for all
    of it."""

    name: str
    member: str = ""


class Names:
    """The names of one rank: `first_layer` of its pipeline stage, `first_expert` of its experts."""

    def __init__(self, model: Model, first_layer: int = 0, first_expert: int = 0) -> None:
        self._latent = any(".kv_a_proj_with_mqa." in tensor.name for tensor in model.tensors)
        self._sparse = {tensor.layer for tensor in model.tensors if tensor.expert >= 0}
        self._first_layer, self._first_expert = first_layer, first_expert

    def slot(self, name: str) -> Slot:
        """Where Megatron keeps a Hugging Face tensor. Raises LayoutRefused for a name of no known family."""
        if name in _ENDS:
            return Slot(_ENDS[name])
        found = _LAYER.fullmatch(name)
        if found is None:
            raise LayoutRefused(f"there is no Megatron name for {name}")
        layer, rest = int(found[1]), found[2]
        slot = self._in_layer(layer, rest)
        if slot is None:
            raise LayoutRefused(f"there is no Megatron name for {name}")
        return Slot(f"decoder.layers.{layer - self._first_layer}.{slot.name}", slot.member)

    def tensors(self, held: Iterable[ModelTensor]) -> dict[str, dict[str, ModelTensor]]:
        """Megatron tensors of a rank that holds (parts of) some tensors: name -> member -> tensor, in fused order."""
        found: dict[str, dict[str, ModelTensor]] = {}
        for tensor in sorted(held, key=lambda each: each.fused_order):
            slot = self.slot(tensor.name)
            found.setdefault(slot.name, {})[slot.member] = tensor
        return found

    def hugging_face(self, held: Iterable[ModelTensor]) -> Mapping[Slot, str]:
        """The way back: what each member of each Megatron tensor of a rank is called."""
        return {self.slot(tensor.name): tensor.name for tensor in held}

    def _in_layer(self, layer: int, rest: str) -> Slot | None:
        if rest == "input_layernorm.weight":
            return Slot(rest if self._latent else "self_attention.linear_qkv.layer_norm_weight")
        if rest == "post_attention_layernorm.weight":
            return Slot("pre_mlp_layernorm.weight" if layer in self._sparse else "mlp.linear_fc1.layer_norm_weight")
        if rest in _ROUTER:
            return Slot(_ROUTER[rest])
        if heads := _HEADS.fullmatch(rest):
            return Slot(f"self_attention.linear_qkv.{heads[2]}", heads[1])
        if rest.startswith("self_attn.") and rest.removeprefix("self_attn.") in _ATTENTION:
            return Slot(f"self_attention.{_ATTENTION[rest.removeprefix('self_attn.')]}")
        if part := _FEED_FORWARD.fullmatch(rest):
            return self._feed_forward(part)
        return None

    def _feed_forward(self, part: re.Match[str]) -> Slot:
        shared, expert, kind = part.groups()
        member = "" if kind == "down" else kind
        linear = "linear_fc2" if kind == "down" else "linear_fc1"
        if expert is not None:
            return Slot(f"mlp.experts.{linear}.weight{int(expert) - self._first_expert}", member)
        return Slot(f"mlp.{'shared_experts.' if shared else ''}{linear}.weight", member)
