"""Groups that several replicas share: nothing lost or doubled, seeds and indexes as one replica would give them."""

import asyncio
import random
from collections import Counter
from contextlib import AsyncExitStack, aclosing

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from reflux.inference_gateway.v1 import engine_service_pb2
from reflux.inference_gateway.v1 import inference_gateway_service_pb2 as pb
from reflux_inference_gateway.dispatch import Dispatcher, ReplicaLost
from reflux_inference_gateway.engine.types import sample_seed
from reflux_inference_gateway.errors import GenerationLost
from reflux_inference_gateway.fleet import Fleet
from reflux_inference_gateway.replicas import ReplicaInfo, ReplicaTable
from reflux_inference_gateway.routing import POLICIES
from reflux_inference_gateway.routing.base import Ask, RoutingPolicy, Share
from reflux_inference_gateway.want import Want

from .gateway_harness import FakeEngine, answers, engine_server, gateway, group, http_server, weather


class EvenSplit(RoutingPolicy):
    """As even a split as there is, over all candidates; keeps what it is told."""

    def __init__(self):
        self.lengths = Counter()

    def choose(self, candidates, ask):
        return min(candidates, key=lambda one: (one.inflight_tokens, one.order)).name

    def split(self, candidates, ask):
        counts = Counter(candidates[i % len(candidates)].name for i in range(ask.num_samples))
        return tuple(Share(name, count) for name, count in counts.items())

    def finished(self, name, ask, generated_tokens):
        self.lengths[name] += sum(generated_tokens)


@pytest.fixture
def splits(monkeypatch):
    """The gateway splits every group; gives the policies that it made."""
    made = []

    def new():
        made.append(EvenSplit())
        return made[-1]

    monkeypatch.setitem(POLICIES, "least_loaded", new)
    return made


@given(st.integers(0, 1 << 32), st.integers(1, 4), st.integers(1, 12))
@settings(max_examples=40, deadline=None)
def test_no_sample_is_lost_or_doubled_whatever_dies_pauses_or_hangs_up(seed, replicas, groups):
    asyncio.run(chaos(random.Random(seed), replicas, groups))


async def chaos(draw, replicas, groups):
    made = Dispatcher(table=ReplicaTable(), fleet=Fleet(), new_policy=EvenSplit, replica_wait_seconds=20.0)
    for number in range(replicas):
        made.table.register(info(number), made.clock())
    storm = asyncio.create_task(weather(made, draw))
    delivered = [[] for _ in range(groups)]
    tasks = [asyncio.create_task(relay(made, draw, samples)) for samples in delivered]
    for task in tasks:
        if draw.random() < 0.15:
            await asyncio.sleep(0)
            task.cancel()
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
    storm.cancel()
    for samples, result in zip(delivered, results, strict=True):
        if result is None:
            assert sorted(samples) == list(range(6))
        else:
            assert isinstance(result, GenerationLost | asyncio.CancelledError)
            assert len(set(samples)) == len(samples)
    ledger = made.fleet.ledger
    assert ledger.balanced()
    assert (ledger.held, ledger.running, ledger.completed) == (0, 0, results.count(None))
    assert all(entry.inflight_tokens == entry.inflight_requests == 0 for entry in made.table.entries())


def info(number, **fields):
    return ReplicaInfo(name=f"replicas/{number}", model_id="m", grpc_address=f"a:{number}", **fields)


async def relay(made, draw, samples):
    async def send(replica, share):
        for index in range(share.first, share.first + share.count):
            for _ in range(draw.randrange(4)):
                await asyncio.sleep(0)
            if draw.random() < 0.05:
                raise ReplicaLost("died")
            made.finished(share, 1, [3])
            yield index

    ask = Ask(num_samples=6, num_prompt_tokens=10, max_tokens=5)
    want = Want(model_id="m", num_tokens=40, ask=ask, deadline_seconds=20.0)
    async with aclosing(made.stream_group(want, send)) as items:
        async for item in items:
            samples.append(item)


async def test_the_load_of_a_share_falls_with_each_sample_that_is_done():
    made = Dispatcher(table=ReplicaTable(), fleet=Fleet(), new_policy=EvenSplit, replica_wait_seconds=0.0)
    entries = [made.table.register(info(number), made.clock()) for number in range(2)]
    loads = []

    async def send(replica, share):
        for _ in range(share.count):
            loads.append((replica.info.name, replica.inflight_tokens))
            made.finished(share, 1, [3])
            yield replica.info.name

    ask = Ask(num_samples=3, num_prompt_tokens=10, max_tokens=5)
    async with aclosing(
        made.stream_group(Want(model_id="m", num_tokens=25, ask=ask, deadline_seconds=5), send)
    ) as all_:
        assert sorted([name async for name in all_]) == ["replicas/0", "replicas/0", "replicas/1"]
    assert sorted(loads) == [("replicas/0", 15), ("replicas/0", 20), ("replicas/1", 15)]
    assert [entry.inflight_tokens for entry in entries] == [0, 0]


