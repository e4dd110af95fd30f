"""Slurm's block topology: the smallest aggregated block that holds the job, then the fewest base blocks.

A base block is one domain of the tightest named level; neighbours aggregate by powers of two inside the level above.
A job of N nodes on base blocks of B nodes goes into one aggregated block of level ceil(log2(ceil(N / B))): of those
with enough free nodes the one with the fewest. Inside it base blocks that fit with the fewest free nodes come first,
and the last base block is a best fit. Segments are placed one after another, each in the base block that fits it best,
lower blocks already in use first. A job larger than the largest aggregated block may use all blocks. Node weights are
equal. (topology/block in the sources of Slurm 26.11.)
"""

import math

import numpy as np

from reflux_placement.gang import Assignment, GangDemand
from reflux_placement.place.fill import Slice
from reflux_placement.place.misfit import Misfit
from reflux_placement.place.role import RolePlan, capacity_in, holds_all
from reflux_placement.place.rules.base import by_roles
from reflux_placement.place.rules.kueue import best_fit
from reflux_placement.room import Room
from reflux_placement.topology import Ints


def slurm_block(room: Room, gang: GangDemand) -> Assignment | Misfit:
    """Every role as a job of its own: the smallest aggregated block, or segment by segment."""
    return by_roles(room, gang, _fill)


def aggregation_level(num_nodes: int, base_size: int) -> int:
    """ceil(log2(ceil(N / B))): how many times base blocks are doubled for a job of N nodes."""
    return max(0, math.ceil(math.log2(math.ceil(num_nodes / base_size))))


def block_sizes(smallest: int, num_domains: int) -> list[int]:
    """BlockSizes as topograph writes them: D * 2^i for i <= floor(log2 N), D the smallest of N domains."""
    return [smallest << i for i in range(int(math.log2(num_domains)) + 1)]


def nested_block_sizes(sizes: list[int]) -> list[int]:
    """Sizes of nested domains as BlockSizes: each outer one rounded up to the base times a power of two."""
    base = sizes[0]
    return [base << aggregation_level(size, base) for size in sizes]


def _fill(view: Slice, plan: RolePlan, copies_N: Ints, level: int) -> Ints | None:
    named = [at for at in range(1, view.top) if view.tree.layers[at].real_P.any()]
    if not named or plan.shape.required < named[0] or plan.shape.cap or plan.shape.near_levels:
        return best_fit(view, plan, copies_N, level)
    if plan.shape.segment_size > 1:
        if plan.shape.required < view.top or not 0 < plan.shape.segment_level < view.top:
            return best_fit(view, plan, copies_N, level)
        return _by_segments(view, plan, copies_N, plan.shape.segment_level)
    base = named[0]
    held_P = capacity_in(view, plan, copies_N).units[base]
    layer = view.tree.layers[base]
    low, high = view.bounds(base)
    size = int(np.max(layer.stops_P[low:high] - layer.starts_P[low:high]))
    per_node = max(1, int(copies_N.max(initial=0)))
    wanted = aggregation_level(math.ceil(plan.count / per_node), size)
    group_P = _groups(view, base, wanted)
    if plan.shape.required < view.top and not len(_allowed(view, plan, copies_N)):
        return None
    sums_G = np.bincount(group_P, held_P, minlength=int(group_P.max()) + 1).astype(np.int64)
    fits = np.flatnonzero(sums_G >= plan.count)
    if not len(fits):
        return best_fit(view, plan, copies_N, view.top) if wanted > _largest(view, base) else None
    chosen = int(fits[np.lexsort([fits, sums_G[fits]])[0]])
    inside_P = np.where(group_P == chosen, held_P, 0)
    masked_N = np.where(inside_P[layer.part_N[view.first : view.last] - low] > 0, copies_N, 0)
    return best_fit(view, plan, masked_N, base)


def _allowed(view: Slice, plan: RolePlan, copies_N: Ints) -> Ints:
    return holds_all(view, plan, capacity_in(view, plan, copies_N), plan.shape.required)


def _groups(view: Slice, base: int, wanted: int) -> Ints:
    """Aggregated block of every base block: 2^wanted neighbours under one parent."""
    low, high = view.bounds(base)
    parent_P = view.tree.layers[base].parent_P[low:high]
    begin = np.flatnonzero(np.concatenate(([True], np.diff(parent_P) != 0)))
    size_P = np.diff(np.append(begin, high - low))
    within_P = np.arange(high - low) - np.repeat(begin, size_P)
    key_P = parent_P * (1 << 32) + (within_P >> wanted)
    return np.unique(key_P, return_inverse=True)[1]


def _largest(view: Slice, base: int) -> int:
    """How often base blocks can be doubled inside the level above."""
    low, high = view.bounds(base)
    _, sizes = np.unique(view.tree.layers[base].parent_P[low:high], return_counts=True)
    return math.ceil(math.log2(int(sizes.max())))


def _by_segments(view: Slice, plan: RolePlan, copies_N: Ints, level: int) -> Ints | None:
    """Segments one after another: a block already in use, lower ones first, else the tightest that holds one."""
    shape = plan.shape
    segments_P = capacity_in(view, plan, copies_N).units[level].copy()
    if int(segments_P.sum()) < plan.want(level):
        return None
    part_N = view.tree.layers[level].part_N[view.first : view.last] - view.bounds(level)[0]
    members_P = np.bincount(part_N, np.minimum(copies_N, plan.count), minlength=len(segments_P))
    order = np.lexsort([np.arange(len(segments_P)), members_P])
    order = order[segments_P[order] > 0]
    before_X = np.cumsum(segments_P[order]) - segments_P[order]
    want_P = np.zeros(len(segments_P), dtype=np.int64)
    want_P[order] = np.clip(plan.want(level) - before_X, 0, segments_P[order]) * shape.segment_size
    before_N = np.cumsum(copies_N) - copies_N
    begin = np.flatnonzero(np.concatenate(([True], np.diff(part_N) != 0)))
    before_N = before_N - np.repeat(before_N[begin], np.diff(np.append(begin, len(part_N))))
    return np.clip(want_P[part_N] - before_N, 0, copies_N)
