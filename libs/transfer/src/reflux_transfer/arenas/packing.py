"""From a plan to what one rank's arena holds: the layout of its tensors, and the extras that a source stages."""

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from reflux_transfer.arenas.geometry import NOT_PACKED, Extra, Gather, Packing
from reflux_transfer.layout import SLICE_BYTES, Layout, TensorSlot
from reflux_weightplan.dtypes import ITEM_BYTES

if TYPE_CHECKING:
    from reflux_weightplan.sides import Side
    from reflux_weightplan.transfers import Pieces


def packing(plan_hash: str, pieces: "Pieces", layout: Layout, slice_bytes: int = SLICE_BYTES) -> Packing:
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
    return Packing(plan_hash, extras, pieces.pack_bytes)


def rank_layout(side: "Side", rank: int) -> Layout:
    """The layout of one rank's tensors area: its parts of the tensors, flat, where the plan expects them.

    Tensors that are interleaved in one local tensor are one slot under their common name.
    """
    region = side.region(rank)
    found: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for kind in np.flatnonzero(side.box_KR[:, rank] >= 0).tolist():
        tensors, nbytes = side.tensors_of_kind(kind), int(side.bytes_KR[kind, rank])
        for index, offset in zip(tensors.tolist(), side.offsets(region, tensors).tolist(), strict=True):
            tensor = side.layout.tensors[index]
            name = tensor.fused if tensor.fused_rows else tensor.name
            found[name].append((offset, nbytes, tensor.dtype))
    slots = []
    for name, parts in found.items():
        nbytes, dtype = sum(part[1] for part in parts), parts[0][2]
        slots.append((min(part[0] for part in parts), name, dtype, nbytes))
    return Layout(
        tuple(
            TensorSlot(name, (nbytes // ITEM_BYTES[dtype],), dtype, offset, nbytes)
            for offset, name, dtype, nbytes in sorted(slots)
        )
    )
