"""A reader's view of one arena: its header and checksums, read again and again while the owner fills it."""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from reflux_transfer.arenas.geometry import HEADER_BYTES, ROW_WORDS
from reflux_transfer.arenas.header import READ_BYTES, Header, State
from reflux_transfer.backends.base import TransferBackend
from reflux_transfer.errors import ChecksumMismatch, ReadDeadlineExceeded, RegionBusy, WrongHandle
from reflux_transfer.regions import LocalRegion, RemoteRegion, Run

_READ_SECONDS = 10.0
"""A read that takes longer than this is an error: a path that slow is broken, and a cancelled pull has to end."""


@dataclass(frozen=True)
class RemoteSource:
    """An arena to pull from: the opened region, the generation that was offered, and the rank that it holds."""

    region: RemoteRegion
    generation: int
    rank: int = 0


class ArenaReader:
    """Reads one source until a monotonic time `end`. Every method raises what `TransferBackend.read` raises."""

    def __init__(self, backend: TransferBackend, source: RemoteSource, end: float) -> None:
        self.rank = source.rank
        self.reaching = "the header of the source"
        """What is waited for, for the text of a deadline."""
        self._backend, self._source, self._end = backend, source, end
        page = self._peek(0, HEADER_BYTES)
        self.header = Header.parse(page)
        self.header.check(source.generation, page)
        self.header.check_bounds(source.region.length)
        self._page = page
        count = self.header.pieces + self.header.extras
        found = self._peek(self.header.rows_offset, 8 * ROW_WORDS * count)
        if (actual := xxhash.xxh3_64_intdigest(found)) != self.header.rows_checksum:
            raise ChecksumMismatch("the descriptions of pieces", 0, len(found), self.header.rows_checksum, actual)
        self.rows: np.ndarray = np.frombuffer(found, "<u8").reshape(count, ROW_WORDS)
        """What each piece and extra covers, see `Geometry.rows`."""
        self._memory = backend.register(np.zeros(HEADER_BYTES + 8 * count, np.uint8))
        self.checksums = np.frombuffer(self._memory.view[HEADER_BYTES:], "<u8")
        """Valid for the pieces and extras that are ready."""
        self._known = [0, 0]

    def close(self) -> None:
        """Frees the memory of the header and the checksums; the region stays open."""
        discard(self._backend, self._memory)

    @property
    def sealed(self) -> bool:
        """Whether the last refresh saw the generation complete."""
        return self.header.state == State.SEALED

    def pack_base(self, tag: int) -> int | None:
        """Where the bytes that are packed for a plan begin; none when the source was not staged for it."""
        return self.header.pack_base(tag, self._page)

    def refresh(self) -> None:
        """Reads the header, then the checksums that became ready.

        What was read before this call belongs to the generation. Raises `GenerationGone`, and `ChecksumMismatch` or
        `WrongHandle` for a header that was damaged.
        """
        header = self._look()
        if not header.intact:
            header = self._look()  # it was sealed while it was read
        header.check_intact()
        header.check_bounds(self._source.region.length)
        if (header.pieces, header.extras) != (self.header.pieces, self.header.extras):
            raise WrongHandle("the arena's header has changed its number of pieces")
        self.header = header
        self._take(0, 0, header.ready_pieces)
        self._take(1, header.pieces, header.ready_extras)

    def left(self) -> float:
        """Seconds for the next read. Raises `ReadDeadlineExceeded` when the time is over."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise ReadDeadlineExceeded(f"the pull did not reach {self.reaching} in time")
        return min(left, _READ_SECONDS)

    def read(self, remote_offset: int, local: LocalRegion, local_offset: int, length: int) -> None:
        """One read, until the end of the pull at most."""
        self._backend.read(self._source.region, remote_offset, local, local_offset, length, self.left())

    def read_runs(self, local: LocalRegion, runs: Sequence[Run]) -> None:
        """Many reads, in few requests where the backend can."""
        self._backend.read_runs(self._source.region, local, runs, self.left())

    def _look(self) -> Header:
        """The header as it is now. Raises `GenerationGone`."""
        self.read(0, self._memory, 0, READ_BYTES)
        header = Header.parse(self._memory.view)
        if header.generation_again != self._source.generation or header.state not in (State.STAGING, State.SEALED):
            self.read(0, self._memory, 0, HEADER_BYTES)  # with the reason
            header = Header.parse(self._memory.view)
        header.check(self._source.generation, self._memory.view[:HEADER_BYTES])
        return header

    def _take(self, kind: int, first: int, ready: int) -> None:
        known = self._known[kind]
        if ready > known:
            offset = 8 * (first + known)
            count = 8 * (ready - known)
            self.read(self.header.table_offset + offset, self._memory, HEADER_BYTES + offset, count)
            self._known[kind] = ready

    def _peek(self, offset: int, length: int) -> memoryview:
        memory = self._backend.register(np.zeros(length, np.uint8))
        try:
            self.read(offset, memory, 0, length)
        finally:
            discard(self._backend, memory)
        return memory.view


def discard(backend: TransferBackend, scratch: LocalRegion) -> None:
    """Unregisters memory that nobody else knows.

    A read that missed its deadline and cannot be called back may still hold it; the backend gives it free later, and
    the error of that read is the one to be told.
    """
    with contextlib.suppress(RegionBusy):
        backend.unregister(scratch)
