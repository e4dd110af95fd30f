"""Pulls the slices of a plan into a shadow region and verifies each before it counts."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import xxhash

from reflux_transfer.backends.base import TransferBackend
from reflux_transfer.errors import ChecksumMismatch, ReadCancelled, ReadDeadlineExceeded
from reflux_transfer.layout import Layout
from reflux_transfer.regions import LocalRegion, RemoteRegion

_SLICE_SECONDS = 10.0
"""A slice that takes longer than this is an error: a path that slow is broken, and a cancelled pull has to end."""


@dataclass(frozen=True)
class Slice:
    """One contiguous range to copy; offsets are bytes inside the two regions, `checksum` is xxh3_64 of the bytes."""

    name: str
    remote_offset: int
    local_offset: int
    length: int
    checksum: int


@dataclass(frozen=True)
class PullReport:
    """What a pull moved. `read_seconds` is the transport's share of `seconds`; the rest is verification."""

    bytes: int
    slices: int
    seconds: float
    read_seconds: float


def pull(
    backend: TransferBackend,
    remote: RemoteRegion,
    local: LocalRegion,
    slices: Sequence[Slice],
    *,
    deadline_seconds: float,
    cancelled: Callable[[], bool] = lambda: False,
) -> PullReport:
    """Reads and verifies all slices; blocks, so call it in a thread.

    Raises `ChecksumMismatch` naming the slice, `ReadCancelled` soon after `cancelled()` turns true, and what `read`
    raises. The local region is to be thrown away after an error.
    """
    start = time.monotonic()
    end, read_seconds = start + deadline_seconds, 0.0
    for part in slices:
        if cancelled():
            raise ReadCancelled(f"the pull was cancelled before {part.name}")
        before = time.monotonic()
        if before > end:
            raise ReadDeadlineExceeded(f"the pull did not reach {part.name} in {deadline_seconds} s")
        backend.read(
            remote, part.remote_offset, local, part.local_offset, part.length, min(end - before, _SLICE_SECONDS)
        )
        read_seconds += time.monotonic() - before
        # Verified while the slice is still in the processor's cache.
        actual = xxhash.xxh3_64_intdigest(local.view[part.local_offset : part.local_offset + part.length])
        if actual != part.checksum:
            raise ChecksumMismatch(part.name, part.local_offset, part.length, part.checksum, actual)
    total = sum(part.length for part in slices)
    return PullReport(total, len(slices), time.monotonic() - start, read_seconds)


def fingerprint(view: memoryview, layout: Layout) -> int:
    """xxh3_64 over all tensors in layout order, gaps left out: equal weights give equal numbers in any layout of that
    order.
    """
    digest = xxhash.xxh3_64()
    for slot in layout.slots:
        digest.update(view[slot.offset : slot.end])
    return digest.intdigest()
