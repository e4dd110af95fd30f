"""A version by layout hash and regions, over gRPC: sources, leases, fingerprints, probes, adapters and bad offers."""

import asyncio
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
from reflux_weight_broker.main import BrokerSettings, build

HANDLE = handles.seal("shm", {})
LAYOUT = layout_pb.WeightLayout(tensors=[layout_pb.TensorSpec(name="w", shape=[3], dtype="float32")])
PAIR = layout_pb.WeightLayout(
    axes=[layout_pb.MeshAxis(name="tensor", size=2)],
    tensors=[
        layout_pb.TensorSpec(name="w", shape=[3], dtype="float32", cuts=[layout_pb.TensorCut(axis="tensor", even=True)])
    ],
)
PREPARED, COMMITTED, FAILED = (
    pb.AckVersionRequest.OUTCOME_PREPARED,
    pb.AckVersionRequest.OUTCOME_COMMITTED,
    pb.AckVersionRequest.OUTCOME_FAILED,
)


class Client:
    """A broker's stub and the hash of the layout that everybody uses."""

    def __init__(self, stub: WeightBrokerServiceStub) -> None:
        self.stub, self.layout = stub, ""

    async def put(self, layout: layout_pb.WeightLayout) -> str:
        parts = iter([pb.PutLayoutRequest(chunk=layout.SerializeToString())])
        return (await self.stub.PutLayout(parts, timeout=5)).hash

    async def joined(
        self, name: str, incarnation: str = "1", model_id: str = "m", **fields: object
    ) -> grpc.aio.UnaryStreamCall:
        fields = {"layout_hash": self.layout, **fields}
        request = pb.RegisterReplicaRequest(replica=name, model_id=model_id, incarnation=incarnation, **fields)
        await self.stub.RegisterReplica(request, timeout=5)
        watch = pb.WatchVersionsRequest(replica=name, model_id=model_id, incarnation=incarnation)
        events = self.stub.WatchVersions(watch, timeout=30)
        await events.initial_metadata()
        return events

    async def begin(self, request_id: str, version: int = 1, **fields: object) -> WeightVersion:
        fields = {"regions": [offer(5)], "layout_hash": self.layout, "model_id": "m", **fields}
        fields = {"sync_timeout_seconds": 5.0, **fields}
        request = pb.BeginVersionRequest(request_id=request_id, version=version, **fields)
        return (await self.stub.BeginVersion(request, timeout=5)).version

    async def ack(self, name: str, epoch: int, outcome: int, **fields: object) -> None:
        fields = {"incarnation": "1", "model_id": "m", **fields}
        await self.stub.AckVersion(
            pb.AckVersionRequest(replica=name, epoch=epoch, outcome=outcome, **fields), timeout=5
        )

    async def committed(self, name: str, events: grpc.aio.UnaryStreamCall, request_id: str, epoch: int) -> None:
        """Brings one replica through a version; it serves what it has from then on."""
        await self.begin(request_id, epoch, publisher_epoch=epoch - 1)
        assert (await events.read()).regions[0].generation == 5
        await self.ack(name, epoch, PREPARED, fingerprint=7)
        assert (await events.read()).event == pb.WatchVersionsResponse.EVENT_COMMIT
        await self.ack(name, epoch, COMMITTED, fingerprint=7, regions=[offer(epoch)])

    async def ended(self, epoch: int, model_id: str = "m") -> WeightVersion:
        version = None
        request = pb.WatchVersionRequest(model_id=model_id, epoch=epoch)
        async for change in self.stub.WatchVersion(request, timeout=30):
            version = change.version
        return version

    async def states(self) -> dict[str, WeightVersion]:
        listed = await self.stub.ListReplicas(pb.ListReplicasRequest(model_id="m"), timeout=5)
        return {state.replica: state for state in listed.replicas}


def offer(generation: int, rank: int = 0, **fields: object) -> layout_pb.RegionOffer:
    fields = {"handle": HANDLE, "transport": "shm", **fields}
    return layout_pb.RegionOffer(rank=rank, generation=generation, **fields)


@asynccontextmanager
async def opened(valkey_url: str) -> AsyncIterator[Client]:
    settings = BrokerSettings(listen="127.0.0.1:0", drain_seconds=0, reconnect_seconds=0.2, redis_url=valkey_url)
    async with build(settings) as service, running(service, settings) as bound, open_channel(bound.grpc) as channel:
        client = Client(WeightBrokerServiceStub(channel))
        client.layout = await client.put(LAYOUT)
        yield client


@pytest.fixture
async def client(valkey_url: str) -> AsyncIterator[Client]:
    async with opened(valkey_url) as client:
        yield client


