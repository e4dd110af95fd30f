"""The state of a LoRA adapter as named tensors, to and from an object of the store; the adapter's name is not in it.

    param/<factor>  adam_m/<factor>  adam_v/<factor>  gradient/<factor>   float32
    adapter/facts (JSON)  adapter/journal (JSON), both as bytes

A state of weights only has `param` and `adapter/facts`.
"""

import json
from typing import Any, cast

from reflux_model.config import ModelConfig
from reflux_model.lora import LoraSpec, TargetGroup, initial_factors
from reflux_storage.restore import TensorIndex, read_index
from reflux_storage.stores.base import ObjectStore
from reflux_storage.stream import TensorSource
from reflux_trainer.learner.journal import Journal
from reflux_trainer.learner.lora import KEPT_ANSWERS, LoraAdapter
from reflux_trainer.learner.state import (
    StateMismatchError,
    bytes_source,
    flat_parts,
    read_flat,
    read_small,
    sources_of,
)

_STATE_VERSION = 1
_FACTS, _JOURNAL = "adapter/facts", "adapter/journal"


def capture(adapter: LoraAdapter, *, weights_only: bool) -> list[TensorSource]:
    """A copy of the state, to be written while the adapter learns on."""
    parts = flat_parts(adapter)
    if weights_only:
        parts = {"param": parts["param"]}
    sources = [source for part, flat in parts.items() for source in sources_of(adapter, part, flat.clone())]
    facts = {
        "state_version": _STATE_VERSION,
        "rank": adapter.spec.rank,
        "groups": adapter.spec.groups,
        "version": adapter.version,
        "refused_steps": adapter.refused_steps,
        "poisoned": adapter.poisoned,
        "moments": adapter.optimizer.steps if "adam_m" in parts else 0,
        "weights_only": weights_only,
    }
    sources.append(bytes_source(_FACTS, json.dumps(facts).encode()))
    if not weights_only:
        sources.append(bytes_source(_JOURNAL, adapter.journal.dump()))
    return sources


def restore_adapter(store: ObjectStore, key: str, config: ModelConfig, *, weights_only: bool) -> LoraAdapter:
    """Reads a state for a base of the shape `config`; with `weights_only` moments, gradient and answers stay behind.

    Raises `StateMismatchError` for what fits no adapter of this base, and the errors of reflux_storage.
    """
    index = read_index(store, key)
    facts = _facts(store, index)
    if not weights_only and facts["weights_only"]:
        raise StateMismatchError(f"{key} holds the weights of an adapter only; load it without its optimizer")
    spec = LoraSpec(rank=int(facts["rank"]), groups=cast(tuple[TargetGroup, ...], tuple(facts["groups"])))
    adapter = LoraAdapter(spec, initial_factors(config, spec, seed=0))
    adapter.version = int(facts["version"])
    if not weights_only:
        raw = read_small(store, index, (_JOURNAL,), "an adapter")
        adapter.journal = Journal.load(bytes(raw[_JOURNAL]), KEPT_ANSWERS)
        adapter.refused_steps, adapter.poisoned = int(facts["refused_steps"]), bool(facts["poisoned"])
        adapter.accumulated = any(name.startswith("gradient/") for name in index.spans)
        if facts["moments"]:
            adapter.optimizer.begin(adapter.flat)
            adapter.optimizer.steps = int(facts["moments"])
    read_flat(store, index, adapter, flat_parts(adapter))
    return adapter


def _facts(store: ObjectStore, index: TensorIndex) -> dict[str, Any]:
    raw = read_small(store, index, (_FACTS,), "an adapter")
    facts = json.loads(bytes(raw[_FACTS]))
    if facts["state_version"] != _STATE_VERSION:
        raise StateMismatchError(f"{index.key} has state version {facts['state_version']}, known is {_STATE_VERSION}")
    return facts
