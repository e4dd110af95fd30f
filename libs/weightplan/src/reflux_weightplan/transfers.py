"""Owns what one rank has to do, as rows: a target rank's transfers, a source rank's pieces, a peer's fetches.

Rows are structured numpy arrays, because one rank of a large model has some 100,000 of them; iteration gives objects.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TRANSFER = np.dtype(
    [
        ("tensor", "<i4"),
        ("bucket", "<i4"),
        ("source_rank", "<i4"),
        ("piece", "<i4"),
        ("source_offset", "<i8"),
        ("target_offset", "<i8"),
        ("run_bytes", "<i8"),
        ("runs", "<i8"),
        ("source_pitch", "<i8"),
        ("target_pitch", "<i8"),
        ("packed", "?"),
    ]
)

PIECE = np.dtype(
    [
        ("tensor", "<i4"),
        ("bucket", "<i4"),
        ("piece", "<i4"),
        ("source_offset", "<i8"),
        ("run_bytes", "<i8"),
        ("runs", "<i8"),
        ("pitch", "<i8"),
        ("pack_offset", "<i8"),
    ]
)

FETCH = np.dtype(
    [
        ("tensor", "<i4"),
        ("slab", "<i4"),
        ("peer", "<i4"),
        ("offset", "<i8"),
        ("run_bytes", "<i8"),
        ("runs", "<i8"),
        ("pitch", "<i8"),
    ]
)
"""Bytes that lie at the same offset in both regions."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """`runs` runs of `run_bytes` from a source rank into the region of the target rank; offsets and pitches in bytes.

    `source_offset` counts from the start of the source's tensors, or of its pack area when `packed`. `piece` is the row
    of the source's checksum table that covers the bytes; a packed transfer shares it with its neighbours.
    """

    tensor: str
    bucket: int
    source_rank: int
    piece: int
    source_offset: int
    target_offset: int
    run_bytes: int
    runs: int
    source_pitch: int
    target_pitch: int
    packed: bool


@dataclass(frozen=True)
class Transfers:
    """All transfers of one target rank in the order of its reads: by bucket, within it by source, that of the schedule
    first (by number on the relayed route), then by offset. `rows` are TRANSFER, their `tensor` an index into `names`.
    """

    names: tuple[str, ...]
    rows: NDArray[np.void]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Transfer]:
        for tensor, *rest in self.rows.tolist():
            yield Transfer(self.names[tensor], *rest)


@dataclass(frozen=True)
class Pieces:
    """What a source rank publishes. `rows` are PIECE in the order of piece numbers; `pack_offset` is -1 for bytes that
    are read where they lie. A piece with several rows is their bytes one after the other. `pack_bytes` is the length of
    the pack area."""

    rows: NDArray[np.void]
    pack_bytes: int
