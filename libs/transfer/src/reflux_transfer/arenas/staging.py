"""Owns one generation while it is written: cast, copy and hash piece by piece, each ready for readers at once."""

import math
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import xxhash

from reflux_transfer import fingerprint
from reflux_transfer.arenas.geometry import NOT_PACKED, Geometry
from reflux_transfer.arenas.header import OwnedHeader, State
from reflux_transfer.errors import LayoutError
from reflux_transfer.layout import ITEM_BYTES, TensorSlot

Cast = Callable[[Any, memoryview], None]
"""Writes a tensor, or a flat part of it, into its place; the place has the layout's dtype."""


class Owner(Protocol):
    """Who lent the arena: is told how the staging ended, and knows the weights of other generations."""

    def staged(self, generation: int, complete: bool) -> None:
        """The arena may be read (complete) or claimed again."""
        ...


def copy(part: Any, place: memoryview) -> None:
    """The cast that changes nothing: any object with the buffer protocol, as many bytes as the place."""
    source = memoryview(part).cast("B")
    if len(source) != len(place):
        raise LayoutError(f"{len(source)} bytes do not fit a place of {len(place)}; a dtype differs from the layout's")
    np.copyto(np.frombuffer(place, np.uint8), np.frombuffer(source, np.uint8))


class Staging:
    """A generation of an arena that is being filled. Leaving the context without `write` fails it."""

    def __init__(
        self, owner: Owner, header: OwnedHeader, geometry: Geometry, view: memoryview, describe: Callable[..., bytes]
    ) -> None:
        self.generation = header.generation
        self.seconds = 0.0
        """How long `write` took."""
        self._owner, self._header, self._geometry, self._view, self._describe = owner, header, geometry, view, describe
        self._tensors = view[geometry.tensors_offset :]
        self._open = True

    def offer(self, *scope: Any) -> bytes:
        """The handle for readers, valid as soon as the staging exists; `scope` goes to the backend."""
        return self._describe(*scope)

    def write(self, tensors: Mapping[str, Any], cast: Cast = copy) -> int:
        """Fills the arena from name -> array (numpy or torch) and seals it; returns the fingerprint.

        Arrays have the layout's number of elements; `cast` gets flat parts of them of at most a piece. Any exception
        fails the generation for its readers. Raises `LayoutError` naming tensors.
        """
        start = time.monotonic()
        with self:
            if not self._open:
                raise LayoutError(f"generation {self.generation} was written or given up before")
            flat = self._flat(tensors)
            checksums: list[int] = []
            for index, piece in enumerate(self._geometry.pieces):
                item = ITEM_BYTES[piece.slot.dtype]
                part = flat[piece.slot.name][piece.start // item : (piece.start + piece.length) // item]
                begin = piece.slot.offset + piece.start
                place = self._tensors[begin : begin + piece.length]
                cast(part, place)
                checksums.append(xxhash.xxh3_64_intdigest(place))  # while it lies in the processor's cache
                self._header.ready(index, checksums[-1])
                for extra in self._geometry.due.get(index, ()):
                    self._header.extra_ready(extra, self._gather(extra))
            whole = fingerprint.tree(checksums)
            self._open = False
            self._header.seal(whole)
            self._owner.staged(self.generation, True)
        self.seconds = time.monotonic() - start
        return whole

    def fail(self, reason: str) -> None:
        """Gives the generation up; readers get `GenerationGone` with the reason. Without effect after `write`."""
        if self._open:
            self._open = False
            self._header.end(State.FAILED, reason)
            self._owner.staged(self.generation, False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.fail(f"{kind.__name__}: {error}" if kind else "nothing was written")

    def _flat(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        layout = self._geometry.layout
        missing = [slot.name for slot in layout.slots if slot.name not in tensors]
        extra = [name for name in tensors if name not in layout.by_name]
        if missing or extra:
            raise LayoutError(f"the tensors do not fit the layout: missing {missing}, unexpected {extra}")
        return {slot.name: _flattened(tensors[slot.name], slot) for slot in layout.slots}

    def _gather(self, index: int) -> int:
        """Checksum over the runs of an extra, which are copied side by side if it is a packed one."""
        row = self._geometry.rows[len(self._geometry.pieces) + index].tolist()
        offset, run_bytes, runs, pitch, packed_at = row
        shape, strides = (runs, run_bytes), (pitch or run_bytes, 1)
        found = np.ndarray(shape, np.uint8, self._tensors, offset, strides)
        if packed_at == NOT_PACKED:
            digest = xxhash.xxh3_64()
            for run in found:
                digest.update(run)
            return digest.intdigest()
        begin = self._geometry.pack_offset + packed_at
        place = self._view[begin : begin + run_bytes * runs]
        np.frombuffer(place, np.uint8).reshape(shape)[...] = found
        return xxhash.xxh3_64_intdigest(place)


def _flattened(tensor: Any, slot: TensorSlot) -> Any:
    elements = slot.nbytes // ITEM_BYTES[slot.dtype]
    if math.prod(tensor.shape) != elements:
        raise LayoutError(f"tensor {slot.name} has shape {list(tensor.shape)}; {list(slot.shape)} is expected")
    return tensor.reshape(-1)
