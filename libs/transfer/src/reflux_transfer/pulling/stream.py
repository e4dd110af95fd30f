"""Follows arenas while they are filled: pulls what is ready, verifies it in cache, and ends when all are sealed."""

import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import xxhash

from reflux_transfer import fingerprint
from reflux_transfer.arenas.geometry import NOT_PACKED
from reflux_transfer.backends.base import TransferBackend
from reflux_transfer.errors import ChecksumMismatch, ReadCancelled, ReadDeadlineExceeded
from reflux_transfer.pulling.report import PullReport
from reflux_transfer.pulling.source import ArenaReader, RemoteSource
from reflux_transfer.pulling.steps import Cover, Direct, Runs, Step, steps
from reflux_transfer.pulling.whole import Move
from reflux_transfer.regions import LocalRegion

_NAP_SECONDS = 0.0005
_BATCH_BYTES = 4 << 20
"""Neighbouring small pieces are read at once up to this size: it stays in the cache until it is verified."""


def follow(
    backend: TransferBackend,
    remotes: Sequence[RemoteSource],
    local: LocalRegion,
    transfers: Sequence[Move],
    *,
    deadline_seconds: float,
    cancelled: Callable[[], bool] = lambda: False,
) -> PullReport:
    """Pulls and verifies the transfers of all sources; blocks until the sources are sealed, so call it in a thread.

    `local` is this rank's tensors area. Raises `GenerationGone`, `ChecksumMismatch` naming the tensor, `ReadCancelled`
    soon after `cancelled()` turns true, `LayoutError` for transfers that do not fit a source, and what `read` raises.
    The local region is to be thrown away after an error.
    """
    start = time.monotonic()
    pulls: list[_Pull] = []
    by_rank = {remote.rank: [move for move in transfers if move.source_rank == remote.rank] for remote in remotes}
    unknown = {move.source_rank for move in transfers} - set(by_rank)
    if unknown or len(by_rank) != len(remotes):
        raise ValueError(f"each source rank is to be given once; missing are {sorted(unknown)}")
    try:
        for remote in sorted(remotes, key=lambda remote: remote.rank):
            reader = ArenaReader(backend, remote, start + deadline_seconds)
            pulls.append(_Pull(backend, reader, local, by_rank[remote.rank]))
        _run(pulls, start + deadline_seconds, cancelled)
    finally:
        for pull in pulls:
            pull.close()
    return _report(pulls, transfers, time.monotonic() - start)


def _run(pulls: Sequence["_Pull"], end: float, cancelled: Callable[[], bool]) -> None:
    waiting = list(pulls)
    while waiting:
        progress = False
        for pull in list(waiting):
            if cancelled():
                raise ReadCancelled(f"the pull was cancelled before {pull.next_name}")
            if pull.advance():
                progress = True
            if pull.complete:
                waiting.remove(pull)
        if waiting and not progress:
            if time.monotonic() > end:
                raise ReadDeadlineExceeded(f"the source had not written {waiting[0].next_name} in time")
            time.sleep(_NAP_SECONDS)


def _report(pulls: Sequence["_Pull"], transfers: Sequence[Move], seconds: float) -> PullReport:
    headers = [pull.reader.header for pull in pulls]
    named = {header.version for header in headers}
    if len(headers) == 1 or (len(named) == 1 and 0 not in named):
        version = headers[0].version or headers[0].fingerprint
    else:
        version = fingerprint.tree(header.fingerprint for header in headers)
    same = len(pulls) == 1 and all(move.source_offset == move.target_offset for move in transfers)
    whole = same and pulls[0].direct == headers[0].pieces
    return PullReport(
        sum(pull.bytes for pull in pulls),
        sum(pull.slices for pull in pulls),
        seconds,
        sum(pull.reader.seconds for pull in pulls),
        version,
        headers[0].slice_bytes if whole else 0,
        tuple(pulls[0].reader.checksums[: headers[0].pieces].tolist()) if whole else (),
    )


