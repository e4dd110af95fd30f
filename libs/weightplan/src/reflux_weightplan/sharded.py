"""Owns explicit layouts: every box of every rank with its offset. For small layouts, references and foreign ones."""

from dataclasses import dataclass

import numpy as np

from reflux_weightplan.boxes import Box
from reflux_weightplan.cover import cover
from reflux_weightplan.dtypes import item_bytes
from reflux_weightplan.errors import LayoutRefused
from reflux_weightplan.links import places_of
from reflux_weightplan.mesh import Place
from reflux_weightplan.sides import Form, Side
from reflux_weightplan.spec import SpecLayout

MOST_SHARDS = 1_000_000


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
    """Tensors, where the ranks sit, and how long their regions are (both by rank)."""

    tensors: tuple[ShardedTensor, ...]
    places: tuple[Place, ...]
    region_bytes: tuple[int, ...]

    def check(self) -> None:
        """Raises `LayoutRefused` for overlapping boxes, gaps, empty sizes, names that appear twice, types without a
        rule, shards outside their region, ranks without a place, and ranks that hold nothing."""
        if len(self.places) != len(self.region_bytes):
            raise LayoutRefused(f"{len(self.region_bytes)} ranks need as many places, not {len(self.places)}")
        seen: set[str] = set()
        for tensor in self.tensors:
            if not tensor.name or tensor.name in seen:
                raise LayoutRefused(f"tensor {tensor.name!r} appears twice or has no name")
            seen.add(tensor.name)
            self._check_tensor(tensor)
        idle = set(range(len(self.places))) - {shard.rank for tensor in self.tensors for shard in tensor.shards}
        if idle:
            raise LayoutRefused(f"more ranks than boxes: ranks {sorted(idle)[:8]} hold nothing")

    def _check_tensor(self, tensor: ShardedTensor) -> None:
        if any(size < 1 for size in tensor.shape):
            raise LayoutRefused(f"tensor {tensor.name} has shape {list(tensor.shape)}; sizes are at least 1")
        item = item_bytes(tensor.name, tensor.dtype)
        whole = Box.whole(tensor.shape)
        for shard in tensor.shards:
            last = sum((size - 1) * stride for size, stride in zip(shard.box.shape, shard.strides, strict=True))
            if not 0 <= shard.rank < len(self.places):
                raise LayoutRefused(f"tensor {tensor.name} lies on rank {shard.rank} of {len(self.places)}")
            if not shard.box.elements or len(shard.box.start) != len(tensor.shape) or not whole.contains(shard.box):
                raise LayoutRefused(f"tensor {tensor.name}{whole} has an empty box or one outside: {shard.box}")
            if shard.offset < 0 or shard.offset + last + item > self.region_bytes[shard.rank]:
                raise LayoutRefused(f"tensor {tensor.name}{shard.box} leaves the region of rank {shard.rank}")
        missing, doubled = cover(tensor.shape, list({shard.box for shard in tensor.shards}))
        for what, boxes in (("is nowhere", missing), ("lies in several boxes", doubled)):
            if boxes:
                raise LayoutRefused(f"tensor {tensor.name}: {', '.join(map(str, boxes[:8]))} {what}")


def sharded(layout: SpecLayout) -> ShardedLayout:
    """The explicit form of a symbolic layout; `LayoutRefused` when that is more than a million shards."""
    side = Side(layout)
    count = int((side.box_KR[side.kind_T] >= 0).sum()) if len(layout.tensors) * side.ranks < 1 << 26 else 1 << 26
    if count > MOST_SHARDS:
        raise LayoutRefused(f"{count} shards are too many for the explicit form; plan on the symbolic one")
    tensors = []
    for index, tensor in enumerate(layout.tensors):
        kind = int(side.kind_T[index])
        shards: list[Shard] = []
        for rank in np.flatnonzero(side.box_KR[kind] >= 0).tolist():
            offset = int(side.offsets(side.region(rank), np.array([index]))[0])
            shards += _shards(side.form_of_kind(kind), int(side.box_KR[kind, rank]), rank, offset, len(tensor.shape))
        tensors.append(ShardedTensor(tensor.name, tensor.shape, tensor.dtype, tuple(shards)))
    regions = tuple(side.region(rank).nbytes for rank in range(side.ranks))
    return ShardedLayout(tuple(tensors), places_of(layout.places, side.ranks, "rank"), regions)


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