async def test_a_version_by_hash_from_begin_to_committed(client: Client) -> None:
    events = await client.joined("a")
    version = await client.begin("r1", 4, probe_token_ids=[1, 2])
    assert (version.epoch, version.kind) == (1, WeightVersion.KIND_FULL)
    prepare = await events.read()
    assert (prepare.event, prepare.layout_hash) == (pb.WatchVersionsResponse.EVENT_PREPARE, client.layout)
    assert [(r.handle, r.transport, r.generation) for r in prepare.regions] == [(HANDLE, "shm", 5)]
    assert 0 < prepare.timeout_seconds <= 5.0
    await client.ack("a", 1, PREPARED, fingerprint=7, bytes=12)
    commit = await events.read()
    assert (commit.event, list(commit.probe_token_ids)) == (pb.WatchVersionsResponse.EVENT_COMMIT, [1, 2])
    await client.ack("a", 1, COMMITTED, fingerprint=7)
    done = await client.ended(1)
    assert (done.state, done.fingerprint, done.control_messages) == (WeightVersion.STATE_COMMITTED, 7, 9)
    assert [(r.source, r.unhealthy, r.fingerprint) for r in done.replicas] == [("publisher", False, 7)]


async def test_a_wrong_fingerprint_aborts_and_the_next_version_works(client: Client) -> None:
    first, second = await client.joined("a"), await client.joined("b")
    await client.begin("r1")
    await client.ack("a", 1, PREPARED, fingerprint=7)
    await client.ack("b", 1, PREPARED, fingerprint=8)
    done = await client.ended(1)
    assert done.state == WeightVersion.STATE_ABORTED
    assert "0000000000000008" in done.error
    assert "a has 0000000000000007" in done.error
    await client.begin("r2", publisher_epoch=1)
    for name, events in (("a", first), ("b", second)):
        assert [(await events.read()).event for _ in range(3)][1] == pb.WatchVersionsResponse.EVENT_ABORT
        await client.ack(name, 2, PREPARED, fingerprint=9)
    for name in "ab":
        await client.ack(name, 2, COMMITTED, fingerprint=9)
    assert (await client.ended(2)).state == WeightVersion.STATE_COMMITTED


async def test_a_late_joiner_reads_from_a_peer_that_was_told_before(client: Client) -> None:
    await client.committed("a", await client.joined("a"), "r1", 1)
    leases = client.stub.WatchLeases(pb.WatchLeasesRequest(model_id="m", replica="a"), timeout=30)
    await leases.initial_metadata()
    await client.joined("b")
    prepare = await (await client.joined("c")).read()
    assert prepare.regions[0].generation == 1
    told = await leases.read()
    assert (told.generation, told.holder) == (1, "c")
    assert 50 < told.seconds <= 60
    await client.ack("c", 1, FAILED, reason=pb.AckVersionRequest.REASON_PEER_GONE, error="gone")
    ended = await leases.read()
    assert (ended.generation, ended.holder, ended.seconds) == (1, "c", 0.0)


async def test_a_publisher_that_comes_back_hears_of_the_leases_that_hold(client: Client) -> None:
    await client.begin("r1")
    await client.joined("a")
    for generations, heard in (([], True), ([5], True), ([6], False)):
        request = pb.WatchLeasesRequest(model_id="m", generations=generations)
        leases = client.stub.WatchLeases(request, timeout=30 if heard else 0.5)
        if heard:
            assert (await leases.read()).holder == "a"
        else:
            with pytest.raises(grpc.aio.AioRpcError):
                await leases.read()
        leases.cancel()


async def test_ranks_are_told_and_commit_together(client: Client) -> None:
    pair = await client.put(PAIR)
    ranks = [await client.joined("a", f"i{n}", layout_hash=pair, rank=n, ranks=2) for n in range(2)]
    await client.begin("r1", min_replicas=1)
    for events in ranks:
        assert (await events.read()).event == pb.WatchVersionsResponse.EVENT_PREPARE
    for rank in range(2):
        await client.ack("a", 1, PREPARED, incarnation=f"i{rank}", rank=rank)
    for events in ranks:
        assert (await events.read()).event == pb.WatchVersionsResponse.EVENT_COMMIT
    await client.ack("a", 1, COMMITTED, incarnation="i0")
    assert (await client.states())["a"].unhealthy
    await client.ack("a", 1, COMMITTED, incarnation="i1", rank=1)
    state = (await client.states())["a"]
    assert (state.unhealthy, state.epoch) == (False, 1)


async def test_probes_make_replicas_unhealthy_and_tell_them(client: Client) -> None:
    await client.committed("a", await client.joined("a"), "r1", 1)
    report = pb.ReportProbeRequest(model_id="m", epoch=1, replica="a", logprobs=[-1.0, -2.0])
    alone = await client.stub.ReportProbe(report, timeout=0.5)
    assert alone.fault == ""
    assert not (await client.states())["a"].unhealthy
    waiting = asyncio.ensure_future(client.stub.ReportProbe(report, timeout=30))
    learners = pb.ReportProbeRequest(model_id="m", epoch=1, logprobs=[-1.0, -2.5])
    await client.stub.ReportProbe(learners, timeout=5)
    state = (await client.states())["a"]
    assert state.unhealthy
    assert "differs by 0.5" in state.health_reason
    assert (await waiting).fault == state.health_reason
    assert (await client.stub.ReportProbe(report, timeout=30)).fault == state.health_reason


