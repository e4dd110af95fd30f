"""Owns one generation while it is written: cast, copy and hash piece by piece, each ready for readers at once."""

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import xxhash

from reflux_transfer import fingerprint
from reflux_transfer.arenas.geometry import NOT_PACKED, Geometry
from reflux_transfer.arenas.header import OwnedHeader
from reflux_transfer.arenas.writing import Writers
from reflux_transfer.delta.codec import Encoded, encode
from reflux_transfer.errors import LayoutError
from reflux_transfer.handles import ANYWHERE, Scope
from reflux_transfer.layout import TensorSlot
from reflux_weightplan.dtypes import ITEM_BYTES

if TYPE_CHECKING:
    from reflux_transfer.arenas.publisher import PublisherArenas

Cast = Callable[[Any, memoryview], None]
"""Writes a flat part of a tensor into its place, which has the layout's dtype. Called by several threads at once."""


def copy(part: Any, place: memoryview) -> None:
    """The cast that changes nothing: any object with the buffer protocol, as many bytes as the place."""
    source = memoryview(part).cast("B")
    if len(source) != len(place):
        raise LayoutError(f"{len(source)} bytes do not fit a place of {len(place)}; a dtype differs from the layout's")
    np.copyto(np.frombuffer(place, np.uint8), np.frombuffer(source, np.uint8))


class Staging:
    """A generation of an arena that is being filled. Leaving the context without `write` fails it.

    Any thread may fail it, also while another one writes: readers see that at once, but the arena belongs to the writer
    until it has noticed, so that it never writes into the generation after.
    """

    def __init__(
        self,
        owner: "PublisherArenas",
        header: OwnedHeader,
        geometry: Geometry,
        view: memoryview,
        describe: Callable[[Scope], bytes],
        plans: tuple[str, ...] = (),
    ) -> None:
        self.generation = header.generation
        self.seconds = 0.0
        """How long `write` took."""
        self.delta: Encoded | None = None
        """The delta that lies in the arena beside the weights."""
        self.plans = plans
        """Hashes of the plans of other layouts that it is staged for."""
        self._owner, self._header, self._geometry, self._view, self._describe = owner, header, geometry, view, describe
        self._tensors = view[geometry.tensors_offset :]
        self._lock = threading.Lock()
        self._phase: Literal["open", "writing", "left"] = "open"

    def offer(self, scope: Scope = ANYWHERE) -> bytes:
        """The handle for readers, valid as soon as the staging exists."""
        return self._describe(replace(scope, generation=self.generation))

    def write(self, tensors: Mapping[str, Any], cast: Cast = copy, *, base: int | None = None) -> int:
        """Fills the arena from name -> array (numpy or torch) and seals it; returns the fingerprint.

        Arrays have the layout's number of elements; `cast` gets flat parts of them of at most a piece, in threads. With
        `base`, a leased or pinned generation, the difference to it is added, unless it is too dense. Any exception
        fails the generation for its readers. Raises `LayoutError` naming tensors, `KeyError` for a base that is gone,
        and `GenerationGone` soon after the generation was failed or its arenas were closed.
        """
        start = time.monotonic()
        with self._lock:
            if self._phase != "open":
                raise LayoutError(f"generation {self.generation} was written or given up before")
            self._phase = "writing"
        complete = False
        try:
            with self:
                whole = self._fill(tensors, cast)
                if base is not None:
                    self._encode(base)
                self._header.seal(whole)
            complete = True
        finally:
            with self._lock:
                self._phase = "left"
            self._owner.staged(self.generation, complete)
        self.seconds = time.monotonic() - start
        return whole

    def fail(self, reason: str) -> None:
        """Gives the generation up; readers get `GenerationGone` with the reason. Without effect after `write`."""
        with self._lock:
            if self._phase == "left":
                return
            self._header.fail(reason)
            if self._phase == "writing":
                return  # the writer finds out, and hands the arena back
            self._phase = "left"
        self._owner.staged(self.generation, False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.fail(f"{kind.__name__}: {error}" if kind else "nothing was written")

    def _check(self) -> None:
        self._header.check_filling(self.generation)

    def _fill(self, tensors: Mapping[str, Any], cast: Cast) -> int:
        """All pieces; returns their fingerprint."""
        flat = self._flat(tensors)
        checksums: list[int] = []

        def checked(part: Any, place: memoryview) -> None:
            self._check()
            cast(part, place)

        def written(index: int, checksum: int) -> None:
            checksums.append(checksum)
            self._ready(index, checksum)

        with Writers(checked, written) as writers:
            for index, piece in enumerate(self._geometry.pieces):
                item = ITEM_BYTES[piece.slot.dtype]
                part = flat[piece.slot.name][piece.start // item : (piece.start + piece.length) // item]
                begin = piece.slot.offset + piece.start
                writers.put(index, part, self._tensors[begin : begin + piece.length])
        return fingerprint.tree(checksums)

    def _ready(self, index: int, checksum: int) -> None:
        self._check()
        self._header.ready(index, checksum)
        for extra in self._geometry.due.get(index, ()):
            self._header.extra_ready(extra, self._gather(extra))

    def _encode(self, base: int) -> None:
        begin, capacity = self._geometry.delta_offset, self._geometry.delta_capacity
        place, named = self._view[begin : begin + capacity], self._owner.fingerprint(base)
        old = self._owner.view(base)
        self.delta = encode(old, self._tensors, place, base_fingerprint=named, each_frame=self._check)
        if self.delta:
            length = self.delta.length
            self._header.delta_ready(length, xxhash.xxh3_64_intdigest(place[:length]), named)

    def _flat(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        layout = self._geometry.layout
        missing = [slot.name for slot in layout.slots if slot.name not in tensors]
        extra = [name for name in tensors if name not in layout.by_name]
        if missing or extra:
            raise LayoutError(f"the tensors do not fit the layout: missing {missing}, unexpected {extra}")
        return {slot.name: _flattened(tensors[slot.name], slot) for slot in layout.slots}

    def _gather(self, index: int) -> int:
        """Checksum over the bytes of an extra, which are copied side by side if it is a packed one."""
        extra = self._geometry.extras[index]
        packed, digest = extra.place != NOT_PACKED, xxhash.xxh3_64()
        at = self._geometry.pack_offset + extra.place
        for gather in extra.gathers:
            shape, strides = (gather.runs, gather.run_bytes), (gather.pitch, 1)
            runs: np.ndarray = np.ndarray(shape, np.uint8, self._tensors, gather.offset, strides)
            if packed:
                place = self._view[at : at + gather.nbytes]
                np.frombuffer(place, np.uint8).reshape(shape)[...] = runs
                digest.update(place)
                at += gather.nbytes
            else:
                for run in runs:
                    digest.update(run)
        return digest.intdigest()


def _flattened(tensor: Any, slot: TensorSlot) -> Any:
    elements = slot.nbytes // ITEM_BYTES[slot.dtype]
    if math.prod(tensor.shape) != elements:
        raise LayoutError(f"tensor {slot.name} has shape {list(tensor.shape)}; {list(slot.shape)} is expected")
    return tensor.reshape(-1)
