"""Owns the first page of an arena: which generation it holds and how much of it is ready, written in place while others
read it one-sided.

Format, little-endian u64 words in the order of the fields of `Header`, from byte 0; tag and pack base of each packing
from byte 512; the reason of a failure as UTF-8 from byte 1024. The owner writes the words of the generation first when
it claims an arena and data last, then `ready_pieces` after the pieces: a reader that reads the header, then data, then
the header again and finds the same generation has read bytes of that generation. Aligned words are single stores; x86
keeps their order, elsewhere the fence of `_store` does. While a generation is SEALED its words stay as they are, and
`seal` is their checksum: what such a header says was not damaged on the way.
"""

import threading
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from enum import IntEnum

import numpy as np
import xxhash

from reflux_transfer import fingerprint as fingerprints
from reflux_transfer.arenas.geometry import HEADER_BYTES, MAX_PACKINGS, ROW_WORDS, Geometry
from reflux_transfer.errors import ChecksumMismatch, GenerationGone, WrongHandle

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
    rows_checksum: int
    """xxh3_64 of the descriptions of pieces and extras."""
    pack_offset: int
    delta_offset: int
    delta_bytes: int
    """Length of the delta of this generation; 0 without one."""
    delta_checksum: int
    delta_base: int
    """Fingerprint of the weights that the delta is made against."""
    tensors_offset: int
    packings: int
    seal: int
    """xxh3_64 of the words before this one, when the state is SEALED."""
    reason_bytes: int

    @classmethod
    def parse(cls, page: memoryview) -> "Header":
        """Reads the first bytes of a region. Raises `WrongHandle` when they are no header."""
        header = cls(*np.frombuffer(page[:READ_BYTES], "<u8").tolist())
        if header.magic != _MAGIC:
            raise WrongHandle("the region has no header of a weight arena")
        return header

    @property
    def intact(self) -> bool:
        """Whether its words are those of its seal; always true while there is none."""
        return self.state != State.SEALED or self.seal == _seal(astuple(self))

    def pack_base(self, tag: int, page: memoryview) -> int | None:
        """Where the bytes that are packed for a plan begin in the pack area; none if the arena is not made for it."""
        pairs = np.frombuffer(page[_PACKINGS], "<u8").reshape(-1, 2)[: self.packings].tolist()
        return dict(pairs).get(tag)

    def check_intact(self) -> None:
        """Raises `ChecksumMismatch` when a word of a sealed header was damaged."""
        if not self.intact:
            raise ChecksumMismatch("the header", 0, READ_BYTES, self.seal, _seal(astuple(self)))

    def check_bounds(self, region_bytes: int) -> None:
        """Raises `WrongHandle` unless all that it names lies in the region, so that nothing larger is allocated."""
        count = self.pieces + self.extras
        ends = {
            "checksums": self.table_offset + 8 * count,
            "descriptions of pieces": self.rows_offset + 8 * ROW_WORDS * count,
            "packed runs": self.pack_offset,
            "delta": self.delta_offset + self.delta_bytes,
            "tensors": self.tensors_offset,
        }
        outside = [name for name, end in ends.items() if end > region_bytes]
        if outside:
            raise WrongHandle(f"the arena's header names {', '.join(outside)} outside of its {region_bytes} bytes")
        ready = self.ready_pieces <= self.pieces and self.ready_extras <= self.extras
        if not (ready and self.pieces and self.slice_bytes and self.packings <= MAX_PACKINGS):
            raise WrongHandle("the arena's header has counts that cannot be")

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


def version_of(headers: Sequence[Header]) -> int:
    """Fingerprint of the version that sealed headers, in the order of ranks, hold the parts of.

    It is the one that their owner names, a replica that has pulled its parts from others, else it is made of theirs.
    """
    named = {header.version for header in headers}
    if len(named) == 1 and 0 not in named:
        return named.pop()
    return headers[0].fingerprint if len(headers) == 1 else fingerprints.tree(header.fingerprint for header in headers)


def _seal(words: Sequence[int]) -> int:
    return xxhash.xxh3_64_intdigest(np.array(words[: _WORD["seal"]], "<u8").tobytes())


