"""Owns what a model family tells of its tensors: name, shape, type, and what parallelism may do to each."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from reflux_weightplan.errors import LayoutRefused

Part = Literal["vocabulary", "query", "key", "value", "column", "row", "replicated"]
"""What tensor parallelism does to a tensor: vocabulary and column are cut along the output (dimension 0), row along the
input (dimension 1), query, key and value along the output in whole heads (Megatron-LM, Shoeybi et al., 2019)."""


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """One tensor by its Hugging Face name.

    `head` is the number of rows that stay together under tensor parallelism. `expert` is the number of its expert, -1
    for a tensor of all. `fused` names the tensor that engines make of it and its neighbours, in `fused_order`;
    `group_rows` are its rows per key-value group, by which Megatron-Core interleaves q, k and v.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    layer: int
    part: Part
    head: int = 1
    expert: int = -1
    fused: str = ""
    fused_order: int = 0
    group_rows: int = 0


@dataclass(frozen=True)
class Model:
    """All tensors of a model in layer order; `experts` is the number of routed experts per layer, 0 for a dense one."""

    family: str
    tensors: tuple[ModelTensor, ...]
    layers: int
    experts: int = 0


class Config:
    """A Hugging Face configuration; a field that is missing or not a positive whole number is named in the error."""

    def __init__(self, family: str, values: Mapping[str, Any]) -> None:
        self.family, self._values = family, values

    def size(self, name: str, default: int | None = None) -> int:
        """A positive size. Raises LayoutRefused."""
        value = self._values.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise LayoutRefused(f"config of {self.family}: {name} is {value!r}, expected a whole number above 0")
        return value

    def count(self, name: str, default: int) -> int:
        """A whole number that may be 0. Raises LayoutRefused."""
        value = self._values.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise LayoutRefused(f"config of {self.family}: {name} is {value!r}, expected a whole number")
        return value

    def flag(self, name: str) -> bool:
        """A switch; off when it is missing."""
        return bool(self._values.get(name, False))

    def numbers(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers; empty when it is missing."""
        return tuple(int(value) for value in self._values.get(name) or ())

    @property
    def dtype(self) -> str:
        """Type of the weights; bfloat16 when the configuration does not say."""
        value = self._values.get("torch_dtype") or self._values.get("dtype") or "bfloat16"
        return str(value).removeprefix("torch.")


def ends(config: Config) -> tuple[ModelTensor, list[ModelTensor]]:
    """The embedding in front of the layers, and what comes behind them."""
    hidden, vocabulary, layers = config.size("hidden_size"), config.size("vocab_size"), config.size("num_hidden_layers")
    table = ModelTensor("model.embed_tokens.weight", (vocabulary, hidden), config.dtype, -1, "vocabulary")
    behind = [ModelTensor("model.norm.weight", (hidden,), config.dtype, layers, "replicated")]
    if not config.flag("tie_word_embeddings"):
        behind.append(ModelTensor("lm_head.weight", (vocabulary, hidden), config.dtype, layers, "vocabulary"))
    return table, behind


def norms(config: Config, layer: int) -> list[ModelTensor]:
    """The two norms of a layer."""
    shape = (config.size("hidden_size"),)
    names = ("input_layernorm", "post_attention_layernorm")
    return [
        ModelTensor(f"model.layers.{layer}.{name}.weight", shape, config.dtype, layer, "replicated") for name in names
    ]


def attention(config: Config, layer: int, *, head_norms: bool) -> list[ModelTensor]:
    """Grouped-query attention: q, k and v as one `qkv`, the output projection, norms of heads on request."""
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    head = config.size("head_dim", hidden // heads)
    shared = config.size("num_key_value_heads", heads)
    if heads % shared:
        raise LayoutRefused(f"config of {config.family}: {heads} heads do not divide into {shared} groups")
    prefix, dtype = f"model.layers.{layer}.self_attn.", config.dtype
    found: list[ModelTensor] = []
    parts: tuple[tuple[str, Part, int], ...] = (("q", "query", heads), ("k", "key", shared), ("v", "value", shared))
    for order, (letter, part, count) in enumerate(parts):
        rows, group = count * head, count // shared * head
        shapes = {"weight": (rows, hidden)} | ({"bias": (rows,)} if config.flag("attention_bias") else {})
        for kind, shape in shapes.items():
            name, fused = f"{prefix}{letter}_proj.{kind}", f"{prefix}qkv_proj.{kind}"
            found.append(ModelTensor(name, shape, dtype, layer, part, head, -1, fused, order, group))
    found.append(ModelTensor(f"{prefix}o_proj.weight", (hidden, heads * head), dtype, layer, "row", head))
    if head_norms:
        found += [
            ModelTensor(f"{prefix}{letter}_norm.weight", (head,), dtype, layer, "replicated") for letter in ("q", "k")
        ]
    return found


def gated(config: Config, layer: int, prefix: str, width: int, expert: int = -1) -> list[ModelTensor]:
    """A gated feed-forward part: gate and up as one `gate_up`, and down."""
    hidden, dtype = config.size("hidden_size"), config.dtype
    fused = f"{prefix}gate_up_proj.weight"
    return [
        ModelTensor(f"{prefix}gate_proj.weight", (width, hidden), dtype, layer, "column", 1, expert, fused, 0),
        ModelTensor(f"{prefix}up_proj.weight", (width, hidden), dtype, layer, "column", 1, expert, fused, 1),
        ModelTensor(f"{prefix}down_proj.weight", (hidden, width), dtype, layer, "row", 1, expert),
    ]
