"""Finds the family of a Hugging Face configuration by its `model_type`."""

from collections.abc import Callable, Mapping
from typing import Any

from reflux_weightplan.errors import LayoutRefused
from reflux_weightplan.families import deepseek_v3, llama, qwen3
from reflux_weightplan.families.base import Config, Model

FAMILIES: dict[str, Callable[[Config], Model]] = {
    "llama": llama.model,
    "qwen3": qwen3.dense,
    "qwen3_moe": qwen3.sparse,
    "deepseek_v3": deepseek_v3.model,
}


def model_of(config: Mapping[str, Any]) -> Model:
    """All tensors of the model that a `config.json` describes. Raises LayoutRefused for an unknown family or field."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise LayoutRefused(f"model_type is {family!r}; known are {', '.join(FAMILIES)}")
    return FAMILIES[family](Config(family, config))
