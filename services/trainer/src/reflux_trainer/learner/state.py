"""The learner's whole state as named tensors, to and from an object of the store, bit for bit.

    param/<name>  adam_m/<name>  adam_v/<name>  gradient/<name>  reference/<name>   float32, Hugging Face names
    critic_param/<name>  critic_adam_m/<name>  critic_adam_v/<name>  critic_gradient/<name>   a value head's
    learner/counters (int64)  learner/rng  learner/journal (bytes)

Moments are there after the first step, gradients only between ForwardBackward and OptimStep, a reference from the first
loss on that asks for it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from reflux_model.config import ModelConfig
from reflux_model.shapes import parameter_shapes
from reflux_storage.restore import TensorIndex, read_index, read_tensors
from reflux_storage.stores import open_store
from reflux_storage.stores.base import ObjectStore
from reflux_storage.stores.options import S3Options
from reflux_storage.stream import ObjectReceipt, TensorSource, write_tensors
from reflux_trainer.learner.core import Learner
from reflux_trainer.learner.journal import Journal
from reflux_trainer.learner.numerics import FLOAT32, Numerics
from reflux_trainer.learner.trainable import Trainable

L = TypeVar("L")
_STATE_VERSION = 2


class StateMismatchError(ValueError):
    """The stored state does not belong to this model."""


@dataclass(frozen=True)
class StoreAddress:
    """Where an object store is; processes can tell each other."""

    url: str
    s3: S3Options | None = field(default=None, repr=False)

    def open(self) -> ObjectStore:
        """Errors as in `open_store`."""
        return open_store(self.url, self.s3)


@dataclass(frozen=True)
class Restored(Generic[L]):
    """What a stored state holds besides the model."""

    learner: L
    journal: Journal
    epoch: int
    """Weight epoch of the broker when the state was saved."""


class StateCapture:
    """Copies of a learner's state that stay still while training goes on; the memory is reused by the next copy."""

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}
        self._sources: list[TensorSource] = []

    def take(self, learner: Learner, journal: Journal, epoch: int) -> None:
        """Copies the state; training stands still for this long."""
        sources = []
        for owner, parts in _owned_parts(learner):
            for part, flat in parts.items():
                if part not in self._copies:
                    self._copies[part] = torch.empty_like(flat)
                sources += sources_of(owner, part, self._copies[part].copy_(flat))
        sources += [source(name, tensor.clone()) for name, tensor in _small(learner, journal, epoch)]
        self._sources = sources

    def write(self, store: ObjectStore, key: str) -> ObjectReceipt:
        """Streams the copy; errors as in `reflux_storage.stream.write_tensors`."""
        return write_tensors(store, key, self._sources)


def restore(
    store: ObjectStore, key: str, config: ModelConfig, seed: int, numerics: Numerics = FLOAT32
) -> Restored[Learner]:
    """Reads a state that belongs to `config`.

    Raises `StateMismatchError`, and the errors of reflux_storage for missing or damaged objects.
    """
    index = read_index(store, key)
    small = _read_small(store, index)
    counters = np.frombuffer(small["learner/counters"], np.int64)
    if int(counters[0]) != _STATE_VERSION:
        raise StateMismatchError(f"{key} has state version {counters[0]}, this learner reads {_STATE_VERSION}")
    blank = {name: torch.zeros(shape) for name, shape in parameter_shapes(config).items()}
    learner = Learner(config, blank, seed, numerics)
    journal = Journal.load(bytes(small["learner/journal"]))
    learner.version, learner.refused_steps, learner.poisoned = int(counters[1]), int(counters[3]), bool(counters[4])
    learner.generator.set_state(torch.frombuffer(small["learner/rng"], dtype=torch.uint8))
    if int(counters[5]):
        learner.optimizer.begin(learner.flat)
        learner.optimizer.steps = int(counters[5])
    learner.accumulated = any(name.startswith("gradient/") for name in index.spans)
    if any(name.startswith("reference/") for name in index.spans):
        learner.keep_reference()
    if critic_steps := int(counters[6]):
        critic = learner.keep_critic()
        critic.accumulated = any(name.startswith("critic_gradient/") for name in index.spans)
        if critic_steps > 1:
            critic.optimizer.begin(critic.flat)
            critic.optimizer.steps = critic_steps - 1
    for owner, parts in _owned_parts(learner):
        read_flat(store, index, owner, parts)
    return Restored(learner, journal, int(counters[2]))


