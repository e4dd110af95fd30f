"""Layouts and slices as messages of the broker's protocol, and which of its calls may be repeated."""

from collections.abc import Iterable

from reflux.common.v1 import common_pb2
from reflux.weight_broker.v1 import weight_broker_service_pb2 as pb
from reflux_transfer.layout import Layout
from reflux_transfer.pull import Slice

_SERVICE = "reflux.weight_broker.v1.WeightBrokerService"
RETRY = tuple(f"{_SERVICE}/{name}" for name in ("RegisterReplica", "AckVersion", "BeginVersion", "GetVersion"))
"""For `open_channel(retry=...)`: all of these are idempotent."""


def to_slots(layout: Layout) -> list[common_pb2.TensorSlot]:
    """The wire form of a layout."""
    return [
        common_pb2.TensorSlot(name=s.name, shape=s.shape, dtype=s.dtype, offset_bytes=s.offset, length_bytes=s.nbytes)
        for s in layout.slots
    ]


def to_slices(slices: Iterable[pb.Slice]) -> list[Slice]:
    """The plan of a PREPARE event."""
    return [Slice(s.name, s.remote_offset_bytes, s.local_offset_bytes, s.length_bytes, s.checksum) for s in slices]
