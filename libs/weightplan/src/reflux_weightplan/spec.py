"""Owns symbolic layouts: a mesh, a list of tensors with their placements, and a place for every rank."""

import math
from dataclasses import dataclass, field
from functools import cached_property

from reflux_weightplan.dtypes import item_bytes
from reflux_weightplan.errors import LayoutRefused
from reflux_weightplan.mesh import REPLICATED, Mesh, Place, Placement


@dataclass(frozen=True)
class TensorSpec:
    """One global tensor and how it lies on the mesh; `layer` orders the transfer (-1 goes first).

    Tensors with the same `fused` name lie side by side in one local tensor, by `fused_order` and without padding
    (gate and up; q, k and v). With `fused_rows` they are interleaved along dimension 0: each block holds `fused_rows`
    rows of every member (Megatron-Core keeps q, k and v of one key-value group together).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    placement: Placement = REPLICATED
    layer: int = -1
    fused: str = ""
    fused_order: int = 0
    fused_rows: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the global tensor."""
        return math.prod(self.shape) * item_bytes(self.name, self.dtype)


@dataclass(frozen=True)
class SpecLayout:
    """Tensors on a mesh. Every rank's region holds its parts in list order, each local tensor aligned to 256 bytes.

    Every element of every tensor lies in exactly one box, which may lie on several ranks: cuts divide what is there,
    and a tensor uses an axis once, so that overlaps and gaps cannot be written down. Without places every rank is a
    host of its own. Raises `LayoutRefused` when names, sizes, cuts or pins contradict each other or the mesh.
    """

    mesh: Mesh
    tensors: tuple[TensorSpec, ...]
    places: tuple[Place, ...] = field(default=(), repr=False)
    engine: str = ""

    def __post_init__(self) -> None:
        if self.places and len(self.places) != self.mesh.ranks:
            raise LayoutRefused(f"{self.mesh.ranks} ranks need as many places or none, not {len(self.places)}")
        if not self.tensors:
            raise LayoutRefused("the layout has no tensors")
        seen: set[str] = set()
        checked: set[tuple[int, int]] = set()
        for tensor in self.tensors:
            if not tensor.name or tensor.name in seen:
                raise LayoutRefused(f"tensor {tensor.name!r} appears twice or has no name")
            seen.add(tensor.name)
            if tensor.fused_rows < 0:
                raise LayoutRefused(f"tensor {tensor.name} has {tensor.fused_rows} rows per block, expected 0 or more")
            if any(size < 1 for size in tensor.shape):
                raise LayoutRefused(f"tensor {tensor.name} has shape {list(tensor.shape)}; sizes are at least 1")
            item_bytes(tensor.name, tensor.dtype)
            if (key := (id(tensor.placement), len(tensor.shape))) not in checked:
                self._check_placement(tensor)
                checked.add(key)

    def _check_placement(self, tensor: TensorSpec) -> None:
        sizes = dict(self.mesh.axes)
        for cut in tensor.placement.cuts:
            if cut.dim >= len(tensor.shape):
                raise LayoutRefused(f"tensor {tensor.name} has no dimension {cut.dim} to cut")
            self.mesh.flattened(cut.axis)
        for axis, coordinate in tensor.placement.pinned:
            if not 0 <= coordinate < sizes.get(axis, 0):
                raise LayoutRefused(f"tensor {tensor.name} is pinned to {axis}={coordinate}; axes are {sizes}")
        cut_axes = [axis for cut in tensor.placement.cuts for axis in cut.axis.split("+")]
        used = cut_axes + [axis for axis, _ in tensor.placement.pinned]
        if len(set(used)) != len(used):
            raise LayoutRefused(f"tensor {tensor.name} uses an axis of {used} twice")

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all global tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)