def flat_parts(trainable: Trainable) -> dict[str, Tensor]:
    """The flat buffers that make up its state."""
    parts = {"param": trainable.flat}
    mean, square = trainable.optimizer.mean, trainable.optimizer.square
    if mean is not None and square is not None:
        parts |= {"adam_m": mean, "adam_v": square}
    if trainable.accumulated:
        parts["gradient"] = trainable.gradient
    if trainable.reference is not None:
        parts["reference"] = trainable.reference
    return parts


def _owned_parts(learner: Learner) -> list[tuple[Trainable, dict[str, Tensor]]]:
    """The model's flat buffers and its critic's, by the names that they are stored under."""
    owned: list[tuple[Trainable, dict[str, Tensor]]] = [(learner, flat_parts(learner))]
    if learner.critic is not None:
        named = {f"critic_{part}": flat for part, flat in flat_parts(learner.critic).items()}
        owned.append((learner.critic, named))
    return owned


def sources_of(trainable: Trainable, part: str, flat: Tensor) -> list[TensorSource]:
    """The tensors of a flat buffer, to be written under `part`; the buffer must stay as it is until then."""
    return [source(f"{part}/{name}", view) for name, view in trainable.views(flat).items()]


def bytes_source(name: str, content: bytes) -> TensorSource:
    """A tensor of bytes."""
    return source(name, torch.frombuffer(bytearray(content), dtype=torch.uint8))


def _small(learner: Learner, journal: Journal, epoch: int) -> Iterator[tuple[str, Tensor]]:
    numbers = [
        _STATE_VERSION,
        learner.version,
        epoch,
        learner.refused_steps,
        int(learner.poisoned),
        learner.optimizer.steps,
        learner.critic.optimizer.steps + 1 if learner.critic is not None else 0,
    ]
    yield "learner/counters", torch.tensor(numbers)
    yield "learner/rng", learner.generator.get_state()
    yield "learner/journal", torch.frombuffer(bytearray(journal.dump()), dtype=torch.uint8)


def _read_small(store: ObjectStore, index: TensorIndex) -> dict[str, bytearray]:
    return read_small(store, index, ("learner/counters", "learner/rng", "learner/journal"), "a learner")


def read_small(store: ObjectStore, index: TensorIndex, names: Sequence[str], whose: str) -> dict[str, bytearray]:
    """Named tensors as bytes. Raises `StateMismatchError`, that it is not `whose` state, when one is missing."""
    if missing := sorted(set(names) - set(index.spans)):
        raise StateMismatchError(f"{index.key} is not {whose}'s state: {', '.join(missing)} is missing")
    small = {name: bytearray(index.spans[name].spec.size_bytes) for name in names}
    read_tensors(store, index, {name: memoryview(raw) for name, raw in small.items()})
    return small


def read_flat(store: ObjectStore, index: TensorIndex, trainable: Trainable, parts: Mapping[str, Tensor]) -> None:
    """Fills flat buffers. Raises `StateMismatchError` naming a tensor that is missing or of another shape."""
    targets: dict[str, memoryview] = {}
    for part, flat in parts.items():
        for name, view in trainable.views(flat).items():
            key = f"{part}/{name}"
            span = index.spans.get(key)
            if span is None or span.spec.shape != tuple(view.shape) or span.spec.dtype != "F32":
                found = "missing" if span is None else f"{span.spec.dtype}{list(span.spec.shape)}"
                raise StateMismatchError(f"tensor {key} of {index.key} is {found}, expected F32{list(view.shape)}")
            targets[key] = view_of(view)
    read_tensors(store, index, targets)


_DTYPES: Mapping[torch.dtype, str] = {torch.float32: "F32", torch.int64: "I64", torch.uint8: "U8"}


def source(name: str, tensor: Tensor) -> TensorSource:
    """A tensor as something to write."""
    return TensorSource(name, _DTYPES[tensor.dtype], tuple(tensor.shape), view_of(tensor.contiguous()))


def view_of(tensor: Tensor) -> memoryview:
    """A tensor's bytes, to read or to write."""
    return memoryview(tensor.numpy())  # pyright: ignore[reportArgumentType]  (arrays do offer their buffer)
