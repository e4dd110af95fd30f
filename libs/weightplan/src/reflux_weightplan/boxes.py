"""Owns boxes: half-open ranges of elements in every dimension of a global tensor."""

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
