"""Memory that a run will need, predicted from its run file: pure arithmetic on shapes, nothing is loaded.

Parts that do not depend on the run are measured (docs/training.md has the figures and how well the sums agree with
processes that were run).
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from reflux_runs.config import RunConfig
from reflux_runs.errors import Refusal

FRESH_VOCABULARY = 1024
"""Words of a fresh model, at most: the examples' tasks have a few hundred."""
_PROCESS_BYTES = {"learner": 420 << 20, "engine": 380 << 20, "rollout": 150 << 20}
"""A process before it holds a model: interpreter, torch where it has it, clients."""
_MICRO_BATCH_TOKENS = 1 << 11
"""Tokens of one pass of the learner (`learner/batching.py`)."""
_KEPT_LOGITS_BYTES, _CHUNK_BYTES = 64 << 20, 3 * (32 << 20)
"""Probabilities that wait for the backward pass, and arrays of one chunk of logits (`reflux_model.scoring`)."""
_MAX_ROWS, _KV_BYTES, _KEPT_PROMPTS_BYTES = 256, 2 << 30, 2 * (256 << 20)
"""An engine's defaults: sequences that decode, their keys and values, computed prompts that are kept."""
_TYPE_BYTES = {"float32": 4, "bfloat16": 2}
_DELTA_SHARE = 0.25
"""Room for a difference in each arena, in parts of the weights (`learner/publish.py`)."""


@dataclass(frozen=True)
class HostMemory:
    """What the nodes have that a run may be placed on."""

    largest_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Shape:
    """What of a model's config.json decides its memory; sizes are counts of elements."""

    vocabulary: int
    hidden: int
    inner: int
    layers: int
    queries: int
    """Heads times head size."""
    keys: int
    """Heads of keys times head size."""
    tied: bool

    @property
    def parameters(self) -> int:
        """Numbers that can be trained; norms are left out, they are a thousandth."""
        head = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return head + self.layers * (2 * self.hidden * (self.queries + self.keys) + 3 * self.hidden * self.inner)

    def adapter_parameters(self, rank: int, targets: str) -> int:
        """Numbers of a LoRA adapter: rank * (rows + columns) of each matrix."""
        attention = 4 * self.hidden + 2 * self.queries + 2 * self.keys
        mlp = 3 * (self.hidden + self.inner)
        named = targets.split("+")
        per_layer = attention * ("attention" in named) + mlp * ("mlp" in named)
        return rank * (self.layers * per_layer + (self.vocabulary + self.hidden) * ("unembed" in named))


@dataclass(frozen=True)
class Memory:
    """Predicted peaks in bytes, part by part, of one process of each role."""

    learner: Mapping[str, int]
    engine: Mapping[str, int]
    rollout: Mapping[str, int]
    engines: int
    rollout_workers: int

    @property
    def learner_bytes(self) -> int:
        """Peak of the learner."""
        return sum(self.learner.values())

    @property
    def engine_bytes(self) -> int:
        """Peak of one replica."""
        return sum(self.engine.values())

    @property
    def run_bytes(self) -> int:
        """Sum of the peaks of all processes of the run."""
        workers = self.rollout_workers * sum(self.rollout.values())
        return self.learner_bytes + self.engines * self.engine_bytes + workers

    def lines(self) -> list[str]:
        """One line per role for people."""
        return [
            f"memory of the learner: {told(self.learner)}",
            *([f"memory of an engine: {told(self.engine)}"] if self.engines else []),
            f"memory of the run: {gib(self.run_bytes)}",
        ]


def gib(size: int) -> str:
    """Bytes as people read them."""
    return f"{size / 2**30:.2f} GiB"


def told(parts: Mapping[str, int]) -> str:
    """A sum with its parts."""
    return f"{gib(sum(parts.values()))} ({', '.join(f'{name} {gib(size)}' for name, size in parts.items() if size)})"