class AbortableEngine(FakeEngine):
    """Answers with the abort of a group that hangs, and keeps who asked for it."""

    def __init__(self, then="finish", delivered=0):
        super().__init__(then, delivered)
        self.aborted = []

    async def AbortRequests(self, request, context):
        self.aborted += request.request_ids
        return engine_service_pb2.AbortRequestsResponse(aborted_ids=request.request_ids)


class Servers(AsyncExitStack):
    """A gateway and engines that are registered with it, by name."""

    async def start(self, **engines):
        door = await self.enter_async_context(gateway())
        for name, engine in engines.items():
            await door.register(name, grpc_address=await self.enter_async_context(engine_server(engine)))
        return door


async def test_a_group_is_split_and_every_share_draws_what_one_replica_would_have_drawn(splits):
    engines = {"a": FakeEngine(), "b": FakeEngine(), "c": FakeEngine()}
    async with Servers() as servers:
        door = await servers.start(**engines)
        request = group(n=8)
        request.sampling.seed = 77
        responses = await answers(door.stub.GenerateGroup(request, timeout=10))
    assert sorted(response.sample.index for response in responses) == list(range(8))
    owners = {response.sample.index: response.replica for response in responses}
    assert [owners[index] for index in range(8)] == ["replicas/a"] * 3 + ["replicas/b"] * 3 + ["replicas/c"] * 2
    shares = [engine.requests[0] for engine in engines.values()]
    assert [share.num_samples for share in shares] == [3, 3, 2]
    assert [share.sampling.seed for share in shares] == [sample_seed(77, first) for first in (0, 3, 6)]
    assert splits[0].lengths == {"replicas/a": 3, "replicas/b": 3, "replicas/c": 2}


async def test_shares_of_an_engine_that_counts_seeds_up_begin_where_the_group_would(splits):
    bodies = []

    async def engine(request):
        bodies.append(body := await request.json())
        one = {"token_ids": [2], "logprobs": {"token_logprobs": [-0.5]}, "finish_reason": "stop"}
        return web.json_response({"choices": [{"index": index, **one} for index in range(body["n"])]})

    async with gateway() as door, http_server(engine) as first, http_server(engine) as second:
        await door.register("a", http_url=first, engine="vllm")
        await door.register("b", http_url=second, engine="vllm")
        request = group(n=5, whole_group=True)
        request.sampling.seed, request.sampling.temperature = 40, 1.0
        (response,) = await answers(door.stub.GenerateGroup(request, timeout=10))
    assert [sample.index for sample in response.samples] == list(range(5))
    assert sorted((body["seed"], body["n"]) for body in bodies) == [(40, 3), (43, 2)]


async def test_the_whole_group_comes_as_one_message_with_the_replica_of_each_sample(splits):
    async with Servers() as servers:
        door = await servers.start(a=FakeEngine(), b=FakeEngine())
        (response,) = await answers(door.stub.GenerateGroup(group(n=5, whole_group=True), timeout=10))
    assert [sample.index for sample in response.samples] == list(range(5))
    assert list(response.replicas) == ["replicas/a"] * 3 + ["replicas/b"] * 2


async def test_a_share_whose_replica_dies_with_nothing_out_is_issued_again_alone(splits):
    dead, alive = FakeEngine("die"), FakeEngine()
    async with Servers() as servers:
        door = await servers.start(dead=dead, alive=alive)
        responses = await answers(door.stub.GenerateGroup(group(n=6), timeout=10))
    assert sorted(response.sample.index for response in responses) == list(range(6))
    assert {response.replica for response in responses} == {"replicas/alive"}
    assert len(dead.requests) == 1
    assert [request.num_samples for request in alive.requests] == [3, 3]


async def test_abort_reaches_the_owning_replicas_only(splits):
    engines = {"a": AbortableEngine("hang"), "b": AbortableEngine("hang"), "other": AbortableEngine()}
    async with Servers() as servers:
        door = await servers.start(**engines)
        call = asyncio.create_task(answers(door.stub.GenerateGroup(group("mine", n=2), timeout=30)))
        while not all(engines[name].requests for name in "ab"):
            await asyncio.sleep(0.005)
        assert (await door.stub.Abort(pb.AbortRequest(request_id="mine"), timeout=5)).found
        call.cancel()
        for name in "ab":
            await asyncio.wait_for(engines[name].cancelled.wait(), 5)
    assert [set(engine.aborted) for engine in engines.values()] == [{"mine"}, {"mine"}, set()]


async def test_abort_of_a_held_share_leaves_what_the_others_finish(splits):
    dead, slow = FakeEngine("die"), AbortableEngine()
    async with Servers() as servers:
        door = await servers.start(dead=dead, slow=slow)
        await door.stub.PauseFleet(pb.PauseFleetRequest(), timeout=5)
        call = asyncio.create_task(answers(door.stub.GenerateGroup(group("mine", n=4), timeout=30)))
        while not (await door.stub.Abort(pb.AbortRequest(request_id="mine"), timeout=5)).found:
            await asyncio.sleep(0)
        responses = await asyncio.wait_for(call, 10)
    assert [(response.sample.index, response.sample.finish_reason) for response in responses] == [
        (index, "abort") for index in range(4)
    ]
    assert not slow.requests