class OwnedHeader:
    """The owner's side. One thread fills a generation; `fail` and `withdraw` may come from any other."""

    def __init__(self, view: memoryview, geometry: Geometry) -> None:
        self._page, self._geometry = view[:HEADER_BYTES], geometry
        self._words = np.frombuffer(self._page, "<u8")
        count = len(geometry.rows)
        self._table = np.frombuffer(view[geometry.table_offset : geometry.table_offset + 8 * count], "<u8")
        self._fence, self._ending = threading.Lock(), threading.Lock()
        rows = view[geometry.rows_offset : geometry.rows_offset + geometry.rows.nbytes]
        np.frombuffer(rows, "<u8")[:] = geometry.rows.reshape(-1)
        pairs = [(packing.tag, base) for packing, base in zip(geometry.packings, geometry.pack_bases, strict=True)]
        np.frombuffer(self._page[_PACKINGS], "<u8").reshape(-1, 2)[: len(pairs)] = np.array(pairs, "<u8").reshape(-1, 2)
        described, packed = xxhash.xxh3_64_intdigest(rows), len(geometry.packings)
        first = Header(_MAGIC, 0, State.EMPTY, geometry.slice_bytes, 0, len(geometry.pieces), 0, len(geometry.extras),
                       0, 0, 0, geometry.table_offset, geometry.rows_offset, described, geometry.pack_offset,
                       geometry.delta_offset, 0, 0, 0, geometry.tensors_offset, packed, 0, 0)  # fmt: skip
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
    def version(self) -> int:
        """Fingerprint of the whole version that the generation is of, 0 unless it is sealed."""
        return int(self._words[_WORD["version"]]) if self.state == State.SEALED else 0

    @property
    def state(self) -> State:
        """What it is worth."""
        return State(int(self._words[_WORD["state"]]))

    def claim(self, generation: int) -> None:
        """Begins a generation. From here on readers of the one before find it gone."""
        with self._ending:
            self._store(generation_again=generation)
            self._store(ready_pieces=0, ready_extras=0, fingerprint=0, version=0)
            self._store(delta_bytes=0, delta_checksum=0, delta_base=0, reason_bytes=0)
            self._store(state=State.STAGING)
            self._store(generation=generation)

    def ready(self, index: int, checksum: int) -> None:
        """Piece `index` lies in place; pieces become ready in their order."""
        self._table[index] = checksum
        self._store(ready_pieces=index + 1)

    def all_ready(self, checksums: Sequence[int]) -> None:
        """All pieces lie in place."""
        self._table[: len(checksums)] = np.fromiter(checksums, "<u8", len(checksums))
        self._store(ready_pieces=len(checksums))

    def extra_ready(self, index: int, checksum: int) -> None:
        """The same for extras."""
        self._table[len(self._geometry.pieces) + index] = checksum
        self._store(ready_extras=index + 1)

    def delta_ready(self, length: int, checksum: int, base: int) -> None:
        """A delta of `length` bytes lies in its place."""
        self._store(delta_checksum=checksum, delta_base=base)
        self._store(delta_bytes=length)

    def check_filling(self, generation: int) -> None:
        """Raises `GenerationGone` with the reason unless the generation is being filled."""
        if self.generation != generation or self.state != State.STAGING:
            Header.parse(self._page).check(generation, self._page)
            raise GenerationGone(f"generation {generation} is sealed")

    def seal(self, fingerprint: int, version: int = 0) -> None:
        """The generation is complete and stays as it is. Raises `GenerationGone` when it was ended before."""
        with self._ending:
            self.check_filling(self.generation)
            self._store(fingerprint=fingerprint, version=version)
            words = self._words[: len(_WORD)].copy()
            words[_WORD["state"]] = State.SEALED
            self._store(seal=_seal(words.tolist()))
            self._store(state=State.SEALED)

    def fail(self, reason: str) -> None:
        """A generation that is being filled FAILED; without effect on others."""
        with self._ending:
            if self.state == State.STAGING:
                self._end(State.FAILED, reason)

    def withdraw(self, reason: str) -> None:
        """The generation is WITHDRAWN, whatever it was; who still fills it finds out by `check_filling`."""
        with self._ending:
            self._end(State.WITHDRAWN, reason)

    def _end(self, state: State, reason: str) -> None:
        text = reason.encode()[: _REASON.stop - _REASON.start]
        self._page[_REASON.start : _REASON.start + len(text)] = text
        self._store(reason_bytes=len(text))
        self._store(state=state)

    def _store(self, **values: int) -> None:
        """Stores words that a reader sees no earlier than anything that this thread stored before.

        Leaving a lock releases: what was stored before is visible first. Entering one acquires: what follows stays
        behind. Neither alone is enough, stores ahead of a lock may sink into it (ARM), so it is left and entered again.
        """
        with self._fence:
            pass
        with self._fence:
            for name, value in values.items():
                self._words[_WORD[name]] = value