async def test_an_adapter_has_versions_of_its_own(client: Client) -> None:
    await client.committed("a", await client.joined("a"), "r1", 1)
    adapter = {"model_id": "m/adapters/x", "kind": WeightVersion.KIND_ADAPTER}
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await client.begin("r2", **adapter, base_epoch=3)
    assert reason_of(refused.value) == "BASE_MISMATCH"
    events = await client.joined("a", model_id="m/adapters/x")
    version = await client.begin("r3", **adapter, base_epoch=1)
    assert (version.epoch, version.base_epoch) == (1, 1)
    prepare = await events.read()
    assert (prepare.kind, prepare.base_epoch) == (WeightVersion.KIND_ADAPTER, 1)
    got = await client.stub.GetVersion(pb.GetVersionRequest(model_id="m"), timeout=5)
    assert got.last_epoch == 1


async def test_paths_are_listed_by_process(client: Client) -> None:
    path = pb.TransferPath(transport="shm", bytes_per_second=5e9, chosen=True, reason="fastest")
    for process in ("b", "a", "b"):
        await client.stub.ReportPaths(pb.ReportPathsRequest(process=process, paths=[path]), timeout=5)
    listed = await client.stub.ListPaths(pb.ListPathsRequest(), timeout=5)
    assert [(report.process, list(report.paths)) for report in listed.processes] == [("a", [path]), ("b", [path])]


async def test_what_a_restart_remembers_of_a_version(valkey_url: str) -> None:
    async with opened(valkey_url) as client:
        await client.committed("a", await client.joined("a"), "r1", 1)
        assert (await client.ended(1)).state == WeightVersion.STATE_COMMITTED
    async with opened(valkey_url) as client:
        liar = await client.joined("b", epoch=1, version=1, fingerprint=8)
        assert (await liar.read()).regions[0].generation == 5  # from the publisher: b has other bytes than were agreed
        assert (await client.states())["b"].unhealthy
        await client.joined("a", epoch=1, version=1, fingerprint=7)
        assert not (await client.states())["a"].unhealthy


ADAPTER = WeightVersion.KIND_ADAPTER
OTHERS = handles.seal("shm", {}, handles.Scope(run="n"))
BAD = {
    "no region for a rank": ({"regions": []}, "ranks [], the layout has 1"),
    "regions of other ranks": ({"regions": [offer(1, rank=1)]}, "ranks [1]"),
    "more regions than ranks": ({"regions": [offer(1), offer(1, rank=1)]}, "ranks [0, 1]"),
    "no handle": ({"regions": [offer(1, handle=b"junk")]}, "regions"),
    "a handle of another run": ({"regions": [offer(1, handle=OTHERS)]}, "belongs to run 'n', the model to 'm'"),
    "a handle of another transport": ({"regions": [offer(1, transport="ucx")]}, "transport"),
    "an adapter named like a model": ({"kind": ADAPTER}, "kind"),
    "an epoch below 0": ({"kind": WeightVersion.KIND_DELTA, "base_epoch": -1}, "base_epoch"),
    "an epoch that no counter reaches": ({"publisher_epoch": 1 << 60}, "publisher_epoch"),
}


@pytest.mark.parametrize("case", BAD)
async def test_bad_offers_are_refused_by_field(client: Client, case: str) -> None:
    fields, text = BAD[case]
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await client.begin("r1", **fields)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert text in (refused.value.details() or "")


async def test_bad_registrations_and_probes_are_refused_by_field(client: Client) -> None:
    pair = await client.put(PAIR)
    cases = {
        "ranks": client.joined("a", layout_hash=pair),
        "rank": client.joined("a", rank=1),
        "epoch": client.joined("a", epoch=1 << 60),
        "logprobs": client.stub.ReportProbe(pb.ReportProbeRequest(model_id="m", epoch=1), timeout=5),
        "process": client.stub.ReportPaths(pb.ReportPathsRequest(), timeout=5),
    }
    for word, call in cases.items():
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert word in (refused.value.details() or "")


async def test_a_lower_version_and_other_tensors_are_refused(client: Client) -> None:
    await client.committed("a", await client.joined("a"), "r1", 1)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await client.begin("r2", 0, publisher_epoch=1)
    assert reason_of(refused.value) == "VERSION_REGRESSION"
    other = layout_pb.WeightLayout(tensors=[layout_pb.TensorSpec(name="v", shape=[3], dtype="float32")])
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await client.joined("b", layout_hash=await client.put(other))
    assert reason_of(refused.value) == "LAYOUT_MISMATCH"
    assert "missing w" in (refused.value.details() or "")
