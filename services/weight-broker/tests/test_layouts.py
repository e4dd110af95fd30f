"""Layouts over the wire: by hash, in small messages, and refused by name when they contradict themselves."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from reflux.weight_broker.v1 import weight_broker_service_pb2 as pb
from reflux.weight_broker.v1 import weight_layout_pb2 as layout_pb
from reflux.weight_broker.v1.weight_broker_service_pb2_grpc import WeightBrokerServiceStub
from reflux_kit.channel import open_channel
from reflux_kit.errors import InvalidRequest, reason_of
from reflux_kit.server import running
from reflux_transfer.client.layouts import chunks, from_message, single_rank, to_message
from reflux_transfer.layout import Layout
from reflux_weight_broker.layouts import parse
from reflux_weight_broker.main import BrokerSettings, build
from reflux_weightplan.mesh import Cut, Mesh, Place, Placement
from reflux_weightplan.spec import SpecLayout, TensorSpec
from reflux_weightplan.wire import layout_hash


@asynccontextmanager
async def broker(valkey_url: str) -> AsyncIterator[WeightBrokerServiceStub]:
    settings = BrokerSettings(listen="127.0.0.1:0", drain_seconds=0, redis_url=valkey_url)
    async with build(settings) as service, running(service, settings) as bound, open_channel(bound.grpc) as channel:
        yield WeightBrokerServiceStub(channel)


def sharded(tensors: int = 3) -> SpecLayout:
    """A layout with one of everything that a layout can say."""
    mesh = Mesh((("pipeline", 2), ("tensor", 4)))
    cut = Placement((Cut(0, "tensor", "even", 16),), (("pipeline", 1),))
    specs = [TensorSpec(f"model.layers.{n}.mlp.experts.weight", (128, 64), "bfloat16", cut, n) for n in range(tensors)]
    specs.append(TensorSpec("norm", (64,), "float32", Placement()))
    specs.append(TensorSpec("q", (128, 64), "bfloat16", cut, 1, "qkv", 0, 16))
    return SpecLayout(mesh, tuple(specs), tuple(Place(f"h{n}", "d", "r", "n", 1e9) for n in range(8)), "vllm")


async def put(stub: WeightBrokerServiceStub, data: bytes) -> str:
    parts = (pb.PutLayoutRequest(chunk=chunk) for chunk in chunks(data))
    return (await stub.PutLayout(parts, timeout=20)).hash


async def got(stub: WeightBrokerServiceStub, name: str) -> list[pb.GetLayoutResponse]:
    return [part async for part in stub.GetLayout(pb.GetLayoutRequest(hash=name), timeout=20)]


def test_a_layout_survives_its_wire_form() -> None:
    layout = sharded()
    assert from_message(layout_pb.WeightLayout.FromString(to_message(layout).SerializeToString())) == layout


def test_a_single_ranks_region_has_the_offsets_of_its_layout() -> None:
    local = Layout.from_shapes({"a": ([3], "float32"), "b": ([7, 5], "bfloat16")})
    spec = single_rank(local, "torch")
    assert [(t.name, t.shape, t.dtype) for t in spec.tensors] == [(s.name, s.shape, s.dtype) for s in local.slots]
    assert spec.mesh.ranks == 1


async def test_a_layout_is_stored_by_its_hash_and_outlives_the_broker(valkey_url: str) -> None:
    layout = sharded()
    data = to_message(layout).SerializeToString()
    async with broker(valkey_url) as stub:
        assert await put(stub, data) == await put(stub, data) == layout_hash(layout)
    async with broker(valkey_url) as stub:
        parts = await got(stub, layout_hash(layout))
        assert from_message(layout_pb.WeightLayout.FromString(b"".join(part.chunk for part in parts))) == layout


async def test_a_layout_of_45000_tensors_travels_in_messages_below_a_mebibyte(valkey_url: str) -> None:
    data = to_message(sharded(45_000)).SerializeToString()
    assert len(data) > 2 << 20
    assert max(pb.PutLayoutRequest(chunk=chunk).ByteSize() for chunk in chunks(data)) < 1 << 20
    async with broker(valkey_url) as stub:
        name = await put(stub, data)
        parts = await got(stub, name)
        assert max(part.ByteSize() for part in parts) < 1 << 20
        assert b"".join(part.chunk for part in parts) == data
        # What names the layout stays small, whatever the layout is.
        claim = pb.RegisterReplicaRequest(replica="a", model_id="m", layout_hash=name, incarnation="1", ranks=8, rank=7)
        await stub.RegisterReplica(claim, timeout=20)
        assert claim.ByteSize() < 1000


async def test_an_unknown_layout_says_what_to_do(valkey_url: str) -> None:
    async with broker(valkey_url) as stub:
        calls = [
            stub.RegisterReplica(
                pb.RegisterReplicaRequest(replica="a", model_id="m", incarnation="1", layout_hash="none"), timeout=5
            ),
            stub.BeginVersion(pb.BeginVersionRequest(request_id="r", model_id="m", layout_hash="none"), timeout=5),
            got(stub, "none"),
        ]
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert reason_of(caught.value) == "UNKNOWN_LAYOUT"
            assert "PutLayout" in (caught.value.details() or "")


def tensor(
    name: str = "w", shape: tuple[int, ...] = (8,), dtype: str = "int8", **fields: object
) -> layout_pb.TensorSpec:
    return layout_pb.TensorSpec(name=name, shape=shape, dtype=dtype, **fields)


AXIS = layout_pb.MeshAxis(name="t", size=4)
CUT = layout_pb.TensorCut(axis="t", even=True)
BAD = {
    "no tensors": ({}, ["no tensors"]),
    "duplicate": ({"tensors": [tensor(), tensor()]}, ["w", "twice"]),
    "no name": ({"tensors": [tensor("")]}, ["no name"]),
    "zero size": ({"tensors": [tensor(shape=(3, 0))]}, ["w", "[3, 0]"]),
    "dtype without a rule": ({"tensors": [tensor(dtype="float4")]}, ["w", "float4"]),
    "unknown axis": ({"tensors": [tensor(cuts=[CUT])]}, ["'t'"]),
    "no such dimension": (
        {"axes": [AXIS], "tensors": [tensor(cuts=[layout_pb.TensorCut(dim=1, axis="t", even=True)])]},
        ["w", "dimension 1"],
    ),
    "overlap: an axis cuts twice": ({"axes": [AXIS], "tensors": [tensor(cuts=[CUT, CUT])]}, ["w", "twice"]),
    "gap: pinned to nowhere": (
        {"axes": [AXIS], "tensors": [tensor(pinned=[layout_pb.PinnedAxis(axis="t", coordinate=4)])]},
        ["w", "t=4"],
    ),
    "more ranks than boxes": (
        {"axes": [AXIS], "tensors": [tensor(pinned=[layout_pb.PinnedAxis(axis="t", coordinate=0)])]},
        ["more ranks than boxes", "[1, 2, 3]"],
    ),
    "places": ({"axes": [AXIS], "tensors": [tensor()], "places": [layout_pb.RankPlace(host="h")]}, ["4 ranks", "1"]),
    "far too many ranks": (
        {"axes": [layout_pb.MeshAxis(name=name, size=1 << 31) for name in "ab"], "tensors": [tensor()]},
        ["ranks"],
    ),
    "huge": ({"tensors": [tensor(shape=(1 << 62, 1 << 62))]}, ["w", "too large"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_layouts_are_refused_by_name(case: str) -> None:
    fields, words = BAD[case]
    with pytest.raises(InvalidRequest) as refused:
        parse(layout_pb.WeightLayout(**fields).SerializeToString())
    for word in words:
        assert word in str(refused.value)


def test_bytes_that_are_no_layout_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="no serialized WeightLayout"):
        parse(b"\xff\xff\xff")
