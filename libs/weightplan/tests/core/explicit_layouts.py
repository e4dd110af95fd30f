"""The explicit form of symbolic layouts, every box of every rank with its offset: the tests' reference."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from reflux_weightplan.boxes import Box
from reflux_weightplan.dtypes import item_bytes
from reflux_weightplan.sides import Form, Side
from reflux_weightplan.spec import SpecLayout


@dataclass(frozen=True, slots=True)
class Shard:
    """A box of a global tensor in a rank's region: byte `offset` of its first element and byte `strides`."""

    rank: int
    box: Box
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True)
class ShardedTensor:
    """A global tensor and all its shards; equal boxes on several ranks are replicas."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class ShardedLayout:
    """Tensors, and how long the regions of the ranks are."""

    tensors: tuple[ShardedTensor, ...]
    region_bytes: tuple[int, ...]

    def check(self) -> None:
        """Asserts that every element of every tensor lies in exactly one box, and every box inside its region."""
        for tensor in self.tensors:
            item, whole = item_bytes(tensor.name, tensor.dtype), Box.whole(tensor.shape)
            for shard in tensor.shards:
                ends = list(zip(shard.box.start, shard.box.stop, whole.stop, shard.strides, strict=True))
                inside = all(low < high <= size for low, high, size, _ in ends)
                assert inside, f"{tensor.name}{whole} has an empty box or one outside: {shard.box}"
                last = shard.offset + sum((high - low - 1) * stride for low, high, _, stride in ends)
                fits = shard.offset >= 0 and last + item <= self.region_bytes[shard.rank]
                assert fits, f"{tensor.name}{shard.box} leaves the region of rank {shard.rank}"
            missing, doubled = cover(tensor.shape, list({shard.box for shard in tensor.shards}))
            for what, boxes in (("is nowhere", missing), ("lies in several boxes", doubled)):
                assert not boxes, f"{tensor.name}: {', '.join(map(str, boxes))} {what}"


def sharded(layout: SpecLayout) -> ShardedLayout:
    """The explicit form of a symbolic layout."""
    side = Side(layout)
    tensors = []
    for index, tensor in enumerate(layout.tensors):
        kind = int(side.kind_T[index])
        shards: list[Shard] = []
        for rank in np.flatnonzero(side.box_KR[kind] >= 0).tolist():
            offset = int(side.offsets(side.region(rank), np.array([index]))[0])
            shards += _shards(side.form_of_kind(kind), int(side.box_KR[kind, rank]), rank, offset, len(tensor.shape))
        tensors.append(ShardedTensor(tensor.name, tensor.shape, tensor.dtype, tuple(shards)))
    return ShardedLayout(tuple(tensors), tuple(side.region(rank).nbytes for rank in range(side.ranks)))


def _shards(form: Form, number: int, rank: int, offset: int, dims: int) -> list[Shard]:
    """One shard, or one per block of an interleaved tensor."""
    (low, *starts), (high, *stops) = form.boxes[number, :, 0].tolist(), form.boxes[number, :, 1].tolist()
    strides = [form.item_bytes]
    for start, stop in zip(starts[::-1], stops[::-1], strict=True):
        strides.insert(0, strides[0] * (stop - start))
    rows = form.block_rows or high - low
    return [
        Shard(
            rank,
            Box((first, *starts)[:dims], (min(first + rows, high), *stops)[:dims]),
            offset + index * form.block_bytes,
            tuple(strides[:dims]),
        )
        for index, first in enumerate(range(low, high, rows))
    ]


def cover(shape: tuple[int, ...], boxes: Sequence[Box]) -> tuple[list[Box], list[Box]]:
    """Missing and doubled ranges of a tensor under some boxes in it, each list disjoint; both empty for an exact cover.

    Works on the grid of all box borders, so it costs as many cells as the product of borders per dimension.
    """
    borders = [
        np.unique([0, size, *(box.start[dim] for box in boxes), *(box.stop[dim] for box in boxes)])
        for dim, size in enumerate(shape)
    ]
    counts = np.zeros([len(each) - 1 for each in borders], np.int64)
    for box in boxes:
        ends = zip(borders, box.start, box.stop, strict=True)
        counts[tuple(slice(*np.searchsorted(each, (low, high))) for each, low, high in ends)] += 1
    return _ranges(counts == 0, borders), _ranges(counts > 1, borders)


def _ranges(chosen: np.ndarray, borders: Sequence[np.ndarray]) -> list[Box]:
    """Chosen cells of the grid as boxes; neighbours along the first dimension are joined."""
    found: dict[tuple, Box] = {}
    cells = np.argwhere(np.moveaxis(chosen, 0, -1)) if chosen.ndim else np.argwhere(chosen)
    for cell in cells.tolist():
        cell = cell[-1:] + cell[:-1]
        start = tuple(int(each[index]) for each, index in zip(borders, cell, strict=True))
        stop = tuple(int(each[index + 1]) for each, index in zip(borders, cell, strict=True))
        row = (start[1:], stop[1:])
        before = found.pop((row, start[:1]), None)
        found[(row, stop[:1])] = Box(before.start if before else start, stop)
    return list(found.values())
