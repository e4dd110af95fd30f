"""Owns the fingerprint of weights: xxh3 over the checksums of all pieces, so that nobody needs a second pass."""

from collections.abc import Iterable, Iterator

import numpy as np
import xxhash

from reflux_transfer.layout import SLICE_BYTES, Layout


def tree(checksums: Iterable[int]) -> int:
    """xxh3_64 of the little-endian u64 checksums in their order.

    Over the pieces of a layout it covers every parameter byte; over the ranks of a version it covers all of them.
    """
    return xxhash.xxh3_64_intdigest(np.fromiter(checksums, np.dtype("<u8")).tobytes())


def of(view: memoryview, layout: Layout, slice_bytes: int = SLICE_BYTES) -> int:
    """The fingerprint recomputed from memory; `view` holds the layout's tensors from its first byte on.

    Equal weights give equal numbers in any layout of that order; gaps between tensors do not count.
    """
    return tree(piece_checksums(view, layout, slice_bytes))


def piece_checksums(view: memoryview, layout: Layout, slice_bytes: int = SLICE_BYTES) -> Iterator[int]:
    """xxh3_64 of every piece, in layout order, each when it is asked for."""
    for piece in layout.pieces(slice_bytes):
        begin = piece.slot.offset + piece.start
        yield xxhash.xxh3_64_intdigest(view[begin : begin + piece.length])
