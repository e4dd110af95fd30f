"""Publisher and replicas of the library against a real broker, all in this process: ranks, relays, probes, adapters."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np
import pytest
from grpc.aio import Channel

from reflux.weight_broker.v1 import weight_broker_service_pb2 as pb
from reflux.weight_broker.v1.weight_broker_service_pb2_grpc import WeightBrokerServiceStub
from reflux_kit.channel import open_channel
from reflux_kit.server import running
from reflux_transfer.arenas.publisher import PublisherArenas
from reflux_transfer.arenas.replica import ReplicaArenas
from reflux_transfer.backends.base import TransferBackend
from reflux_transfer.client.in_place import InPlaceReceiver
from reflux_transfer.client.layouts import single_rank
from reflux_transfer.client.offer import Update, layout_of_rank
from reflux_transfer.client.publisher import BrokerPublisher, PublishAborted, Published, PublishRefused
from reflux_transfer.client.puller import Puller
from reflux_transfer.client.subscriber import BrokerSubscriber
from reflux_transfer.client.swap import SwapReceiver
from reflux_transfer.client.wire import RETRY
from reflux_transfer.errors import GenerationGone
from reflux_transfer.handles import Scope
from reflux_transfer.layout import Layout
from reflux_transfer.probe.paths import PathBook
from reflux_transfer.registry import open_backend
from reflux_weight_broker.main import BrokerSettings, build
from reflux_weightplan.mesh import Cut, Mesh, Placement
from reflux_weightplan.spec import SpecLayout, TensorSpec

LAYOUT = Layout.from_shapes({"w": ([64, 32], "float32"), "norm": ([32], "float32")})
HANG_SECONDS = 30.0
OF_M = Scope("m")


def weights(seed: int, layout: Layout = LAYOUT) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {slot.name: rng.standard_normal(slot.shape, np.float32) for slot in layout.slots}


class Replica:
    """A rank and what it serves."""

    def __init__(self, subscriber: BrokerSubscriber, arenas: ReplicaArenas, layout: Layout) -> None:
        self.subscriber, self.arenas, self.layout = subscriber, arenas, layout
        self.updates: asyncio.Queue[Update] = asyncio.Queue()
        self.task: asyncio.Task[None] | None = None

    async def serves(self, version: int) -> dict[str, np.ndarray]:
        async with asyncio.timeout(HANG_SECONDS):
            update = await self.updates.get()
        assert update.version == version
        return self.tensors(update.buffer)

    def tensors(self, buffer: memoryview) -> dict[str, np.ndarray]:
        slots = self.layout.slots
        return {slot.name: np.frombuffer(buffer[slot.offset : slot.end], np.float32).copy() for slot in slots}


class Stack:
    """A broker and everybody who was started against it."""

    def __init__(self, channel: Channel, backend: TransferBackend) -> None:
        self.channel, self.backend = channel, backend
        self.stub = WeightBrokerServiceStub(channel)
        self.replicas: list[Replica] = []
        self.publishers: list[BrokerPublisher] = []

    def replica(
        self,
        name: str,
        model_id: str = "m",
        mode: str = "swap",
        spec: SpecLayout | None = None,
        rank: int = 0,
        probe: Callable | None = None,
        judged: Callable[[str], None] = lambda _: None,
        scope: Scope = OF_M,
        paths: PathBook | None = None,
        broken: Callable[[], bool] = lambda: False,
        layout: Layout = LAYOUT,
    ) -> Replica:
        layout = layout_of_rank(spec, rank) if spec else layout
        arenas = ReplicaArenas(layout, buffers=2 if mode == "swap" else 1, backend=self.backend)
        kind = SwapReceiver if mode == "swap" else InPlaceReceiver
        receiver = kind(arenas, rank=rank, scope=scope, puller=Puller(scope, paths=paths))

        async def apply(update: Update) -> float:
            if update.fill:
                if broken():
                    raise GenerationGone("the source was killed in the middle of the pull")
                await asyncio.to_thread(update.fill)
            replica.updates.put_nowait(update)
            return 1.5

        subscriber = BrokerSubscriber(
            self.channel, replica=name, model_id=model_id, layout=spec or single_rank(layout), receiver=receiver,
            apply=apply, rank=rank, probe=probe, judged=judged,
        )  # fmt: skip
        replica = Replica(subscriber, arenas, layout)
        replica.task = asyncio.create_task(subscriber.run())
        self.replicas.append(replica)
        return replica

    def publisher(self, model_id: str = "m", layout: Layout = LAYOUT, secret: str = "") -> BrokerPublisher:
        arenas = PublisherArenas(self.backend, layout, delta_share=1.0)
        self.publishers.append(BrokerPublisher(self.channel, model_id, arenas, secret=secret))
        return self.publishers[-1]

    async def settled(self, name: str, epoch: int) -> None:
        """The broker knows, too, that a replica serves an epoch."""
        async with asyncio.timeout(HANG_SECONDS):
            while (state := (await self.states()).get(name)) is None or state.epoch != epoch:
                await asyncio.sleep(0.01)

    async def states(self, model_id: str = "m") -> dict:
        listed = await self.stub.ListReplicas(pb.ListReplicasRequest(model_id=model_id), timeout=5)
        return {state.replica: state for state in listed.replicas}


async def publish(
    publisher: BrokerPublisher, version: int, seed: int, tensors: dict | None = None, **fields: object
) -> Published:
    fields = {"sync_timeout_seconds": 20.0, **fields}
    async with await publisher.begin(version, **fields) as publishing:
        await asyncio.to_thread(publishing.write, tensors or weights(seed))
        return await publishing.finish()


@contextlib.asynccontextmanager
async def opened(valkey_url: str, **settings: object) -> AsyncIterator[Stack]:
    settings = {"reconnect_seconds": 0.5, **settings}
    wanted = BrokerSettings(listen="127.0.0.1:0", drain_seconds=0, redis_url=valkey_url, **settings)
    async with (
        build(wanted) as service,
        running(service, wanted) as bound,
        open_channel(bound.grpc, retry=RETRY) as channel,
    ):
        with contextlib.closing(open_backend("shm")) as backend:
            stack = Stack(channel, backend)
            try:
                yield stack
            finally:
                for publisher in stack.publishers:
                    await publisher.close()
                for replica in stack.replicas:
                    assert replica.task
                    replica.task.cancel()
                    await asyncio.gather(replica.task, return_exceptions=True)


@pytest.fixture
async def stack(valkey_url: str) -> AsyncIterator[Stack]:
    async with opened(valkey_url) as stack:
        yield stack


async def test_ranks_of_tensor_parallel_replicas_get_their_parts_together(stack: Stack) -> None:
    rows = Placement((Cut(0, "tensor"),))
    spec = SpecLayout(
        Mesh((("tensor", 2),)),
        (TensorSpec("w", (64, 32), "float32", rows), TensorSpec("norm", (32,), "float32")),
    )
    ranks = [stack.replica("a", spec=spec, rank=rank) for rank in range(2)]
    whole = stack.replica("b")
    done = await publish(stack.publisher(), 1, 1, min_replicas=2)
    published = weights(1)
    for rank, replica in enumerate(ranks):
        got = await replica.serves(1)
        assert np.array_equal(got["w"], published["w"][rank * 32 : (rank + 1) * 32].reshape(-1))
        assert np.array_equal(got["norm"], published["norm"])
    assert np.array_equal((await whole.serves(1))["w"], published["w"].reshape(-1))
    assert {state.replica: state.fingerprint for state in done.replicas} == {
        "a": done.fingerprint, "b": done.fingerprint,
    }  # fmt: skip
    assert {replica.subscriber.fingerprint for replica in (*ranks, whole)} == {done.fingerprint}


async def test_a_chain_of_readers_is_served_by_those_who_have_it(valkey_url: str) -> None:
    async with opened(valkey_url, readers_per_source=1) as stack:
        replicas = [stack.replica(name) for name in "abcd"]
        done = await publish(stack.publisher(), 1, 1, min_replicas=4)
        for replica in replicas:
            assert np.array_equal((await replica.serves(1))["w"], weights(1)["w"].reshape(-1))
        sources = [state.source for state in done.replicas]
        assert "publisher" in sources
        assert set(sources) - {"publisher"}, "nobody was served by a replica"


async def test_when_the_publisher_is_gone_a_peer_is_told_and_serves(stack: Stack) -> None:
    first, publisher = stack.replica("a"), stack.publisher()
    await publish(publisher, 1, 1, min_replicas=1)
    await first.serves(1)
    told: list[tuple[int, str, bool]] = []
    lease, release = first.arenas.lease, first.arenas.release
    first.arenas.lease = lambda *a: (told.append((a[0], a[1], True)), lease(*a))
    first.arenas.release = lambda *a: (told.append((a[0], a[1], False)), release(*a))
    publisher._rank.arenas.close()
    assert np.array_equal((await stack.replica("b").serves(1))["w"], weights(1)["w"].reshape(-1))
    assert (await stack.states())["b"].source == "a"
    async with asyncio.timeout(HANG_SECONDS):
        while len(told) < 2:
            await asyncio.sleep(0.01)
    assert told == [(1, "join/b", True), (1, "join/b", False)]  # generation 1: its first offer


async def test_replicas_that_score_the_probe_differently_are_unhealthy(stack: Stack) -> None:
    def scoring(error: float) -> Callable:
        async def score(token_ids: Sequence[int]) -> list[float]:
            return [-float(token) + error for token in token_ids[1:]]

        return score

    told: asyncio.Queue[str] = asyncio.Queue()
    stack.replica("good", probe=scoring(0.0))
    stack.replica("bad", probe=scoring(0.01), judged=told.put_nowait)
    publisher = stack.publisher()
    done = await publish(publisher, 1, 1, min_replicas=2, probe_token_ids=[1, 2, 3])
    await publisher.report_probe(done.epoch, [-2.0, -3.0])
    async with asyncio.timeout(HANG_SECONDS):
        assert "differs by 0.01" in await told.get()
    states = await stack.states()
    assert "differs by 0.01" in states["bad"].health_reason
    assert not states["good"].unhealthy


async def test_an_adapter_is_published_beside_its_model(stack: Stack) -> None:
    base = stack.replica("a")
    epoch = (await publish(stack.publisher(), 1, 1, min_replicas=1)).epoch
    await base.serves(1)
    small = Layout.from_shapes({"w.lora_a": ([4, 32], "float32")})
    name = "m/adapters/x"
    adapter = stack.replica("a", model_id=name, layout=small)
    done = await publish(
        stack.publisher(name, small), 7, 0, weights(5, small), kind="adapter", base_epoch=epoch, min_replicas=1
    )
    assert np.array_equal((await adapter.serves(7))["w.lora_a"], weights(5, small)["w.lora_a"].reshape(-1))
    assert done.epoch == 1
    with pytest.raises(PublishRefused, match="epoch 9 of m, but epoch 1 is committed"):
        await publish(stack.publisher(name, small), 8, 0, weights(5, small), kind="adapter", base_epoch=9)


async def test_a_handle_of_another_run_is_not_opened(stack: Stack) -> None:
    stack.replica("a", scope=Scope("other"))
    with pytest.raises(PublishAborted, match=r"WrongHandle.*run 'm', this process to run 'other'"):
        await publish(stack.publisher(), 1, 1, min_replicas=1)


async def test_a_failed_overwrite_in_place_is_repeated_until_it_is_whole(stack: Stack) -> None:
    failures = [True, True]
    replica = stack.replica("a", mode="in_place", broken=lambda: bool(failures) and failures.pop())
    steady = stack.replica("b")
    done = await publish(stack.publisher(), 1, 1, min_replicas=2)
    assert {state.replica for state in done.replicas} == {"a", "b"}
    assert np.array_equal((await steady.serves(1))["w"], weights(1)["w"].reshape(-1))
    assert np.array_equal((await replica.serves(1))["w"], weights(1)["w"].reshape(-1))
    assert not failures
    await stack.settled("a", done.epoch)
    assert not (await stack.states())["a"].unhealthy


async def test_a_delta_without_its_base_becomes_the_whole_version(stack: Stack) -> None:
    first = stack.replica("a")
    publisher = stack.publisher()
    tensors = weights(1)
    await publish(publisher, 1, 0, tensors, min_replicas=1)
    await first.serves(1)
    live = first.arenas._buffers[first.arenas.live_index]
    live.header._store(version=1)  # as if it served something else
    late = stack.replica("b")
    await late.serves(1)
    await stack.settled("b", 1)
    tensors["w"][0, 0] += 1
    done = await publish(publisher, 2, 0, tensors, kind="delta", min_replicas=2)
    for replica in (first, late):
        assert np.array_equal((await replica.serves(2))["w"], tensors["w"].reshape(-1))
    assert LAYOUT.parameter_bytes < done.bytes < 2 * LAYOUT.parameter_bytes


async def test_other_tensors_end_the_replica_with_their_names(stack: Stack) -> None:
    await publish(stack.publisher(), 1, 1)
    other = stack.replica("a", layout=Layout.from_shapes({"v": ([3], "float32")}))
    stack.replicas.remove(other)
    assert other.task
    async with asyncio.timeout(HANG_SECONDS):
        (error,) = await asyncio.gather(other.task, return_exceptions=True)
    assert "missing w" in str(error)


async def test_control_messages_do_not_grow_with_the_model(stack: Stack) -> None:
    stack.replica("a")
    done = await publish(stack.publisher(), 1, 1, min_replicas=1)
    large = Layout.from_shapes({f"w{index}": ([16], "float32") for index in range(500)})
    stack.replica("a", model_id="n", layout=large, scope=Scope("n"))
    more = await publish(stack.publisher("n", large), 1, 0, weights(1, large), min_replicas=1)
    assert more.control_messages == done.control_messages == 9
