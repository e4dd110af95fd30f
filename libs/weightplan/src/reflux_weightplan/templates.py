"""Owns what moves between two forms: pieces of boxes with their byte patterns, once for all tensors of the two forms.

A *piece* is at most 4 MiB and is the unit of a checksum unless it is packed. Its bytes are `runs` runs of `run_bytes`,
`source_pitch` apart at the source and `target_pitch` apart at the target. Tensors whose runs are short are packed: the
source gathers them, and the receiver takes many of them with one read.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from reflux_weightplan.sides import Bools, Form, Ints

PIECE_BYTES = 4 << 20


@dataclass(frozen=True)
class Template:
    """Pieces between a source form and a target form, in the order of (source box, target box, source offset).

    `source_box` and `target_box` int64 [P]; offsets count from the start of the local tensor (of its fused neighbours'
    block for an interleaved one). `messages` are one-sided reads without packing: 0 for the continuation of a range.
    """

    source_box: Ints
    target_box: Ints
    source_offset: Ints
    target_offset: Ints
    run_bytes: Ints
    runs: Ints
    source_pitch: Ints
    target_pitch: Ints
    packed: Bools
    messages: Ints
    low: Ints
    high: Ints

    @cached_property
    def nbytes(self) -> Ints:
        """Bytes of every piece, int64 [P]."""
        return self.run_bytes * self.runs


def make_template(source: Form, target: Form, pack_below: int, max_runs: int) -> Template:
    """Intersects the boxes of two forms of one shape. Pieces of box pairs with runs shorter than `pack_below` bytes, or
    with more than `max_runs` runs, are packed."""
    u, v, low, high = _intersect(source.boxes, target.boxes)
    for form in (source, target):
        if form.block_rows:
            u, v, low, high = _split_at_multiples(u, v, low, high, 0, form.block_rows)
    while True:
        patterns = [_strides(form, boxes, low) for form, boxes in ((source, u), (target, v))]
        pattern = _runs(low, high, patterns[0][1], patterns[1][1], source.item_bytes)
        step = _oversized(high - low, source.item_bytes, pattern[-1])
        if not step.any():
            break
        u, v, low, high = _cut_pieces(u, v, low, high, step)
    order = np.lexsort((patterns[0][0], v, u))
    run, runs, source_pitch, target_pitch = (values[order] for values in pattern[:4])
    u, v, low, high = u[order], v[order], low[order], high[order]
    source_offset, target_offset = patterns[0][0][order], patterns[1][0][order]
    follows = _follows(u, v, source_offset, target_offset, run, runs)
    packed = _packed(u, v, run, runs, follows, pack_below, max_runs)
    messages = np.where(follows, 0, runs)
    return Template(
        u, v, source_offset, target_offset, run, runs, source_pitch, target_pitch, packed, messages, low, high
    )


def _intersect(source: Ints, target: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Common boxes of two lists [U, dims, 2] and [V, dims, 2]: u, v [P], low, high [P, dims]."""
    meet = np.ones((len(source), len(target)), bool)
    for dim in range(source.shape[1]):
        meet &= source[:, None, dim, 0] < target[None, :, dim, 1]
        meet &= target[None, :, dim, 0] < source[:, None, dim, 1]
    u, v = np.nonzero(meet)
    low = np.maximum(source[u, :, 0], target[v, :, 0])
    return u, v, low, np.minimum(source[u, :, 1], target[v, :, 1])


