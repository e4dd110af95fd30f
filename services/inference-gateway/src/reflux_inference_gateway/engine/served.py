"""Values of one engine: its sizes, the weights that it serves, and what it says about a prompt."""

from dataclasses import dataclass

from reflux_inference_gateway.engine.kinds import KvPolicy
from reflux_model.lora import LoraSpec
from reflux_model.parameters import Parameters


@dataclass(frozen=True, kw_only=True)
class CoreOptions:
    """Sizes and choices of one engine."""

    max_rows: int
    max_model_len: int
    kv_tokens: int
    """Positions that all rows may have together; `max_model_len` at least."""
    prefill_tokens_per_step: int = 512
    prefix_blocks: int = 0
    """Blocks of computed prompts that are kept for later ones."""
    kv_after_swap: KvPolicy = "refresh"


@dataclass(frozen=True)
class Weights:
    """One version of the parameters; the tensors may be views on an arena, which nobody writes while they are read."""

    params: Parameters
    version: int
    epoch: int
    adapter: LoraSpec | None = None
    """Of an adapter: its `params` are factors on top of the engine's own model."""


@dataclass(frozen=True)
class Scored:
    """Natural log-probs (temperature 1) of a prompt's tokens after the first, and the weights that they are of."""

    logprobs: list[float]
    version: int
    epoch: int
