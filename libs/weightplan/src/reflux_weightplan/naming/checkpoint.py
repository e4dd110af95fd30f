"""Checkpoints of Megatron-Core ranks to and from whole tensors under Hugging Face names, bit for bit.

Shards of tensor, pipeline and expert parallelism follow a symbolic layout (`families.layouts.parallel` with
`fused="megatron"`); a rank's state has Megatron's names, its fused tensors, and a padded vocabulary.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from reflux_weightplan.errors import LayoutRefused
from reflux_weightplan.families.base import Model, ModelTensor
from reflux_weightplan.naming.fused import merge, split
from reflux_weightplan.naming.megatron import Names
from reflux_weightplan.sides import Side
from reflux_weightplan.spec import SpecLayout

State = Mapping[str, np.ndarray]


def to_hugging_face(model: Model, layout: SpecLayout, states: Sequence[State]) -> dict[str, np.ndarray]:
    """Whole tensors out of the states of all ranks, in the layout's order.

    Raises:
        LayoutRefused: a rank lacks a tensor, has one of another shape, or no rank has a part of one.
    """
    if len(states) != layout.mesh.ranks:
        raise LayoutRefused(f"{len(states)} states for a layout of {layout.mesh.ranks} ranks")
    shares = _Shares(model, layout)
    whole: dict[str, np.ndarray] = {}
    for rank, state in enumerate(states):
        for name, members in shares.names(rank).items():
            if name not in state:
                raise LayoutRefused(f"the state of rank {rank} lacks {name}")
            for tensor in members.values():
                part = split(_unpadded(state[name], members, shares, rank), members)[tensor.name]
                box = shares.box(tensor, rank)
                if tuple(part.shape) != tuple(each.stop - each.start for each in box):
                    raise LayoutRefused(f"{name} of rank {rank} holds {list(part.shape)} of {tensor.name}, not {box}")
                target = whole.setdefault(tensor.name, np.empty(tensor.shape, part.dtype))
                target[box] = part
    return {tensor.name: whole[tensor.name] for tensor in model.tensors}


def from_hugging_face(
    model: Model, layout: SpecLayout, weights: Mapping[str, np.ndarray], vocabulary_rows: int
) -> list[dict[str, np.ndarray]]:
    """The inverse: the state of every rank; `vocabulary_rows` are those of a rank's padded tables, zeros behind."""
    shares = _Shares(model, layout)
    states = []
    for rank in range(layout.mesh.ranks):
        state: dict[str, np.ndarray] = {}
        for name, members in shares.names(rank).items():
            parts = {each.name: weights[each.name][shares.box(each, rank)] for each in members.values()}
            state[name] = merge(parts, members)
            if any(each.part == "vocabulary" for each in members.values()):
                padding = np.zeros((vocabulary_rows - len(state[name]), *state[name].shape[1:]), state[name].dtype)
                state[name] = np.concatenate([state[name], padding])
        states.append(state)
    return states


class _Shares:
    """Which part of which tensor a rank holds."""

    def __init__(self, model: Model, layout: SpecLayout) -> None:
        self._model, self._side = model, Side(layout)
        self._index = {tensor.name: index for index, tensor in enumerate(layout.tensors)}

    def box(self, tensor: ModelTensor, rank: int) -> tuple[slice, ...]:
        """The rank's part of a tensor that it holds."""
        kind = int(self._side.kind_T[self._index[tensor.name]])
        box = self._side.form_of_kind(kind).boxes[self._side.box_KR[kind, rank]]
        return tuple(slice(int(low), int(high)) for low, high in box)

    def names(self, rank: int) -> dict[str, dict[str, ModelTensor]]:
        """The rank's Megatron tensors with their members; layers and experts count from its first."""
        kinds = self._side.kind_T
        held = [each for each in self._model.tensors if self._side.box_KR[kinds[self._index[each.name]], rank] >= 0]
        layers = [each.layer for each in held if 0 <= each.layer < self._model.layers]
        experts = [each.expert for each in held if each.expert >= 0]
        return Names(self._model, min(layers, default=0), min(experts, default=0)).tensors(held)


def _unpadded(array: np.ndarray, members: Mapping[str, ModelTensor], shares: _Shares, rank: int) -> np.ndarray:
    """A table without the rows that pad the vocabulary; other tensors as they are."""
    (first, *_) = members.values()
    if first.part != "vocabulary":
        return array
    rows = shares.box(first, rank)[0]
    return array[: rows.stop - rows.start]