def _split_at_multiples(u: Ints, v: Ints, low: Ints, high: Ints, dim: int, unit: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Cuts every piece at the multiples of `unit` along a dimension."""
    first, last = low[:, dim] // unit, -(-high[:, dim] // unit)
    which = np.repeat(np.arange(len(u)), last - first)
    block = np.arange(len(which)) - np.repeat(np.cumsum(last - first) - (last - first), last - first) + first[which]
    low, high = low[which], high[which]
    low[:, dim] = np.maximum(low[:, dim], block * unit)
    high[:, dim] = np.minimum(high[:, dim], (block + 1) * unit)
    return u[which], v[which], low, high


def _strides(form: Form, boxes: Ints, low: Ints) -> tuple[Ints, Ints]:
    """Offset [P] of pieces in their local tensors, and strides [P, dims], in bytes."""
    start, stop = form.boxes[boxes, :, 0], form.boxes[boxes, :, 1]
    extent = stop - start
    strides = np.full_like(extent, form.item_bytes)
    for dim in range(extent.shape[1] - 2, -1, -1):
        strides[:, dim] = strides[:, dim + 1] * extent[:, dim + 1]
    inside = low - start
    offset = (inside * strides).sum(axis=1)
    if form.block_rows:
        blocks, rest = np.divmod(inside[:, 0], form.block_rows)
        offset += blocks * form.block_bytes + (rest - inside[:, 0]) * strides[:, 0]
    return offset, strides


def _runs(low: Ints, high: Ints, source: Ints, target: Ints, item: int) -> tuple[Ints, Ints, Ints, Ints, Bools]:
    """Byte pattern of pieces: run, number of runs, pitch at the source, at the target; and whether one level of runs is
    not enough for it."""
    run = np.full(len(low), item)
    runs, source_pitch, target_pitch = np.ones_like(run), np.zeros_like(run), np.zeros_like(run)
    several = np.zeros(len(low), bool)
    for dim in range(low.shape[1] - 1, -1, -1):
        count = high[:, dim] - low[:, dim]
        wide = count > 1
        longer = wide & (runs == 1) & (source[:, dim] == run) & (target[:, dim] == run)
        opens = wide & ~longer & (runs == 1)
        same = (source[:, dim] == runs * source_pitch) & (target[:, dim] == runs * target_pitch)
        more = wide & (runs > 1) & same
        several |= wide & (runs > 1) & ~same
        run = np.where(longer, run * count, run)
        source_pitch = np.where(opens, source[:, dim], source_pitch)
        target_pitch = np.where(opens, target[:, dim], target_pitch)
        runs = np.where(opens | more, runs * count, runs)
    several |= (runs > 1) & (run > PIECE_BYTES)
    return run, runs, source_pitch, target_pitch, several


def _oversized(extent: Ints, item: int, several: Bools) -> Ints:
    """Rows along the first wide dimension that a piece may keep, int64 [P]; 0 where it may stay whole."""
    nbytes = extent.prod(axis=1) * item
    first = np.argmax(extent > 1, axis=1)
    row_bytes = nbytes // np.maximum(extent[np.arange(len(first)), first], 1)
    keep = np.maximum(PIECE_BYTES // np.maximum(row_bytes, 1), 1)
    return np.where(several, 1, np.where(nbytes > PIECE_BYTES, keep, 0))


def _cut_pieces(u: Ints, v: Ints, low: Ints, high: Ints, step: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Cuts pieces with a step along their first wide dimension."""
    at = np.arange(len(u))
    first = np.argmax(high - low > 1, axis=1)
    size = (high - low)[at, first]
    step = np.where(step > 0, step, size)
    parts = -(-size // step)
    which = np.repeat(at, parts)
    part = np.arange(len(which)) - np.repeat(np.cumsum(parts) - parts, parts)
    low, high, dim, start = low[which], high[which], first[which], low[at, first][which]
    rows = np.arange(len(which))
    stop = high[rows, dim]
    low[rows, dim] = start + part * step[which]
    high[rows, dim] = np.minimum(start + (part + 1) * step[which], stop)
    return u[which], v[which], low, high


def _follows(u: Ints, v: Ints, source_offset: Ints, target_offset: Ints, run: Ints, runs: Ints) -> Bools:
    """Whether a piece only continues the contiguous range of the piece before it."""
    follows = np.zeros(len(u), bool)
    follows[1:] = (
        (u[1:] == u[:-1])
        & (v[1:] == v[:-1])
        & (runs[1:] == 1)
        & (runs[:-1] == 1)
        & (source_offset[1:] == source_offset[:-1] + run[:-1])
        & (target_offset[1:] == target_offset[:-1] + run[:-1])
    )
    return follows


def _packed(u: Ints, v: Ints, run: Ints, runs: Ints, follows: Bools, pack_below: int, max_runs: int) -> Bools:
    """Which pieces are packed; decided for all pieces of a box pair together, so that no range is torn apart."""
    if not len(u):
        return np.zeros(0, bool)
    pair = np.cumsum(np.diff(u, prepend=-1).astype(bool) | np.diff(v, prepend=-1).astype(bool)) - 1
    ranges = np.cumsum(~follows) - 1
    range_bytes = np.bincount(ranges, weights=run).astype(np.int64)[ranges]
    longest = np.zeros(pair[-1] + 1, np.int64)
    np.maximum.at(longest, pair, range_bytes)
    count = np.bincount(pair, weights=np.where(follows, 0, runs))
    return ((longest < pack_below) | (count > max_runs))[pair]