def shape_of(config: RunConfig) -> Shape | None:
    """The shape that a run trains; None when its folder cannot be read, which is refused elsewhere."""
    model = config.model
    if not model.path:
        inner = model.intermediate_size
        hidden = model.hidden_size
        return Shape(FRESH_VOCABULARY, hidden, inner, model.num_layers, hidden, hidden, tied=True)
    try:
        document = json.loads((Path(model.path) / "config.json").read_text())
        heads = int(document.get("num_attention_heads", 32))
        head = int(document.get("head_dim") or document["hidden_size"] // heads)
        return Shape(
            vocabulary=int(document["vocab_size"]),
            hidden=int(document["hidden_size"]),
            inner=int(document["intermediate_size"]),
            layers=int(document["num_hidden_layers"]),
            queries=heads * head,
            keys=int(document.get("num_key_value_heads") or heads) * head,
            tied=bool(document.get("tie_word_embeddings", False)),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError):
        return None


def predict(config: RunConfig, shape: Shape, prompt_tokens: int, *, least: bool = False) -> Memory:
    """Peaks of a run whose longest prompt has `prompt_tokens`.

    `least` is what cannot be had for less: `fleet.weight_mode = "auto"` then counts one copy of the weights per
    engine, else two.
    """
    return Memory(
        learner=_learner(config, shape, prompt_tokens),
        engine=_engine(config, shape, prompt_tokens, least=least),
        rollout={"process": _PROCESS_BYTES["rollout"]},
        engines=0 if config.fleet.shared else config.fleet.engines,
        rollout_workers=config.fleet.rollout_workers,
    )


def refuse(config: RunConfig, prompt_tokens: int, host: HostMemory) -> list[Refusal]:
    """A process that no node holds, or a run that all of them together do not."""
    shape = shape_of(config)
    if shape is None:
        return []
    least = predict(config, shape, prompt_tokens, least=True)
    key, value = ("model.path", config.model.path) if config.model.path else ("model.hidden_size", shape.hidden)
    if least.learner_bytes > host.largest_bytes:
        reason = f"the learner needs about {told(least.learner)}, the largest node has {gib(host.largest_bytes)}"
        return [Refusal(key, value, reason, _less_for_the_learner(config))]
    if least.engines and least.engine_bytes > host.largest_bytes:
        reason = f"an engine needs about {told(least.engine)}, the largest node has {gib(host.largest_bytes)}"
        return [Refusal(key, value, reason, 'fleet.weight_dtype = "bfloat16", or a smaller model')]
    if least.run_bytes > host.total_bytes:
        room = host.total_bytes - (least.run_bytes - least.engines * least.engine_bytes)
        reason = (
            f"the run needs about {gib(least.run_bytes)}: a learner of {gib(least.learner_bytes)}, {least.engines} "
            f"engines of {gib(least.engine_bytes)}; all nodes together have {gib(host.total_bytes)}"
        )
        fitting = max(0, room // max(1, least.engine_bytes))
        works = f"{fitting} or less" if fitting else _less_for_the_learner(config)
        return [Refusal("fleet.engines", least.engines, reason, works)]
    return []


def _less_for_the_learner(config: RunConfig) -> str:
    ways = {
        "model.lora_rank = 16": not config.model.lora_rank,
        "model.gradient_checkpointing = true": not config.model.gradient_checkpointing,
        'fleet.weight_dtype = "bfloat16"': config.fleet.weight_dtype != "bfloat16",
    }
    return ", ".join([*(way for way, open_still in ways.items() if open_still), "or a smaller model"])


def _learner(config: RunConfig, shape: Shape, prompt_tokens: int) -> dict[str, int]:
    model, fleet, weights = config.model, config.fleet, shape.parameters
    trained = shape.adapter_parameters(model.lora_rank, model.lora_targets) if model.lora_rank else weights
    arenas = 2 * weights * _TYPE_BYTES[fleet.weight_dtype] * (1 + _DELTA_SHARE * fleet.weight_delta)
    narrow = model.compute_dtype == "bfloat16"
    return {
        "process": _PROCESS_BYTES["learner"],
        "weights": 4 * weights + 2 * weights * narrow,
        "weights with the adapter added": 4 * (weights + trained) if model.lora_rank else 0,
        "reference": 4 * weights if config.rl.kl_coefficient and not model.lora_rank else 0,
        "gradient and moments": 12 * trained,
        "two arenas to publish from": int(arenas),
        "activations": _activations(config, shape, prompt_tokens) * _TYPE_BYTES[model.compute_dtype],
        "logits": _logits(config, shape, prompt_tokens),
    }


def _fed_tokens(config: RunConfig, prompt_tokens: int) -> int:
    """Tokens of the learner's largest pass: the batch's, at most a micro-batch, at least one answer's."""
    rl, warmup = config.rl, config.warmup
    answers = rl.groups_per_step * (prompt_tokens + rl.samples_per_group * rl.max_tokens)
    examples = warmup.batch_size * (prompt_tokens + rl.max_tokens) if warmup.steps else 0
    return max(min(_MICRO_BATCH_TOKENS, max(answers, examples)), prompt_tokens + rl.max_tokens)


def _activations(config: RunConfig, shape: Shape, prompt_tokens: int) -> int:
    """Elements that wait for the backward pass: inputs of every product, norm and gate of a block."""
    block = 6 * shape.hidden + 4 * shape.queries + 5 * shape.keys + 4 * shape.inner
    kept = shape.layers * shape.hidden + block if config.model.gradient_checkpointing else shape.layers * block
    return _fed_tokens(config, prompt_tokens) * kept


def _logits(config: RunConfig, shape: Shape, prompt_tokens: int) -> int:
    whole = _fed_tokens(config, prompt_tokens) * shape.vocabulary * 4
    return min(whole, _KEPT_LOGITS_BYTES) + min(3 * whole, _CHUNK_BYTES)


def _engine(config: RunConfig, shape: Shape, prompt_tokens: int, *, least: bool) -> dict[str, int]:
    rl, fleet, size = config.rl, config.fleet, _TYPE_BYTES[config.fleet.weight_dtype]
    copies = {"swap": 2, "in_place": 1, "auto": 1 if least else 2}[fleet.weight_mode]
    per_token = 2 * shape.keys * shape.layers * size
    prompts = math.ceil((rl.max_lag + 1) * rl.groups_per_step * rl.oversampling)
    rows = min(_MAX_ROWS, math.ceil(prompts * rl.samples_per_group / max(1, fleet.engines)))
    return {
        "process": _PROCESS_BYTES["engine"],
        "weights": copies * size * shape.parameters,
        "keys and values": min(_KV_BYTES, rows * (prompt_tokens + rl.max_tokens) * per_token),
        "kept prompts": min(_KEPT_PROMPTS_BYTES, 2 * rl.steps * rl.groups_per_step * prompt_tokens * per_token),
    }
