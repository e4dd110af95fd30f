"""Owns the first page of an arena: which generation it holds and how much of it is ready, written in place while others
read it one-sided.

Format, little-endian u64 words in the order of the fields of `Header`, from byte 0; tag and pack base of each packing
from byte 512; the reason of a failure as UTF-8 from byte 1024. The owner writes the words of the generation first when
it claims an arena and data last, then `ready_pieces` after the pieces: a reader that reads the header, then data, then
the header again and finds the same generation has read bytes of that generation. Aligned words are single stores; x86
keeps their order, elsewhere the fence of `_store` does.
"""

import threading
from dataclasses import astuple, dataclass, fields
from enum import IntEnum

import numpy as np

from reflux_transfer.arenas.geometry import HEADER_BYTES, MAX_PACKINGS, Geometry
from reflux_transfer.errors import GenerationGone, WrongHandle

_MAGIC = 0x31414E455241_5852  # "RXARENA1"
_PACKINGS = slice(512, 512 + 16 * MAX_PACKINGS)
_REASON = slice(1024, HEADER_BYTES)


class State(IntEnum):
    """What the bytes of a generation are worth."""

    EMPTY = 0
    STAGING = 1
    SEALED = 2
    FAILED = 3
    WITHDRAWN = 4


@dataclass(frozen=True, slots=True)
class Header:
    """One reading of a header. Offsets are bytes inside the region; `generation_again` repeats `generation`."""

    magic: int
    generation: int
    state: int
    slice_bytes: int
    ready_pieces: int
    pieces: int
    ready_extras: int
    extras: int
    generation_again: int
    fingerprint: int
    """Tree over the checksums of all pieces; set when the state is SEALED."""
    version: int
    """Fingerprint of the whole version, when the owner knows it: differs from `fingerprint` where it holds a part."""
    table_offset: int
    rows_offset: int
    pack_offset: int
    delta_offset: int
    delta_bytes: int
    """Length of the delta of this generation; 0 without one."""
    delta_checksum: int
    delta_base: int
    """Fingerprint of the weights that the delta is made against."""
    tensors_offset: int
    packings: int
    reason_bytes: int

    @classmethod
    def parse(cls, page: memoryview) -> "Header":
        """Reads the first bytes of a region. Raises `WrongHandle` when they are no header."""
        header = cls(*np.frombuffer(page[:READ_BYTES], "<u8").tolist())
        if header.magic != _MAGIC:
            raise WrongHandle("the region has no header of a weight arena")
        return header

    def pack_base(self, tag: int, page: memoryview) -> int | None:
        """Where the bytes that are packed for a plan begin in the pack area; none if the arena is not made for it."""
        pairs = np.frombuffer(page[_PACKINGS], "<u8").reshape(-1, 2)[: self.packings].tolist()
        return dict(pairs).get(tag)

    def check(self, generation: int, page: memoryview) -> None:
        """Raises `GenerationGone` unless the arena holds the generation, complete or being filled."""
        if (self.generation, self.generation_again) != (generation, generation):
            raise GenerationGone(f"generation {generation} was overwritten by generation {self.generation_again}")
        if self.state not in (State.STAGING, State.SEALED):
            reason = bytes(page[_REASON])[: self.reason_bytes].decode(errors="replace")
            names = {state.value: state.name.lower() for state in State}
            raise GenerationGone(f"generation {generation} is {names.get(self.state, self.state)}: {reason}")


_WORD = {field.name: index for index, field in enumerate(fields(Header))}
READ_BYTES = 8 * len(_WORD)


class OwnedHeader:
    """The owner's side; one thread at a time writes."""

    def __init__(self, view: memoryview, geometry: Geometry) -> None:
        self._page, self._geometry = view[:HEADER_BYTES], geometry
        self._words = np.frombuffer(self._page, "<u8")
        count = len(geometry.rows)
        self._table = np.frombuffer(view[geometry.table_offset : geometry.table_offset + 8 * count], "<u8")
        self._fence = threading.Lock()
        rows = view[geometry.rows_offset : geometry.rows_offset + geometry.rows.nbytes]
        np.frombuffer(rows, "<u8")[:] = geometry.rows.reshape(-1)
        pairs = [(packing.tag, base) for packing, base in zip(geometry.packings, geometry.pack_bases, strict=True)]
        np.frombuffer(self._page[_PACKINGS], "<u8").reshape(-1, 2)[: len(pairs)] = np.array(pairs, "<u8").reshape(-1, 2)
        first = Header(_MAGIC, 0, State.EMPTY, geometry.slice_bytes, 0, len(geometry.pieces), 0, len(geometry.extras),
                       0, 0, 0, geometry.table_offset, geometry.rows_offset, geometry.pack_offset,
                       geometry.delta_offset, 0, 0, 0, geometry.tensors_offset, len(geometry.packings), 0)  # fmt: skip
        self._words[: len(_WORD)] = astuple(first)

    @property
    def generation(self) -> int:
        """The generation that the arena holds or held last."""
        return int(self._words[_WORD["generation"]])

    @property
    def fingerprint(self) -> int:
        """That of the generation once it is sealed."""
        return int(self._words[_WORD["fingerprint"]])

    @property
    def state(self) -> State:
        """What it is worth."""
        return State(int(self._words[_WORD["state"]]))

    def claim(self, generation: int) -> None:
        """Begins a generation. From here on readers of the one before find it gone."""
        self._store(generation_again=generation)
        self._store(ready_pieces=0, ready_extras=0, fingerprint=0, version=0)
        self._store(delta_bytes=0, delta_checksum=0, delta_base=0, reason_bytes=0)
        self._store(state=State.STAGING)
        self._store(generation=generation)

    def ready(self, index: int, checksum: int) -> None:
        """Piece `index` lies in place; pieces become ready in their order."""
        self._table[index] = checksum
        self._store(ready_pieces=index + 1)

    def extra_ready(self, index: int, checksum: int) -> None:
        """The same for extras."""
        self._table[len(self._geometry.pieces) + index] = checksum
        self._store(ready_extras=index + 1)

    def delta_ready(self, length: int, checksum: int, base: int) -> None:
        """A delta of `length` bytes lies in its place."""
        self._store(delta_checksum=checksum, delta_base=base)
        self._store(delta_bytes=length)

    def seal(self, fingerprint: int, version: int = 0) -> None:
        """The generation is complete and stays as it is."""
        self._store(fingerprint=fingerprint, version=version)
        self._store(state=State.SEALED)

    def end(self, state: State, reason: str) -> None:
        """The generation is FAILED or WITHDRAWN; readers get the reason."""
        text = reason.encode()[: _REASON.stop - _REASON.start]
        self._page[_REASON.start : _REASON.start + len(text)] = text
        self._store(reason_bytes=len(text))
        self._store(state=state)

    def _store(self, **values: int) -> None:
        with self._fence:  # orders the stores before this one on processors that would not
            for name, value in values.items():
                self._words[_WORD[name]] = value
