"""The gRPC face against a real server and a real Valkey, in this process."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from reflux.weight_broker.v1 import weight_broker_service_pb2 as pb
from reflux.weight_broker.v1 import weight_layout_pb2 as layout_pb
from reflux.weight_broker.v1.weight_broker_service_pb2_grpc import WeightBrokerServiceStub
from reflux.weight_broker.v1.weight_version_pb2 import WeightVersion
from reflux_kit.channel import open_channel
from reflux_kit.errors import reason_of
from reflux_kit.server import running
from reflux_transfer import handles
from reflux_transfer.client.layouts import from_message
from reflux_weight_broker.main import BrokerSettings, build
from reflux_weightplan.wire import layout_hash

LAYOUT = layout_pb.WeightLayout(tensors=[layout_pb.TensorSpec(name="w", shape=[3], dtype="float32")])
OTHER = layout_pb.WeightLayout(tensors=[layout_pb.TensorSpec(name="v", shape=[3], dtype="float32")])
HASH, OTHERS = (layout_hash(from_message(layout)) for layout in (LAYOUT, OTHER))
HANDLE = handles.seal("shm", {})
REGION = layout_pb.RegionOffer(handle=HANDLE, transport="shm", generation=1, plans=["a plan"])
METHODS = pb.DESCRIPTOR.services_by_name["WeightBrokerService"].methods_by_name


@asynccontextmanager
async def broker(valkey_url: str) -> AsyncIterator[WeightBrokerServiceStub]:
    settings = BrokerSettings(listen="127.0.0.1:0", drain_seconds=0, reconnect_seconds=0.2, redis_url=valkey_url)
    async with build(settings) as service, running(service, settings) as bound, open_channel(bound.grpc) as channel:
        stub = WeightBrokerServiceStub(channel)
        for layout in (LAYOUT, OTHER):
            await stub.PutLayout(iter([pb.PutLayoutRequest(chunk=layout.SerializeToString())]), timeout=5)
        yield stub


@pytest.fixture
async def stub(valkey_url: str) -> AsyncIterator[WeightBrokerServiceStub]:
    async with broker(valkey_url) as opened:
        yield opened


def begin(request_id: str = "r1", version: int = 1, **fields: object) -> pb.BeginVersionRequest:
    fields = {"layout_hash": HASH, "regions": [REGION], "model_id": "m", "sync_timeout_seconds": 5.0, **fields}
    return pb.BeginVersionRequest(request_id=request_id, version=version, **fields)


def register(name: str = "a", **fields: object) -> pb.RegisterReplicaRequest:
    return pb.RegisterReplicaRequest(
        **{"replica": name, "model_id": "m", "layout_hash": HASH, "incarnation": "1", **fields}
    )


def ack(epoch: int, outcome: pb.AckVersionRequest.Outcome.ValueType, **fields: object) -> pb.AckVersionRequest:
    return pb.AckVersionRequest(replica="a", model_id="m", epoch=epoch, outcome=outcome, **fields)


async def joined(stub: WeightBrokerServiceStub) -> grpc.aio.UnaryStreamCall:
    await stub.RegisterReplica(register(), timeout=5)
    events = stub.WatchVersions(pb.WatchVersionsRequest(replica="a", model_id="m", incarnation="1"), timeout=30)
    await events.initial_metadata()
    return events


async def outcome(stub: WeightBrokerServiceStub, epoch: int) -> WeightVersion:
    version = None
    async for change in stub.WatchVersion(pb.WatchVersionRequest(model_id="m", epoch=epoch), timeout=30):
        version = change.version
    return version


async def error_of(call: object) -> grpc.aio.AioRpcError | None:
    """How a call fails; a stream is read to its end."""
    try:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error
    return None


async def fails(call: object) -> tuple[grpc.StatusCode, str, str]:
    error = await error_of(call)
    assert error is not None, "the call succeeded"
    return error.code(), reason_of(error), error.details()


async def test_one_version_from_begin_to_committed(stub: WeightBrokerServiceStub) -> None:
    events = await joined(stub)
    begun = (await stub.BeginVersion(begin(version=4, min_replicas=1), timeout=5)).version
    assert (begun.epoch, begun.version, begun.state) == (1, 4, WeightVersion.STATE_PREPARING)
    prepare = await events.read()
    assert prepare.event == pb.WatchVersionsResponse.EVENT_PREPARE
    assert (list(prepare.regions), prepare.layout_hash, prepare.version.version) == ([REGION], HASH, 4)
    await stub.AckVersion(ack(1, pb.AckVersionRequest.OUTCOME_PREPARED, bytes=12, transfer_seconds=0.25), timeout=5)
    assert (await events.read()).event == pb.WatchVersionsResponse.EVENT_COMMIT
    await stub.AckVersion(ack(1, pb.AckVersionRequest.OUTCOME_COMMITTED, pause_ms=1.5, fingerprint=9), timeout=5)
    done = await outcome(stub, 1)
    assert (done.state, done.bytes) == (WeightVersion.STATE_COMMITTED, 12)
    assert [(r.replica, r.version, r.transfer_seconds, r.pause_ms, r.fingerprint) for r in done.replicas] == [
        ("a", 4, 0.25, 1.5, 9)
    ]
    got = await stub.GetVersion(pb.GetVersionRequest(model_id="m"), timeout=5)
    assert (got.version, got.last_epoch) == (done, 1)
    listed = await stub.ListReplicas(pb.ListReplicasRequest(), timeout=5)
    assert [(r.replica, r.epoch) for r in listed.replicas] == [("a", 1)]


async def test_a_repeated_request_gets_the_first_answer(stub: WeightBrokerServiceStub) -> None:
    first = await stub.BeginVersion(begin(), timeout=5)
    await outcome(stub, first.version.epoch)
    again = await stub.BeginVersion(begin(), timeout=5)
    assert again.version.epoch == first.version.epoch
    assert again.version.state == WeightVersion.STATE_COMMITTED


async def test_of_two_concurrent_begins_one_wins(stub: WeightBrokerServiceStub) -> None:
    await joined(stub)
    calls = [stub.BeginVersion(begin(name), timeout=5) for name in ("r1", "r2")]
    results = await asyncio.gather(*calls, return_exceptions=True)
    (lost,) = [result for result in results if isinstance(result, grpc.aio.AioRpcError)]
    assert (lost.code(), reason_of(lost)) == (grpc.StatusCode.ABORTED, "VERSION_IN_PROGRESS")


async def test_refusals_have_codes_reasons_and_names(stub: WeightBrokerServiceStub) -> None:
    await joined(stub)
    code, reason, text = await fails(stub.BeginVersion(begin(layout_hash=OTHERS), timeout=5))
    assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "LAYOUT_MISMATCH")
    assert "replica a" in text
    assert "missing v" in text
    await stub.DeregisterReplica(pb.DeregisterReplicaRequest(replica="a", model_id="m"), timeout=5)
    await stub.BeginVersion(begin(version=5), timeout=5)
    await outcome(stub, 1)
    code, reason, _ = await fails(stub.BeginVersion(begin("r2", version=4, publisher_epoch=1), timeout=5))
    assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "VERSION_REGRESSION")
    code, reason, _ = await fails(stub.BeginVersion(begin("r3", version=6), timeout=5))
    assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "PUBLISHER_FENCED")
    code, reason, _ = await fails(stub.RegisterReplica(register("b", layout_hash=OTHERS), timeout=5))
    assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "LAYOUT_MISMATCH")
    code, reason, _ = await fails(stub.AckVersion(ack(1, pb.AckVersionRequest.OUTCOME_PREPARED), timeout=5))
    assert (code, reason) == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_REPLICA")
    assert (
        await stub.BeginVersion(begin("r4", version=4, publisher_epoch=1, replay=True), timeout=5)
    ).version.epoch == 2


async def test_inconsistent_messages_are_invalid_and_name_the_field(stub: WeightBrokerServiceStub) -> None:
    cases = {
        "layout_hash": begin(layout_hash=""),
        "sync_timeout_seconds": begin(sync_timeout_seconds=float("nan")),
        "version": begin(version=-1),
        "request_id": begin(""),
        "model_id": begin(model_id="x" * 300),
        "publisher_epoch": begin(publisher_epoch=-1),
        "plans must have 1 to 256": begin(regions=[layout_pb.RegionOffer(handle=HANDLE, transport="shm", plans=[""])]),
        "rank 0 packs for 17 plans": begin(
            regions=[layout_pb.RegionOffer(handle=HANDLE, transport="shm", plans=["p"] * 17)]
        ),
    }
    for word, request in cases.items():
        code, _, text = await fails(stub.BeginVersion(request, timeout=5))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert word in text
    for seconds in (float("inf"), -1.0):
        request = ack(1, pb.AckVersionRequest.OUTCOME_PREPARED, transfer_seconds=seconds)
        assert (await fails(stub.AckVersion(request, timeout=5)))[0] is grpc.StatusCode.INVALID_ARGUMENT


async def test_empty_and_random_requests_end_with_a_proper_status(
    stub: WeightBrokerServiceStub, caplog: pytest.LogCaptureFixture
) -> None:
    dice = random.Random(7)
    for name, method in METHODS.items():
        kind = getattr(pb, method.input_type.name)
        requests = [kind()] + [scrambled(kind, dice) for _ in range(10)]
        for request in requests:
            sent = iter([request]) if method.client_streaming else request
            error = await error_of(getattr(stub, name)(sent, timeout=1.0))
            if error:
                bad = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
                assert error.code() not in bad, (name, error.details())
    assert not [record for record in caplog.records if record.exc_info]


def scrambled(kind: type, dice: random.Random) -> object:
    """A message with random fields; strings and enumerations stay decodable."""
    message = kind()
    for field in kind.DESCRIPTOR.fields:
        if dice.random() < 0.3 or field.message_type:
            continue
        values = {
            field.CPPTYPE_STRING: "xyz"[: dice.randrange(4)] if field.type == field.TYPE_STRING else dice.randbytes(9),
            field.CPPTYPE_BOOL: dice.random() < 0.5,
            field.CPPTYPE_DOUBLE: dice.choice([-1.0, 0.0, float("nan"), 1e300]),
            field.CPPTYPE_FLOAT: dice.choice([-1.0, 0.0, float("nan"), 1e30]),
            field.CPPTYPE_INT64: dice.choice([-(1 << 63), -1, 0, 1, (1 << 63) - 1]),
            field.CPPTYPE_UINT64: dice.choice([0, 1, (1 << 64) - 1]),
            field.CPPTYPE_UINT32: dice.choice([0, 1, (1 << 32) - 1]),
            field.CPPTYPE_ENUM: dice.choice([0, 1, 77]),
        }
        value = values[field.cpp_type]
        if field.is_repeated:
            getattr(message, field.name).append(value)
        else:
            setattr(message, field.name, value)
    return message


async def test_asking_about_a_model_does_not_create_it(stub: WeightBrokerServiceStub) -> None:
    assert (await fails(stub.GetVersion(pb.GetVersionRequest(model_id="m"), timeout=5)))[0] is grpc.StatusCode.NOT_FOUND
    request = pb.WatchVersionRequest(model_id="m", epoch=1)
    assert (await fails(stub.WatchVersion(request, timeout=5)))[0] is grpc.StatusCode.NOT_FOUND
    request = pb.DeregisterReplicaRequest(replica="a", model_id="m")
    assert not (await stub.DeregisterReplica(request, timeout=5)).found


async def test_publishers_are_told_the_layouts_of_the_replicas_that_are_there(stub: WeightBrokerServiceStub) -> None:
    for name in "ab":
        await stub.RegisterReplica(register(name), timeout=5)
    got = await stub.GetVersion(pb.GetVersionRequest(model_id="m"), timeout=5)
    assert (list(got.target_layouts), got.last_epoch, got.HasField("version")) == ([HASH], 0, False)
    for name in "ab":
        await stub.DeregisterReplica(pb.DeregisterReplicaRequest(replica=name, model_id="m"), timeout=5)
    assert (await fails(stub.GetVersion(pb.GetVersionRequest(model_id="m"), timeout=5)))[0] is grpc.StatusCode.NOT_FOUND


async def test_a_replica_that_stays_away_is_told_to_register(stub: WeightBrokerServiceStub) -> None:
    request = pb.WatchVersionsRequest(replica="a", model_id="m", incarnation="1")
    assert (await fails(stub.WatchVersions(request, timeout=5)))[1] == "UNKNOWN_REPLICA"
    events = await joined(stub)
    await stub.RegisterReplica(register(incarnation="2"), timeout=5)
    assert (await fails(events))[1] == "UNKNOWN_REPLICA"


async def test_what_a_restart_finds_in_redis(valkey_url: str) -> None:
    async with broker(valkey_url) as stub:
        await stub.BeginVersion(begin(version=3), timeout=5)
        await outcome(stub, 1)
        events = await joined(stub)
        assert (await events.read()).version.epoch == 1
        await stub.BeginVersion(begin("r2", version=4, publisher_epoch=1), timeout=5)
        assert (await events.read()).version.epoch == 2
    async with broker(valkey_url) as stub:
        got = await stub.GetVersion(pb.GetVersionRequest(model_id="m"), timeout=5)
        assert (got.version.version, got.version.state, got.last_epoch) == (3, WeightVersion.STATE_COMMITTED, 2)
        again = await stub.BeginVersion(begin("r2", version=4, publisher_epoch=1), timeout=5)
        assert (again.version.state, again.version.epoch) == (WeightVersion.STATE_ABORTED, 2)
        assert "restarted" in again.version.error
        events = await joined(stub)  # knows nothing: gets the committed version
        assert (await events.read()).version.version == 3
        assert (await stub.BeginVersion(begin("r3", version=4, publisher_epoch=2), timeout=5)).version.epoch == 3
