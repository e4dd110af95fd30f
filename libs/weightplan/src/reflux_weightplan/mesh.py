"""Owns the symbolic placement of tensors: meshes of ranks, cuts along their axes, and where each rank sits."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from reflux_weightplan.errors import LayoutRefused

CutRule = Literal["chunk", "even"]


@dataclass(frozen=True)
class Place:
    """Where a rank sits. Ranks with the same host and nic share one port; an empty nic is a port of the rank's own.

    `domain` is the NVLink domain; an empty domain or rack is shared with nobody. `bytes_per_second` is the port's rate
    in each direction; 50e9 is NDR (400 Gb/s), 0 leaves it to the link model.
    """

    host: str
    domain: str = ""
    rack: str = ""
    nic: str = ""
    bytes_per_second: float = 50e9


@dataclass(frozen=True)
class Mesh:
    """Ranks as a grid; `axes` are (name, size), outermost first: the last axis varies fastest with the rank."""

    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        if len(set(names)) != len(names) or any(size < 1 for _, size in self.axes):
            raise LayoutRefused(f"a mesh has axes with distinct names and sizes of at least 1, not {self.axes}")
        if any(not name or "+" in name for name in names):
            raise LayoutRefused(f"an axis has a name without '+', which joins axes in a cut; not {names}")

    @cached_property
    def ranks(self) -> int:
        """Number of ranks."""
        return math.prod(size for _, size in self.axes)

    @cached_property
    def coordinates(self) -> dict[str, np.ndarray]:
        """Coordinate of every rank by axis: int64 [ranks]."""
        grid = np.indices([size for _, size in self.axes]).reshape(len(self.axes), -1)
        return {name: grid[index] for index, (name, _) in enumerate(self.axes)}

    def flattened(self, axis: str) -> tuple[np.ndarray, int]:
        """Coordinate of every rank along an axis, or along several joined by '+' (first is outermost), and the size."""
        sizes = dict(self.axes)
        coordinate, size = np.zeros(self.ranks, np.int64), 1
        for name in axis.split("+"):
            if name not in sizes:
                raise LayoutRefused(f"the mesh has no axis {name!r}; it has {', '.join(sizes) or 'none'}")
            coordinate = coordinate * sizes[name] + self.coordinates[name]
            size *= sizes[name]
        return coordinate, size


@dataclass(frozen=True)
class Cut:
    """Dimension `dim` is divided along a mesh axis, or along several joined by '+' ("fsdp+ep").

    `unit` elements stay together (the size of a head). "chunk" is torch.chunk, the rule of FSDP2: every rank takes
    ceil(units / size), the last ones less or nothing. With "even" parts differ by at most one unit, the larger ones
    first; with fewer units than ranks each unit lies on a run of ranks (heads of grouped-query attention under wide
    tensor parallelism). A second cut of the same dimension divides what the first left on the rank.
    """

    dim: int
    axis: str
    rule: CutRule = "even"
    unit: int = 1

    def __post_init__(self) -> None:
        if self.rule not in ("chunk", "even") or self.dim < 0 or self.unit < 1:
            raise LayoutRefused(f"a cut has the rule chunk or even, a dimension and a unit above 0, not {self}")


@dataclass(frozen=True)
class Placement:
    """How a tensor lies on a mesh: cut along some axes, only at one coordinate of `pinned` axes, replicated along the
    rest. Pinned are the pipeline stage of a layer and the owner of an expert."""

    cuts: tuple[Cut, ...] = ()
    pinned: tuple[tuple[str, int], ...] = ()


REPLICATED = Placement()
"""Every rank holds the whole tensor."""