class _Pull:
    """The steps of one source."""

    def __init__(
        self, backend: TransferBackend, reader: ArenaReader, local: LocalRegion, moves: Sequence[Move]
    ) -> None:
        self.reader, self.bytes, self.slices, self.direct = reader, 0, 0, 0
        self.complete = False
        self._backend, self._local = backend, local
        self._steps: deque[Step] = deque()
        self._scratch: LocalRegion | None = None
        self._steps.extend(steps(reader.rows, reader.header.pieces, moves))
        scratch = max((_scratch_bytes(step) for step in self._steps), default=0)
        if scratch:
            self._scratch = backend.register(np.zeros(scratch, np.uint8))

    @property
    def next_name(self) -> str:
        """The tensor that is pulled next, for errors."""
        return self._steps[0].tensor if self._steps else "the end"

    def close(self) -> None:
        """Frees what the pull registered."""
        self.reader.close()
        if self._scratch:
            self._backend.unregister(self._scratch)

    def advance(self) -> bool:
        """Looks at the header and pulls what is ready; False when there was nothing."""
        ended = not self._steps
        self.reader.refresh()
        if ended and self.reader.sealed:
            self._check_fingerprint()
            self.complete = True
            return True
        before = len(self._steps)
        try:
            while self._steps and self._ready(self._steps[0]):
                self._pull(self._steps[0])
        except ChecksumMismatch:
            self.reader.refresh()  # a generation that was overwritten is gone, not damaged
            raise
        return len(self._steps) < before

    def _ready(self, step: Step) -> bool:
        header = self.reader.header
        return step.extra < header.ready_extras if isinstance(step, Runs) else step.piece < header.ready_pieces

    def _pull(self, step: Step) -> None:
        if isinstance(step, Direct):
            self._pull_direct(step)
            return
        self._steps.popleft()
        if isinstance(step, Cover):
            self._pull_cover(step)
        elif step.packed_at != NOT_PACKED:
            self._pull_packed(step)
        else:
            self._pull_runs(step)

    def _pull_direct(self, first: Direct) -> None:
        batch = [first]
        self._steps.popleft()
        while self._steps:
            step = self._steps[0]
            if not (isinstance(step, Direct) and step.joins and self._ready(step)):
                break
            if step.local_offset + step.length - first.local_offset > _BATCH_BYTES:
                break
            batch.append(step)
            self._steps.popleft()
        length = batch[-1].local_offset + batch[-1].length - first.local_offset
        self._read(first.remote_offset, self._local, first.local_offset, length)
        for step in batch:
            self._verify(step.tensor, step.piece, self._local, step.local_offset, step.length)
        self.direct += len(batch)

    def _pull_cover(self, step: Cover) -> None:
        assert self._scratch
        self._read(step.remote_offset, self._scratch, 0, step.length)
        self._verify(step.tensor, step.piece, self._scratch, 0, step.length)
        for skip, local_offset, length in step.copies:
            self._local.view[local_offset : local_offset + length] = self._scratch.view[skip : skip + length]

    def _pull_packed(self, step: Runs) -> None:
        header, length = self.reader.header, step.run_bytes * step.runs
        remote = header.pack_offset + step.packed_at - header.tensors_offset
        if step.runs == 1 or step.local_pitch == step.run_bytes:
            self._read(remote, self._local, step.local_offset, length)
            self._verify(step.tensor, header.pieces + step.extra, self._local, step.local_offset, length)
            return
        assert self._scratch
        self._read(remote, self._scratch, 0, length)
        self._verify(step.tensor, header.pieces + step.extra, self._scratch, 0, length)
        shape = (step.runs, step.run_bytes)
        place = np.ndarray(shape, np.uint8, self._local.view, step.local_offset, (step.local_pitch, 1))
        place[...] = np.frombuffer(self._scratch.view[:length], np.uint8).reshape(shape)

    def _pull_runs(self, step: Runs) -> None:
        digest = xxhash.xxh3_64()
        for run in range(step.runs):
            local = step.local_offset + run * step.local_pitch
            self._read(step.remote_offset + run * step.remote_pitch, self._local, local, step.run_bytes)
            digest.update(self._local.view[local : local + step.run_bytes])
        index = self.reader.header.pieces + step.extra
        self._compare(step.tensor, index, step.local_offset, step.run_bytes * step.runs, digest.intdigest())

    def _read(self, remote_offset: int, local: LocalRegion, local_offset: int, length: int) -> None:
        self.reader.read(self.reader.header.tensors_offset + remote_offset, local, local_offset, length)
        self.bytes += length

    def _verify(self, tensor: str, index: int, region: LocalRegion, offset: int, length: int) -> None:
        actual = xxhash.xxh3_64_intdigest(region.view[offset : offset + length])
        self._compare(tensor, index, offset, length, actual)

    def _compare(self, tensor: str, index: int, offset: int, length: int, actual: int) -> None:
        expected = int(self.reader.checksums[index])
        self.slices += 1
        if actual != expected:
            raise ChecksumMismatch(tensor, offset, length, expected, actual)

    def _check_fingerprint(self) -> None:
        header = self.reader.header
        own = fingerprint.tree(self.reader.checksums[: header.pieces].tolist())
        if own != header.fingerprint:
            raise ChecksumMismatch("the table of checksums", 0, 8 * header.pieces, header.fingerprint, own)


def _scratch_bytes(step: Step) -> int:
    if isinstance(step, Cover):
        return step.length
    if isinstance(step, Runs) and step.packed_at != NOT_PACKED and step.runs > 1:
        return step.run_bytes * step.runs if step.local_pitch != step.run_bytes else 0
    return 0
