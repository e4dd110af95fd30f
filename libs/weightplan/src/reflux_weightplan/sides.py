"""Owns what one side of a transfer holds: distinct forms of tensors, the ranks of each box, and offsets in regions.

A *form* is shape, element size, cuts and interleaving; a *kind* is a form with a pinned set of ranks. A model of 45,000
tensors has some ten forms and some hundred kinds, so nothing here is sized tensors x ranks.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from reflux_weightplan.dtypes import item_bytes
from reflux_weightplan.errors import LayoutRefused
from reflux_weightplan.mesh import Cut, Mesh
from reflux_weightplan.spec import SpecLayout, TensorSpec

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

ALIGNMENT_BYTES = 256
NOWHERE = -1


@dataclass(frozen=True)
class Form:
    """How equal tensors are divided; a scalar has shape (1,). `boxes` int64 [U, dims, 2] are distinct and disjoint,
    `box_R` names the box of every rank (-1: none). `block_rows` and `block_bytes` are the interleaving
    along dimension 0, 0 without."""

    shape: tuple[int, ...]
    item_bytes: int
    boxes: Ints
    box_R: Ints
    block_rows: int
    block_bytes: int

    @cached_property
    def box_bytes(self) -> Ints:
        """Bytes of every box, int64 [U]."""
        return np.prod(self.boxes[:, :, 1] - self.boxes[:, :, 0], axis=1, dtype=np.int64) * self.item_bytes

    @cached_property
    def bytes_R(self) -> Ints:
        """Bytes on every rank that is not pinned out, int64 [ranks]."""
        return np.where(self.box_R >= 0, self.box_bytes[self.box_R], 0)


@dataclass(frozen=True)
class Region:
    """Where one rank keeps its tensors: `offsets` in bytes by kind and position in the kind (see `Side.offsets`)."""

    starts: dict[int, int]
    offsets: Ints
    nbytes: int


class Side:
    """A symbolic layout as arrays. `kind_T` and `position_T` give a tensor's kind and its position among its kind."""

    def __init__(self, layout: SpecLayout) -> None:
        self.layout, self.ranks = layout, layout.mesh.ranks
        self.forms: list[Form] = []
        self.form_K: list[int] = []
        masks: list[Bools] = []
        self.kind_T = np.empty(len(layout.tensors), np.int64)
        self._classify(masks)
        self.held_KR = np.array(masks)
        self.box_KR = np.where(self.held_KR, np.array([self.forms[form].box_R for form in self.form_K]), NOWHERE)
        order = np.argsort(self.kind_T, kind="stable")
        self._kind_starts = np.searchsorted(self.kind_T[order], np.arange(len(masks) + 1))
        self.position_T = np.empty_like(order)
        self.position_T[order] = np.arange(len(order)) - self._kind_starts[self.kind_T[order]]
        self._tensors_by_kind = order
        self._regions: dict[bytes, Region] = {}
        idle = np.flatnonzero((self.box_KR < 0).all(axis=0))
        if len(idle):
            raise LayoutRefused(f"more ranks than boxes: ranks {idle[:8].tolist()} of {self.ranks} hold nothing")

    def _classify(self, masks: list[Bools]) -> None:
        forms: dict[tuple, int] = {}
        kinds: dict[tuple, int] = {}
        blocks = _blocks(self.layout)
        known: dict[tuple, int] = {}
        for index, tensor in enumerate(self.layout.tensors):
            same = (
                tensor.shape,
                tensor.dtype,
                id(tensor.placement),
                (tensor.fused, tensor.fused_rows) if tensor.fused_rows else "",
            )
            if same in known:  # Equal placements are mostly one object, and comparing them is slow.
                self.kind_T[index] = known[same]
                continue
            rows, block = (tensor.fused_rows, blocks[tensor.fused]) if tensor.fused_rows else (0, 0)
            size, cuts = item_bytes(tensor.name, tensor.dtype), tensor.placement.cuts
            form = forms.get(key := (tensor.shape, size, cuts, rows, block))
            if form is None:
                form = forms[key] = len(self.forms)
                self.forms.append(_form(self.layout.mesh, tensor, size, block))
            kind = kinds.get(key := (form, tensor.placement.pinned))
            if kind is None:
                kind = kinds[key] = len(masks)
                self.form_K.append(form)
                masks.append(_mask(self.layout.mesh, tensor.placement.pinned))
            self.kind_T[index] = known[same] = kind

    def form_of_kind(self, kind: int) -> Form:
        """The form of a kind."""
        return self.forms[self.form_K[kind]]

    def tensors_of_kind(self, kind: int) -> Ints:
        """Indices of the kind's tensors, in list order."""
        return self._tensors_by_kind[self._kind_starts[kind] : self._kind_starts[kind + 1]]

    @cached_property
    def bytes_KR(self) -> Ints:
        """Local bytes of one tensor of a kind on a rank, int64 [kinds, ranks]."""
        return np.where(self.held_KR, np.array([self.forms[form].bytes_R for form in self.form_K]), 0)

    def region(self, rank: int) -> Region:
        """Offsets on one rank. Ranks that hold equal sizes share one object."""
        key = self.bytes_KR[:, rank].tobytes()
        if key not in self._regions:
            self._regions[key] = self._lay_out(rank)
        return self._regions[key]

    def offsets(self, region: Region, tensors: Ints) -> Ints:
        """Byte offsets in a region of tensors that all have one kind and lie on its rank."""
        return region.offsets[region.starts[int(self.kind_T[tensors[0]])] + self.position_T[tensors]]

    def _lay_out(self, rank: int) -> Region:
        kinds = np.flatnonzero(self.box_KR[:, rank] >= 0)
        members = [self.tensors_of_kind(kind) for kind in kinds.tolist()]
        starts = np.concatenate([[0], np.cumsum([len(tensors) for tensors in members])])
        tensors = np.concatenate(members)
        slots = self._slot_T[tensors]
        order = np.argsort(slots, kind="stable")
        sizes = self.bytes_KR[self.kind_T[tensors], rank][order]
        groups = self._group_T[tensors][order]
        first = np.flatnonzero(np.diff(groups, prepend=-1))
        totals = np.add.reduceat(sizes, first)
        aligned = -(-totals // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        bases = np.concatenate([[0], np.cumsum(aligned)])
        steps = np.where(self._step_T[tensors][order] > 0, self._step_T[tensors][order], sizes)
        before = np.cumsum(steps) - steps
        group_of = np.repeat(np.arange(len(first)), np.diff(np.append(first, len(sizes))))
        offsets = np.empty(len(tensors), np.int64)
        offsets[order] = bases[group_of] + before - before[first][group_of]
        return Region(dict(zip(kinds.tolist(), starts.tolist(), strict=False)), offsets, int(bases[-1]))

    @cached_property
    def _group_T(self) -> Ints:
        """Local tensor of every tensor, numbered by its first member."""
        first: dict[str, int] = {}
        return np.array(
            [first.setdefault(t.fused, index) if t.fused else index for index, t in enumerate(self.layout.tensors)]
        )

    @cached_property
    def _slot_T(self) -> Ints:
        """Place of every tensor in the order of regions: by local tensor, then by order in it."""
        fused = np.array([tensor.fused_order for tensor in self.layout.tensors])
        slots = np.empty(len(fused), np.int64)
        slots[np.lexsort((np.arange(len(fused)), fused, self._group_T))] = np.arange(len(fused))
        return slots

    @cached_property
    def _step_T(self) -> Ints:
        """Bytes from an interleaved member to the next one in a block, 0 for tensors in one part."""
        return np.array(
            [_inner_bytes(tensor) * tensor.fused_rows if tensor.fused_rows else 0 for tensor in self.layout.tensors]
        )


def _blocks(layout: SpecLayout) -> dict[str, int]:
    """Bytes of one interleaved block by fused name; members have equally many blocks and whole inner dimensions."""
    bytes_of: dict[str, int] = {}
    counts: dict[str, tuple] = {}
    apart = {tensor.fused for tensor in layout.tensors if tensor.fused and not tensor.fused_rows}
    for tensor in layout.tensors:
        if not tensor.fused_rows:
            continue
        if tensor.fused in apart:
            raise LayoutRefused(f"some members of {tensor.fused} are interleaved, others are not")
        if not tensor.fused or not tensor.shape or tensor.shape[0] % tensor.fused_rows:
            raise LayoutRefused(f"tensor {tensor.name} cannot be interleaved in blocks of {tensor.fused_rows} rows")
        if any(cut.dim or cut.unit % tensor.fused_rows for cut in tensor.placement.cuts):
            raise LayoutRefused(f"interleaved tensor {tensor.name} is cut along rows, in units of whole blocks, only")
        cuts = [(cut.axis, cut.rule, cut.unit // tensor.fused_rows) for cut in tensor.placement.cuts]
        how = (tensor.shape[0] // tensor.fused_rows, cuts, tensor.placement.pinned, tensor.dtype)
        if counts.setdefault(tensor.fused, how) != how:
            raise LayoutRefused(f"members of {tensor.fused} differ in blocks, cuts, pinned axes or dtype")
        bytes_of[tensor.fused] = bytes_of.get(tensor.fused, 0) + _inner_bytes(tensor) * tensor.fused_rows
    return bytes_of


def _inner_bytes(tensor: TensorSpec) -> int:
    return math.prod(tensor.shape[1:]) * item_bytes(tensor.name, tensor.dtype)


def _form(mesh: Mesh, tensor: TensorSpec, size: int, block: int) -> Form:
    shape = tensor.shape or (1,)
    low = np.zeros((mesh.ranks, len(shape)), np.int64)
    high = np.broadcast_to(np.array(shape, np.int64), low.shape).copy()
    for cut in tensor.placement.cuts:
        low[:, cut.dim], high[:, cut.dim] = _cut(mesh, cut, low[:, cut.dim], high[:, cut.dim])
    filled = (low < high).all(axis=1)
    boxes, inverse = np.unique(np.stack([low, high], axis=2)[filled], axis=0, return_inverse=True)
    box_R = np.full(mesh.ranks, NOWHERE)
    box_R[filled] = inverse.reshape(-1)
    return Form(shape, size, boxes, box_R, tensor.fused_rows, block)


def _cut(mesh: Mesh, cut: Cut, low: Ints, high: Ints) -> tuple[Ints, Ints]:
    """The part of every rank's range that a cut leaves on it."""
    coordinate, size = mesh.flattened(cut.axis)
    units = -(-(high - low) // cut.unit)
    if cut.rule == "chunk":
        per_rank = -(-units // size)
        first, last = coordinate * per_rank, (coordinate + 1) * per_rank
    else:
        base, more = units // size, units % size
        first = np.where(units < size, coordinate * units // size, coordinate * base + np.minimum(coordinate, more))
        last = first + np.where(units < size, 1, base + (coordinate < more))
    return np.minimum(low + first * cut.unit, high), np.minimum(low + last * cut.unit, high)


def _mask(mesh: Mesh, pinned: tuple[tuple[str, int], ...]) -> Bools:
    held = np.ones(mesh.ranks, bool)
    for axis, coordinate in pinned:
        held &= mesh.coordinates[axis] == coordinate
    return held
