"""Pulls a delta and rebuilds the weights from the base that this process holds."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import xxhash

from reflux_transfer import fingerprint
from reflux_transfer.arenas.header import version_of
from reflux_transfer.backends.base import TransferBackend
from reflux_transfer.delta.codec import decode
from reflux_transfer.errors import BaseMismatch, ChecksumMismatch, DeltaDamaged, ReadCancelled
from reflux_transfer.layout import Layout
from reflux_transfer.pulling.report import PullReport
from reflux_transfer.pulling.source import ArenaReader, RemoteSource, discard
from reflux_transfer.pulling.stream import follow
from reflux_transfer.pulling.whole import whole
from reflux_transfer.regions import LocalRegion

_NAP_SECONDS = 0.001
_READ_BYTES = 4 << 20


@dataclass(frozen=True)
class Base:
    """Weights of this process that a delta may stand on: tensors of `layout` in `view`. `fingerprint` 0 is unknown."""

    layout: Layout
    view: memoryview
    fingerprint: int


def follow_delta(
    backend: TransferBackend,
    remote: RemoteSource,
    local: LocalRegion,
    base: Base,
    *,
    deadline_seconds: float,
    cancelled: Callable[[], bool] = lambda: False,
) -> PullReport:
    """Waits until the generation is sealed, pulls its delta and applies it to `base`, which has the local layout.

    The base may lie in the local region's own memory. A generation without a delta, because it would have been too
    dense, is pulled in full. Raises `BaseMismatch` before it writes anything: pull in full then. `DeltaDamaged` and
    what `follow` raises leave unknown bytes in the local region. `bytes` of the report are those of the delta.
    """
    start = time.monotonic()
    with ExitStack() as opened:
        reader = ArenaReader(backend, remote, start + deadline_seconds)
        opened.callback(reader.close)

        def check() -> None:
            if cancelled():
                raise ReadCancelled(f"the pull of a delta was cancelled before {reader.reaching}")
            reader.left()

        _await_sealed(reader, check)
        header = reader.header
        if header.delta_bytes:
            if header.delta_base != base.fingerprint:
                raise BaseMismatch(
                    f"the delta is against {header.delta_base:016x}, the weights here are {base.fingerprint:016x}"
                )
            reader.reaching = "the end of the delta"
            encoded = _read(backend, reader, check)
            target = local.view[: len(base.view)]
            decode(encoded, base.view, target, base_fingerprint=base.fingerprint, each_frame=check)
            checksums = _verified(reader, local, base.layout, check)
            reader.refresh()  # the generation was the same until the end
            seconds, version = time.monotonic() - start, version_of([header])
            return PullReport(header.delta_bytes, len(checksums), seconds, version, header.slice_bytes, checksums)
    left = deadline_seconds - (time.monotonic() - start)
    return follow(backend, [remote], local, whole(base.layout), deadline_seconds=left, cancelled=cancelled)


def _await_sealed(reader: ArenaReader, check: Callable[[], None]) -> None:
    reader.reaching = "the end of the staging"
    reader.refresh()
    while not reader.sealed:
        check()
        time.sleep(_NAP_SECONDS)
        reader.refresh()


def _read(backend: TransferBackend, reader: ArenaReader, check: Callable[[], None]) -> memoryview:
    header = reader.header
    memory = backend.register(np.zeros(header.delta_bytes, np.uint8))
    try:
        for done in range(0, header.delta_bytes, _READ_BYTES):
            check()
            reader.read(header.delta_offset + done, memory, done, min(_READ_BYTES, header.delta_bytes - done))
    finally:
        discard(backend, memory)
    actual = xxhash.xxh3_64_intdigest(memory.view)
    if actual != header.delta_checksum:
        reader.refresh()  # a generation that was overwritten is gone, not damaged
        raise ChecksumMismatch("the delta", 0, header.delta_bytes, header.delta_checksum, actual)
    return memory.view


def _verified(reader: ArenaReader, local: LocalRegion, layout: Layout, check: Callable[[], None]) -> tuple[int, ...]:
    """Checksums of what the delta made, which are the published ones."""
    header, found = reader.header, list[int]()
    ours = fingerprint.piece_checksums(local.view, layout, header.slice_bytes)
    expected = reader.checksums[: header.pieces].tolist()
    for piece, actual, published in zip(layout.pieces(header.slice_bytes), ours, expected, strict=False):
        check()
        found.append(actual)
        if actual != published:
            reader.refresh()  # a generation that was overwritten is gone, not damaged
            raise DeltaDamaged(f"{piece.slot.name} is {actual:016x} after the delta, published was {published:016x}")
    if fingerprint.tree(found) != header.fingerprint:
        reader.refresh()
        raise DeltaDamaged("the weights after the delta have another layout than the published ones")
    return tuple(found)
