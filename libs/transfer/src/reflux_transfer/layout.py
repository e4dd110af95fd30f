"""Parameter layouts: where each tensor lies inside a region, and how it is cut into slices."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from reflux_transfer.errors import LayoutError
from reflux_weightplan.dtypes import item_bytes
from reflux_weightplan.errors import LayoutRefused
from reflux_weightplan.sides import ALIGNMENT_BYTES
from reflux_weightplan.templates import PIECE_BYTES

SLICE_BYTES = PIECE_BYTES
"""Plans cut tensors where layouts do, so that most of what they move has a checksum of its own."""


@dataclass(frozen=True)
class TensorSlot:
    """One tensor of a layout; `offset` and `nbytes` are bytes inside the region."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.offset + self.nbytes


@dataclass(frozen=True)
class Piece:
    """A contiguous part of one tensor; `start` counts from the tensor's first byte."""

    slot: TensorSlot
    start: int
    length: int


@dataclass(frozen=True)
class Layout:
    """Tensors of a region in their order. Names are unique and ranges do not overlap."""

    slots: tuple[TensorSlot, ...]

    def __post_init__(self) -> None:
        if not self.slots:
            raise LayoutError("the layout has no tensors")
        seen: set[str] = set()
        for slot in self.slots:
            _check_slot(slot)
            if slot.name in seen:
                raise LayoutError(f"tensor {slot.name} appears twice")
            seen.add(slot.name)
        ordered = sorted(self.slots, key=lambda slot: slot.offset)
        for left, right in itertools.pairwise(ordered):
            if left.end > right.offset:
                raise LayoutError(f"tensors {left.name} and {right.name} overlap at byte {right.offset}")

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, tuple[Sequence[int], str]]) -> Self:
        """Packs tensors (name -> shape, dtype) in the mapping's order, each aligned to 256 bytes."""
        slots, offset = [], 0
        for name, (shape, dtype) in shapes.items():
            nbytes = math.prod(shape) * _item_bytes(name, dtype)
            slots.append(TensorSlot(name, tuple(int(size) for size in shape), dtype, offset, nbytes))
            offset += aligned(nbytes)
        return cls(tuple(slots))

    @cached_property
    def by_name(self) -> dict[str, TensorSlot]:
        """Slots by tensor name."""
        return {slot.name: slot for slot in self.slots}

    @cached_property
    def region_bytes(self) -> int:
        """Length of a region that holds the layout."""
        return max(slot.end for slot in self.slots)

    @cached_property
    def parameter_bytes(self) -> int:
        """Bytes of all tensors, gaps left out."""
        return sum(slot.nbytes for slot in self.slots)

    def pieces(self, slice_bytes: int = SLICE_BYTES) -> Iterator[Piece]:
        """Every tensor cut into parts of at most `slice_bytes`, in layout order."""
        if slice_bytes < 1:
            raise LayoutError(f"a slice has at least one byte, not {slice_bytes}")
        for slot in self.slots:
            for start in range(0, slot.nbytes, slice_bytes):
                yield Piece(slot, start, min(slice_bytes, slot.nbytes - start))


def aligned(count: int) -> int:
    """The next multiple of `ALIGNMENT_BYTES`."""
    return -(-count // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _item_bytes(name: str, dtype: str) -> int:
    try:
        return item_bytes(name, dtype)
    except LayoutRefused as error:
        raise LayoutError(str(error)) from None


def _check_slot(slot: TensorSlot) -> None:
    if not slot.name:
        raise LayoutError("a tensor has no name")
    if slot.offset < 0 or any(size < 1 for size in slot.shape):
        raise LayoutError(
            f"tensor {slot.name} has shape {list(slot.shape)} at byte {slot.offset}; sizes are at least 1"
        )
    expected = math.prod(slot.shape) * _item_bytes(slot.name, slot.dtype)
    if slot.nbytes != expected:
        raise LayoutError(f"tensor {slot.name} has {slot.nbytes} bytes; {slot.dtype}{list(slot.shape)} has {expected}")
