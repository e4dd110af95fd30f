"""Layouts on the wire: they travel once, in chunks, and are named by their hash everywhere else."""

from collections.abc import Iterator

from reflux.weight_broker.v1 import weight_layout_pb2 as pb
from reflux_transfer.layout import Layout
from reflux_weightplan.mesh import Cut, Mesh, Place, Placement
from reflux_weightplan.spec import SpecLayout, TensorSpec

CHUNK_BYTES = 1 << 19
"""A message with a chunk stays below 1 MiB."""


def single_rank(layout: Layout, engine: str = "") -> SpecLayout:
    """The layout of one process that holds everything: its region has the same offsets when `Layout.from_shapes` made
    them."""
    return SpecLayout(Mesh(()), tuple(TensorSpec(s.name, s.shape, s.dtype) for s in layout.slots), engine=engine)


def to_message(layout: SpecLayout) -> pb.WeightLayout:
    """The wire form."""
    return pb.WeightLayout(
        axes=[pb.MeshAxis(name=name, size=size) for name, size in layout.mesh.axes],
        tensors=[_tensor(tensor) for tensor in layout.tensors],
        places=[
            pb.RankPlace(host=p.host, domain=p.domain, rack=p.rack, nic=p.nic, bytes_per_second=p.bytes_per_second)
            for p in layout.places
        ],
        engine=layout.engine,
    )


def from_message(message: pb.WeightLayout) -> SpecLayout:
    """The inverse. Raises `LayoutRefused` naming tensors for what contradicts itself."""
    return SpecLayout(
        Mesh(tuple((axis.name, axis.size) for axis in message.axes)),
        tuple(_spec(tensor) for tensor in message.tensors),
        tuple(Place(p.host, p.domain, p.rack, p.nic, p.bytes_per_second) for p in message.places),
        message.engine,
    )


def chunks(data: bytes) -> Iterator[bytes]:
    """Serialized bytes in parts that fit a message."""
    for start in range(0, len(data), CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]


def _tensor(tensor: TensorSpec) -> pb.TensorSpec:
    cuts = tensor.placement.cuts
    return pb.TensorSpec(
        name=tensor.name,
        shape=tensor.shape,
        dtype=tensor.dtype,
        cuts=[pb.TensorCut(dim=cut.dim, axis=cut.axis, even=cut.rule == "even", unit=cut.unit) for cut in cuts],
        pinned=[pb.PinnedAxis(axis=axis, coordinate=coordinate) for axis, coordinate in tensor.placement.pinned],
        layer=tensor.layer,
        fused=tensor.fused,
        fused_order=tensor.fused_order,
        fused_rows=tensor.fused_rows,
    )


def _spec(tensor: pb.TensorSpec) -> TensorSpec:
    cuts = tuple(Cut(cut.dim, cut.axis, "even" if cut.even else "chunk", cut.unit or 1) for cut in tensor.cuts)
    pinned = tuple((pin.axis, pin.coordinate) for pin in tensor.pinned)
    return TensorSpec(
        tensor.name,
        tuple(tensor.shape),
        tensor.dtype,
        Placement(cuts, pinned),
        tensor.layer,
        tensor.fused,
        tensor.fused_order,
        tensor.fused_rows,
    )
