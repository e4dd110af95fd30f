"""Which bytes go where: one source to one replica with the same tensors. Pure."""

from dataclasses import dataclass

from reflux_transfer.layout import Layout
from reflux_transfer.pull import Slice
from reflux_weight_broker.refusals import LayoutMismatch

_NAMED = 5


@dataclass(frozen=True)
class Manifest:
    """What a publisher offers.

    `checksums` has one xxh3_64 per piece of `layout`, cut at `slice_bytes`, in layout order.
    """

    model_id: str
    version: int
    layout: Layout
    checksums: tuple[int, ...]
    slice_bytes: int
    region_handle: bytes
    transport: str
    request_id: str


def check_layouts(source: Layout, destination: Layout, replica: str) -> None:
    """Raises `LayoutMismatch` naming up to five tensors that differ in name, shape or dtype."""
    found = source.differences(destination)
    if found:
        more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        raise LayoutMismatch(
            f"the layout of replica {replica} differs from the publisher's: {', '.join(found[:_NAMED])}{more}"
        )


def plan(manifest: Manifest, destination: Layout, replica: str) -> tuple[Slice, ...]:
    """Slices that write every parameter byte of the destination exactly once.

    Raises `LayoutMismatch` when the layouts differ and `ValueError` when the manifest has not one checksum per slice.
    """
    check_layouts(manifest.layout, destination, replica)
    pieces = list(manifest.layout.pieces(manifest.slice_bytes))
    if len(pieces) != len(manifest.checksums):
        raise ValueError(f"{len(pieces)} slices need as many checksums, not {len(manifest.checksums)}")
    return tuple(
        Slice(
            piece.slot.name,
            piece.slot.offset + piece.start,
            destination.by_name[piece.slot.name].offset + piece.start,
            piece.length,
            checksum,
        )
        for piece, checksum in zip(pieces, manifest.checksums, strict=True)
    )
