"""Owns how Megatron-Core lays members of a fused tensor into memory, on the local tensors of one rank.

`linear_qkv` repeats, for every key-value group, the rows of its queries, its key and its value; `linear_fc1` holds the
gate's rows, then those of the projection up (Megatron-Core 0.12, attention.py and mlp.py).
"""

from collections.abc import Mapping

import numpy as np

from reflux_weightplan.errors import LayoutRefused
from reflux_weightplan.families.base import ModelTensor


def split(fused: np.ndarray, members: Mapping[str, ModelTensor]) -> dict[str, np.ndarray]:
    """Members of a rank's fused tensor by Hugging Face name, as contiguous arrays.

    Args:
        fused: [rows, ...] local rows of all members.
        members: member -> tensor, in fused order, as `Names.tensors` gives them.

    Raises:
        LayoutRefused: the rows are not a whole number of blocks.
    """
    if len(members) == 1:
        return {tensor.name: np.ascontiguousarray(fused) for tensor in members.values()}
    sizes = _block(members, len(fused))
    blocks = fused.reshape(-1, sum(sizes), *fused.shape[1:])
    edges = np.cumsum([0, *sizes])
    return {
        tensor.name: np.ascontiguousarray(blocks[:, low:high].reshape(-1, *fused.shape[1:]))
        for tensor, low, high in zip(members.values(), edges[:-1], edges[1:], strict=True)
    }


def merge(parts: Mapping[str, np.ndarray], members: Mapping[str, ModelTensor]) -> np.ndarray:
    """The inverse of `split`: a rank's fused tensor from its members' local parts. Raises LayoutRefused."""
    arrays = [parts[tensor.name] for tensor in members.values()]
    if len(arrays) == 1:
        return np.ascontiguousarray(arrays[0])
    sizes = _block(members, sum(map(len, arrays)))
    blocks = [array.reshape(-1, size, *array.shape[1:]) for array, size in zip(arrays, sizes, strict=True)]
    return np.concatenate(blocks, axis=1).reshape(-1, *arrays[0].shape[1:])


def _block(members: Mapping[str, ModelTensor], rows: int) -> list[int]:
    """Rows of every member in one block."""
    sizes = [tensor.group_rows for tensor in members.values()]
    if not all(sizes):
        sizes = [rows // len(members)] * len(members)
    if not rows or rows % sum(sizes):
        names = ", ".join(tensor.name for tensor in members.values())
        raise LayoutRefused(f"{rows} local rows are not whole blocks of {sum(sizes)} rows of {names}")
    return sizes
