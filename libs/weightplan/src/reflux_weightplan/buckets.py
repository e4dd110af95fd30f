"""Owns the buckets: consecutive tensors in layer order that bring no target rank more than a bound of bytes.

Direct and packed pieces have buckets of their own, and packed ones also by who reads them: a source then answers every
reader of a packed bucket with one read. A tensor over the bound is spread over several buckets.
"""

from dataclasses import dataclass

import numpy as np

from reflux_weightplan.classes import Joined, TensorClass
from reflux_weightplan.sides import Bools, Ints, Side
from reflux_weightplan.templates import PIECE_BYTES, Template


@dataclass(frozen=True, slots=True)
class Bucket:
    """`nbytes` is the most that one target rank receives; layers are those of the first and the last tensor."""

    packed: bool
    first_layer: int
    last_layer: int
    tensors: int
    nbytes: int


@dataclass(frozen=True)
class Bucketing:
    """Buckets in the order of the transfer. A piece of tensor t lies in bucket `first_TF[t, packed]` + its part."""

    buckets: tuple[Bucket, ...]
    first_TF: Ints
    parts: dict[int, Ints]

    def of(self, each: TensorClass, tensors: Ints, pieces: Ints) -> Ints:
        """Bucket of pieces of tensors of a class, int64 [pieces, tensors]."""
        packed = each.template.packed[pieces].astype(np.int64)
        return self.first_TF[tensors][:, packed].T + self.parts[id(each.template)][pieces][:, None]


class _Stream:
    """An open bucket: bytes by target rank, and what it holds so far."""

    def __init__(self, packed: bool, ranks: int) -> None:
        self.packed, self.load_D = packed, np.zeros(ranks, np.int64)
        self.opened, self.layers, self.top = -1, (0, 0), 0
        self.tensors = 0


class _Filling:
    """The greedy pass over tensors in layer order."""

    def __init__(self, ranks: int, bound: int) -> None:
        self.ranks, self.bound = ranks, bound
        self.streams: dict[bytes, _Stream] = {}
        self.closed: list[tuple[int, Bucket]] = []
        self.opened = 0

    def add(self, key: bytes, packed: bool, ranks_H: Ints, bytes_H: Ints, layer: int, parts: int) -> int:
        """Puts a tensor into its stream's bucket, or opens the next one; returns the number of its first bucket."""
        stream = self.streams.get(key)
        if stream is None:
            stream = self.streams[key] = _Stream(packed, self.ranks)
        load = stream.load_D[ranks_H] + bytes_H
        top = int(load.max())
        if parts > 1:
            self._close(stream)
            most = min(int(bytes_H.max()), self.bound)
            numbers = [self._number() for _ in range(parts)]
            self.closed += [(number, Bucket(packed, layer, layer, 1, most)) for number in numbers]
            return numbers[0]
        if stream.opened < 0 or top > self.bound:
            self._close(stream)
            stream.opened, stream.layers, load = self._number(), (layer, layer), bytes_H
            top = int(load.max())
        stream.load_D[ranks_H] = load
        stream.layers = (stream.layers[0], layer)
        stream.top, stream.tensors = max(stream.top, top), stream.tensors + 1
        return stream.opened

    def _number(self) -> int:
        self.opened += 1
        return self.opened - 1

    def _close(self, stream: _Stream) -> None:
        if stream.opened >= 0:
            self.closed.append((stream.opened, Bucket(stream.packed, *stream.layers, stream.tensors, stream.top)))
        stream.load_D[:] = 0
        stream.opened, stream.top, stream.tensors = -1, 0, 0

    def finish(self) -> tuple[Bucket, ...]:
        """All buckets by number."""
        for stream in self.streams.values():
            self._close(stream)
        return tuple(bucket for _, bucket in sorted(self.closed, key=lambda pair: pair[0]))


def fill_buckets(joined: Joined, target: Side, ranks: Ints, bucket_bytes: int) -> Bucketing:
    """Buckets of at most `bucket_bytes` per target rank; `ranks` are those that differ in what they hold."""
    step = max(bucket_bytes - PIECE_BYTES, 1)
    parts = {id(each.template): _parts(each.template, bucket_bytes, step) for each in joined.classes}
    rows = [_rows(each, target, ranks, parts[id(each.template)]) for each in joined.classes]
    filling = _Filling(target.ranks, bucket_bytes)
    first_TF = np.full((len(joined.class_T), 2), -1)
    layers = [tensor.layer for tensor in target.layout.tensors]
    classes = joined.class_T.tolist()
    for tensor in joined.order_T.tolist():
        for key, packed, ranks_H, bytes_H, count in rows[classes[tensor]]:
            first_TF[tensor, int(packed)] = filling.add(key, packed, ranks_H, bytes_H, layers[tensor], count)
    return Bucketing(filling.finish(), first_TF, parts)


def _parts(template: Template, bound: int, step: int) -> Ints:
    """Which of a tensor's buckets each piece goes to: 0 unless a box has more bytes than a bucket."""
    parts = np.zeros(len(template.packed), np.int64)
    for packed in (False, True):
        chosen = np.flatnonzero(template.packed == packed)
        chosen = chosen[np.lexsort((template.target_offset[chosen], template.target_box[chosen]))]
        box = template.target_box[chosen]
        before = np.cumsum(template.nbytes[chosen]) - template.nbytes[chosen]
        opens = np.flatnonzero(np.diff(box, prepend=-1))
        inside = before - np.repeat(before[opens], np.diff(np.append(opens, len(box))))
        total = np.bincount(box, weights=template.nbytes[chosen]) if len(box) else np.zeros(1)
        if total.max() > bound:
            parts[chosen] = inside // step
    return parts


def _rows(each: TensorClass, target: Side, ranks: Ints, parts: Ints) -> list[tuple[bytes, bool, Ints, Ints, int]]:
    """What a tensor of a class adds: stream, packed or not, ranks, bytes on each, number of buckets it needs."""
    box_D = target.box_KR[each.target_kind]
    holders = ranks[box_D[ranks] >= 0]
    rows = []
    for packed in (False, True):
        chosen: Bools = each.template.packed == packed
        if not len(holders) or not chosen.any():
            continue
        box_bytes = np.bincount(
            each.template.target_box[chosen], weights=each.template.nbytes[chosen], minlength=int(box_D.max()) + 1
        ).astype(np.int64)
        bytes_H = box_bytes[box_D[holders]]
        some = bytes_H > 0
        if some.any():
            key = box_D.tobytes() if packed else b""
            rows.append((key, packed, holders[some], bytes_H[some], int(parts[chosen].max()) + 1))
    return rows
