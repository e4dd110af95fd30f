"""Pulls the steps of one source as they become ready, each verified by its checksum before it counts."""

from collections import deque
from collections.abc import Sequence

import numpy as np
import xxhash

from reflux_transfer import fingerprint
from reflux_transfer.arenas.geometry import plan_tag
from reflux_transfer.backends.base import TransferBackend
from reflux_transfer.errors import ChecksumMismatch
from reflux_transfer.pulling.source import ArenaReader, discard
from reflux_transfer.pulling.steps import Cover, Direct, Main, More, Packed, Runs, steps
from reflux_transfer.pulling.whole import Move
from reflux_transfer.regions import LocalRegion, Run

_BATCH_BYTES = 4 << 20
"""Neighbouring small pieces are read at once up to this size: it stays in the cache until it is verified."""

_TURN_BYTES = 64 << 20
"""After that many bytes the others have their turn: other sources, and whoever wants to cancel."""


class RankPull:
    """Owns what is left to pull from one source."""

    def __init__(
        self,
        backend: TransferBackend,
        reader: ArenaReader,
        local: LocalRegion,
        moves: Sequence[Move],
        *,
        plan_hash: str,
        only_source: bool,
    ) -> None:
        self.reader, self.bytes, self.slices, self.direct = reader, 0, 0, 0
        self.complete = False
        """All steps are done and the source is sealed."""
        self._backend, self._local = backend, local
        found = steps(reader.rows, reader.header.pieces, moves, reader.pack_base(plan_tag(plan_hash)), only_source)
        self._main: deque[Main] = deque(found.pieces)
        self._more: deque[More] = deque(found.extras)
        length = max(
            (step.length for step in (*found.pieces, *found.extras) if isinstance(step, Cover | Packed)), default=0
        )
        self._scratch = backend.register(np.zeros(length, np.uint8)) if length else None

    @property
    def next_name(self) -> str:
        """The tensor that is pulled next, for errors."""
        step = self._main[0] if self._main else self._more[0] if self._more else None
        return step.tensor if step else "the end"

    def close(self) -> None:
        """Frees the scratch memory."""
        if self._scratch:
            discard(self._backend, self._scratch)

    def advance(self) -> bool:
        """Looks at the header, then pulls what is ready; False when there was nothing.

        Raises what `follow` raises.
        """
        ended = not self._main and not self._more
        self.reader.reaching = self.next_name
        self.reader.refresh()
        before = self.slices
        try:
            if not ended:
                self._pull_ready()
            elif self.reader.sealed:
                self._check_table()
                self.complete = True
        except ChecksumMismatch:
            self.reader.refresh()  # a generation that was overwritten is gone, not damaged
            raise
        return self.complete or self.slices > before

    def _pull_ready(self) -> None:
        header, turn = self.reader.header, self.bytes + _TURN_BYTES
        while self._main and self._main[0].piece < header.ready_pieces and self.bytes < turn:
            step = self._main.popleft()
            if isinstance(step, Direct):
                self._pull_direct(step, header.ready_pieces)
            else:
                self._pull_cover(step)
        while self._more and self._more[0].extra < header.ready_extras and self.bytes < turn:
            step = self._more.popleft()
            if isinstance(step, Packed):
                self._pull_packed(step)
            else:
                self._pull_runs(step)

    def _pull_direct(self, first: Direct, ready: int) -> None:
        batch = [first]
        while self._main:
            step = self._main[0]
            if not (isinstance(step, Direct) and step.joins and step.piece < ready):
                break
            if step.local_offset + step.length - first.local_offset > _BATCH_BYTES:
                break
            batch.append(step)
            self._main.popleft()
        length = batch[-1].local_offset + batch[-1].length - first.local_offset
        self._read(self.reader.header.tensors_offset + first.remote_offset, self._local, first.local_offset, length)
        for step in batch:
            self._verify(step.tensor, step.piece, self._local, step.local_offset, step.length)
        self.direct += len(batch)

    def _pull_cover(self, step: Cover) -> None:
        assert self._scratch
        self._read(self.reader.header.tensors_offset + step.remote_offset, self._scratch, 0, step.length)
        self._verify(step.tensor, step.piece, self._scratch, 0, step.length)
        for skip, local_offset, length in step.copies:
            self._local.view[local_offset : local_offset + length] = self._scratch.view[skip : skip + length]

    def _pull_packed(self, step: Packed) -> None:
        assert self._scratch
        header = self.reader.header
        self._read(header.pack_offset + step.place, self._scratch, 0, step.length)
        self._verify(step.tensor, header.pieces + step.extra, self._scratch, 0, step.length)
        for skip, move in step.moves:
            shape, strides = (move.runs, move.run_bytes), (move.target_pitch, 1)
            place: np.ndarray = np.ndarray(shape, np.uint8, self._local.view, move.target_offset, strides)
            found = np.frombuffer(self._scratch.view[skip : skip + move.runs * move.run_bytes], np.uint8)
            place[...] = found.reshape(shape)

    def _pull_runs(self, step: Runs) -> None:
        header, digest = self.reader.header, xxhash.xxh3_64()
        base, size = header.tensors_offset + step.remote_offset, step.run_bytes
        places = [step.local_offset + run * step.local_pitch for run in range(step.runs)]
        self.reader.read_runs(
            self._local, [Run(base + run * step.remote_pitch, place, size) for run, place in enumerate(places)]
        )
        self.bytes += size * step.runs
        for place in places:
            digest.update(self._local.view[place : place + size])
        self._compare(step.tensor, header.pieces + step.extra, step.local_offset, size * step.runs, digest.intdigest())

    def _read(self, remote_offset: int, local: LocalRegion, local_offset: int, length: int) -> None:
        self.reader.read(remote_offset, local, local_offset, length)
        self.bytes += length

    def _verify(self, tensor: str, index: int, region: LocalRegion, offset: int, length: int) -> None:
        actual = xxhash.xxh3_64_intdigest(region.view[offset : offset + length])
        self._compare(tensor, index, offset, length, actual)

    def _compare(self, tensor: str, index: int, offset: int, length: int, actual: int) -> None:
        expected = int(self.reader.checksums[index])
        self.slices += 1
        if actual != expected:
            raise ChecksumMismatch(tensor, offset, length, expected, actual)

    def _check_table(self) -> None:
        header = self.reader.header
        own = fingerprint.tree(self.reader.checksums[: header.pieces].tolist())
        if own != header.fingerprint:
            raise ChecksumMismatch("the table of checksums", 0, 8 * header.pieces, header.fingerprint, own)
