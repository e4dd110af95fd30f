"""Owns what one rank has to do, as rows: a target rank's transfers, a source rank's pieces, a peer's fetches.

Rows are structured numpy arrays, because one rank of a large model has some 100,000 of them; iteration gives objects.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

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


@dataclass(frozen=True, slots=True)
class Pack:
    """Runs that a source rank gathers, `pitch` apart, into its pack area at `pack_offset`."""

    tensor: str
    bucket: int
    piece: int
    source_offset: int
    run_bytes: int
    runs: int
    pitch: int
    pack_offset: int


@dataclass(frozen=True)
class Transfers:
    """All transfers of one target rank in the order of its reads: by bucket, source and offset. `rows` are TRANSFER,
    their `tensor` an index into `names`."""

    names: tuple[str, ...]
    rows: NDArray[np.void]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Transfer]:
        for tensor, *rest in self.rows.tolist():
            yield Transfer(self.names[tensor], *rest)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all transfers."""
        return int((self.rows["run_bytes"] * self.rows["runs"]).sum())

    @cached_property
    def reads(self) -> int:
        """One-sided reads when what lies side by side at the source is read at once; packed bytes go through a buffer,
        so that only their source matters."""
        return int(np.where(~_continues(self.rows), np.where(self.rows["packed"], 1, self.rows["runs"]), 0).sum())


def _continues(rows: NDArray[np.void]) -> NDArray[np.bool_]:
    """Whether a row goes on where the row before it ends: both sides of a direct one, the source of a packed one."""
    continues = np.zeros(len(rows), bool)
    left, right = rows[:-1], rows[1:]
    same = (left["bucket"] == right["bucket"]) & (left["source_rank"] == right["source_rank"])
    ends = left["source_offset"] + left["run_bytes"] * np.where(right["packed"], left["runs"], 1)
    direct = (left["runs"] == 1) & (right["runs"] == 1) & (left["tensor"] == right["tensor"])
    direct &= left["target_offset"] + left["run_bytes"] == right["target_offset"]
    continues[1:] = same & (ends == right["source_offset"]) & (right["packed"] | direct)
    return continues


@dataclass(frozen=True)
class Pieces:
    """What a source rank publishes. `rows` are PIECE in the order of piece numbers; `pack_offset` is -1 for bytes that
    are read where they lie. A piece with several rows is their bytes one after the other. `count` is the length of the
    checksum table, `pack_bytes` that of the pack area."""

    names: tuple[str, ...]
    rows: NDArray[np.void]
    count: int
    pack_bytes: int

    @property
    def packs(self) -> tuple[Pack, ...]:
        """The gathers."""
        chosen = self.rows[self.rows["pack_offset"] >= 0]
        return tuple(Pack(self.names[tensor], *rest) for tensor, *rest in chosen.tolist())
