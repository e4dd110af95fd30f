"""Owns the algebra of boxes: half-open ranges of elements in every dimension of a global tensor."""

import math
from dataclasses import dataclass

from reflux_weightplan.errors import LayoutRefused


@dataclass(frozen=True, slots=True)
class Box:
    """Elements `start[d] <= i < stop[d]` in every dimension d; a scalar has no dimensions and one element."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop):
            raise LayoutRefused(f"a box has one stop per start, not {self.start} and {self.stop}")
        if any(low < 0 or high < low for low, high in zip(self.start, self.stop, strict=True)):
            raise LayoutRefused(f"box {self} has a negative start or a stop before its start")

    def __str__(self) -> str:
        return "[" + ", ".join(f"{low}:{high}" for low, high in zip(self.start, self.stop, strict=True)) + "]"

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> "Box":
        """The box of a whole tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent per dimension."""
        return tuple(high - low for low, high in zip(self.start, self.stop, strict=True))

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def intersect(self, other: "Box") -> "Box | None":
        """The common part; none when no element is common."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(low < high for low, high in zip(start, stop, strict=True)) else None

    def contains(self, other: "Box") -> bool:
        """Whether every element of `other` lies in this box."""
        return all(map(int.__le__, self.start, other.start)) and all(map(int.__ge__, self.stop, other.stop))
