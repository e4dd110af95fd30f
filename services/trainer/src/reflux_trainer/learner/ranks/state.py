"""The state of a sharded model: one object per rank, which that rank writes and reads itself.

param/<name>  adam_m/<name>  adam_v/<name>  gradient/<name>  reference/<name>   the rank's slices
rank/facts (JSON as bytes)  and on rank 0 learner/journal
"""

import json
from typing import Any

import torch
from torch import Tensor

from reflux_storage.restore import TensorIndex, read_index, read_tensors
from reflux_storage.stream import TensorSource
from reflux_trainer.learner.journal import Journal
from reflux_trainer.learner.ranks.member import ShardMember
from reflux_trainer.learner.state import StateMismatchError, StoreAddress, bytes_source, read_small, source, view_of

_STATE_VERSION = 1
_FACTS, _JOURNAL = "rank/facts", "learner/journal"


def key_of_rank(key: str, rank: int) -> str:
    """The key of a rank's object, from that of rank 0's (`learner-00000.safetensors`)."""
    folder, _, name = key.rpartition("/")
    return f"{folder}/{name.replace('00000', f'{rank:05d}')}"


def captured(member: ShardMember) -> list[TensorSource]:
    """A copy of a rank's state."""
    sources = [source(name, tensor.detach().clone()) for name, tensor in member.tensors().items()]
    facts = {
        "state_version": _STATE_VERSION,
        "ranks": member.ranks,
        "version": member.version,
        "refused_steps": member.refused_steps,
        "poisoned": member.poisoned,
        "accumulated": member.accumulated,
        "steps": {name: optimizer.steps for name, optimizer in member.optimizers.items()},
    }
    return [*sources, bytes_source(_FACTS, json.dumps(facts).encode())]


def of_rank_zero(journal: Journal, epoch: int) -> list[TensorSource]:
    """What only rank 0 knows."""
    content = {"epoch": epoch, "journal": journal.dump().decode()}
    return [bytes_source(_JOURNAL, json.dumps(content).encode())]


def read_rank_zero(address: StoreAddress, key: str) -> tuple[Journal, int]:
    """Journal and weight epoch."""
    store = address.open()
    content = json.loads(bytes(read_small(store, read_index(store, key), (_JOURNAL,), "rank 0")[_JOURNAL]))
    return Journal.load(content["journal"].encode()), int(content["epoch"])


def read_member(address: StoreAddress, key: str, member: ShardMember) -> None:
    """Fills a fresh member. Raises `StateMismatchError` for a state of another shape or another number of ranks."""
    store, key = address.open(), key_of_rank(key, member.rank)
    index = read_index(store, key)
    facts: dict[str, Any] = json.loads(bytes(read_small(store, index, (_FACTS,), "a rank")[_FACTS]))
    if (facts["state_version"], facts["ranks"]) != (_STATE_VERSION, member.ranks):
        raise StateMismatchError(
            f"{key} is state version {facts['state_version']} of {facts['ranks']} ranks; this learner has "
            f"{member.ranks} and reads version {_STATE_VERSION}"
        )
    member.version, member.refused_steps = int(facts["version"]), int(facts["refused_steps"])
    member.poisoned, member.accumulated = bool(facts["poisoned"]), bool(facts["accumulated"])
    for name, steps in facts["steps"].items():
        if steps:
            member.optimizers[name].begin(member.shards[name])
            member.optimizers[name].steps = steps
    if any(name.startswith("reference/") for name in index.spans):
        member.keep_reference()
    gradients = {
        name: torch.zeros_like(shard) for name, shard in member.shards.items() if f"gradient/{name}" in index.spans
    }
    _fill(store, index, member.tensors() | {f"gradient/{name}": tensor for name, tensor in gradients.items()})
    member.accumulate(gradients)


def _fill(store: Any, index: TensorIndex, targets: dict[str, Tensor]) -> None:
    for name, tensor in targets.items():
        span = index.spans.get(name)
        if span is None or span.spec.shape != tuple(tensor.shape):
            found = "missing" if span is None else str(list(span.spec.shape))
            raise StateMismatchError(f"tensor {name} of {index.key} is {found}, expected {list(tensor.shape)}")
    read_tensors(store, index, {name: view_of(tensor) for name, tensor in targets.items() if tensor.numel()})
