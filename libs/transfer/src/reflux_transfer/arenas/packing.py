"""From a plan to the extras that a source rank stages for it."""

from collections import defaultdict

import xxhash

from reflux_transfer.arenas.geometry import NOT_PACKED, Extra, Gather, Packing
from reflux_transfer.layout import SLICE_BYTES, Layout
from reflux_weightplan.transfers import Pieces


def plan_tag(plan_hash: str) -> int:
    """How an arena names a plan."""
    return xxhash.xxh3_64_intdigest(plan_hash.encode())


def packing(plan_hash: str, pieces: Pieces, layout: Layout, slice_bytes: int = SLICE_BYTES) -> Packing:
    """What the source rank with these `pieces` (of `Expander.pieces`) and this `layout` publishes beside its tensors:
    packed runs, and ranges that are not pieces of the layout anyway.
    """
    known = {(piece.slot.offset + piece.start, piece.length) for piece in layout.pieces(slice_bytes)}
    gathers: dict[int, list[Gather]] = defaultdict(list)
    places: dict[int, int] = {}
    for _, _, piece, offset, run_bytes, runs, pitch, pack_offset in pieces.rows.tolist():
        if pack_offset < 0 and runs == 1 and (offset, run_bytes) in known:
            continue
        gathers[piece].append(Gather(offset, run_bytes, runs, pitch if runs > 1 else 0))
        places.setdefault(piece, NOT_PACKED if pack_offset < 0 else pack_offset)
    extras = tuple(Extra(tuple(found), places[piece]) for piece, found in gathers.items())
    return Packing(plan_tag(plan_hash), extras, pieces.pack_bytes)
