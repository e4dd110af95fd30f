"""Offers of a version, and their JSON form: the routes of foreign engines carry nothing else to their workers."""

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from reflux_transfer.layout import Layout, TensorSlot
from reflux_transfer.pull import Slice


@dataclass(frozen=True)
class Offer:
    """A version that can be pulled: the publisher's region by its handle, and which of its ranges go where."""

    version: int
    epoch: int
    transport: str
    handle: bytes
    slices: tuple[Slice, ...]


def layout_to_json(layout: Layout) -> list[list[Any]]:
    """One [name, shape, dtype, offset, nbytes] per tensor."""
    return [[slot.name, list(slot.shape), slot.dtype, slot.offset, slot.nbytes] for slot in layout.slots]


def layout_from_json(rows: Sequence[Sequence[Any]]) -> Layout:
    """The inverse. Raises `LayoutError` or `ValueError` for anything else."""
    return Layout(tuple(TensorSlot(name, tuple(shape), dtype, at, size) for name, shape, dtype, at, size in rows))


def offer_to_json(offer: Offer) -> str:
    """One line of text, about 80 bytes per slice."""
    slices = [[part.name, part.remote_offset, part.local_offset, part.length, part.checksum] for part in offer.slices]
    fields = {"version": offer.version, "epoch": offer.epoch, "transport": offer.transport, "slices": slices}
    return json.dumps({**fields, "handle": base64.b64encode(offer.handle).decode()}, separators=(",", ":"))


def offer_from_json(text: str) -> Offer:
    """The inverse. Raises `ValueError`, `KeyError` or `TypeError` for anything else."""
    fields = json.loads(text)
    slices = tuple(Slice(*part) for part in fields["slices"])
    handle = base64.b64decode(fields["handle"], validate=True)
    return Offer(int(fields["version"]), int(fields["epoch"]), fields["transport"], handle, slices)
