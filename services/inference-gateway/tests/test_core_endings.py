"""Ends that come at a bad moment: between two messages, before the replica knows the group, in a queue that is full."""

import asyncio
from contextlib import aclosing

import grpc
import pytest

from reflux.common.v1.common_pb2 import Sample, SamplingParams
from reflux.inference_gateway.v1 import engine_service_pb2
from reflux.inference_gateway.v1 import inference_gateway_service_pb2 as pb
from reflux_inference_gateway import generation
from reflux_inference_gateway.answers import whole_group
from reflux_inference_gateway.dispatch import Dispatcher, ReplicaLost
from reflux_inference_gateway.engines.torch import TorchReplica
from reflux_inference_gateway.errors import Overloaded
from reflux_inference_gateway.fleet import Fleet
from reflux_inference_gateway.merging import merged
from reflux_inference_gateway.prefill_legs import PrefillLegs
from reflux_inference_gateway.replicas import ReplicaInfo, ReplicaTable
from reflux_inference_gateway.routing.least_loaded import LeastLoaded
from reflux_inference_gateway.routing.pairing import Pairing
from reflux_inference_gateway.settings import GatewaySettings
from reflux_inference_gateway.waiting_room import WaitingRoom
from reflux_inference_gateway.want import Want
from reflux_inference_gateway.wire import GroupCall

from .gateway_harness import FakeEngine, answers, engine_server, gateway, group


async def test_a_call_that_is_closed_between_two_samples_ends_at_the_replica():
    engine = FakeEngine("hang", delivered=1)
    async with engine_server(engine) as address:
        replica = TorchReplica(address, "m", GatewaySettings())
        sampling = SamplingParams(max_tokens=4)
        call = GroupCall(request_id="r", model_id="m", prompt_token_ids=(1,), num_samples=2, sampling=sampling)
        async with aclosing(replica.generate(call, None, lambda: 0)) as batches:
            assert [sample.index for sample in await anext(batches)] == [0]
        await asyncio.wait_for(engine.cancelled.wait(), 5)
        await replica.close()


async def test_a_call_whose_connection_is_closed_is_lost_and_not_cancelled():
    engine = FakeEngine("hang", delivered=1)
    async with engine_server(engine) as address:
        replica = TorchReplica(address, "m", GatewaySettings())
        sampling = SamplingParams(max_tokens=4)
        call = GroupCall(request_id="r", model_id="m", prompt_token_ids=(1,), num_samples=2, sampling=sampling)
        async with aclosing(merged([replica.generate(call, None, lambda: 0) for _ in range(2)])) as batches:
            await anext(batches)
            await anext(batches)
            waiting = asyncio.ensure_future(anext(batches))
            await asyncio.sleep(0)
            await replica.close()
            with pytest.raises(ReplicaLost, match="closed"):
                await asyncio.wait_for(waiting, 5)


class LateEngine(FakeEngine):
    """Hears of the first abort before it knows the group, and ends the group with the second one."""

    def __init__(self):
        super().__init__()
        self.aborts, self.stopped, self.begun = 0, asyncio.Event(), asyncio.Event()

    async def Generate(self, request, context):
        self.begun.set()
        await self.stopped.wait()
        samples = [Sample(index=index, finish_reason="abort") for index in range(request.num_samples)]
        yield engine_service_pb2.GenerateResponse(samples=samples)

    async def AbortRequests(self, request, context):
        self.aborts += 1
        if self.aborts > 1:
            self.stopped.set()
        return engine_service_pb2.AbortRequestsResponse()


async def test_an_abort_that_overtakes_its_group_on_the_way_to_the_replica_is_said_again():
    engine = LateEngine()
    async with engine_server(engine) as address, gateway() as gate:
        await gate.register("a", grpc_address=address)
        call = asyncio.create_task(answers(gate.stub.GenerateGroup(group(), timeout=10)))
        await asyncio.wait_for(engine.begun.wait(), 5)
        aborted = await gate.stub.Abort(pb.AbortRequest(request_id="r"), timeout=10)
        assert aborted.found
        assert [one.sample.finish_reason for one in await asyncio.wait_for(call, 5)] == ["abort", "abort"]


class Deaf:
    """A replica and its client: one sample, and then another one that nobody takes."""

    def get(self, info):
        return self

    async def generate(self, call, deadline_seconds, serving):
        for index in range(call.num_samples):
            yield [Sample(index=index, finish_reason="stop")]

    async def abort(self, request_id):
        pass


async def test_a_caller_that_takes_nothing_does_not_keep_the_fleet_from_being_parked(monkeypatch):
    monkeypatch.setattr(generation, "_STOPPING_SECONDS", 0.0)
    made = crowded()
    made.table.register(ReplicaInfo(name="replicas/a", model_id="m", http_url="http://a"), 0.0)
    generations = generation.Generations(made, Deaf(), PrefillLegs(made, Deaf(), Pairing(), 1.0))
    sampling = SamplingParams(max_tokens=4)
    call = GroupCall(request_id="r", model_id="m", prompt_token_ids=(1,), num_samples=3, sampling=sampling)
    with generations.new(call, lambda: None) as one:
        async with aclosing(one.batches()) as batches:
            await anext(batches)
            assert one.is_live
            made.fleet.pause("m", park=True)
            await asyncio.wait_for(generations.park("m"), 10)
            made.fleet.resume("m")
            assert len([batch async for batch in batches]) == 2


class FaultyEngine(FakeEngine):
    """Answers as the kit does when an exception comes that nobody expected."""

    async def Generate(self, request, context):
        self.requests.append(request)
        await context.abort(grpc.StatusCode.INTERNAL, "Generate failed: RuntimeError")
        yield


async def test_a_group_moves_on_from_a_replica_that_fails_inside():
    faulty, sound = FaultyEngine(), FakeEngine()
    async with engine_server(faulty) as first, engine_server(sound) as second, gateway() as gate:
        await gate.register("a", grpc_address=first)
        await gate.register("b", grpc_address=second)
        received = await answers(gate.stub.GenerateGroup(group(), timeout=10))
        assert [one.replica for one in received] == ["replicas/b"] * 2
        assert len(faulty.requests) == 1


async def test_who_is_turned_away_when_it_was_cancelled_just_before_harms_nobody():
    room = WaitingRoom(has_room=lambda _: False, max_waiting=1)
    waits = []

    def wait(priority):
        want = Want(model_id="m", num_tokens=1, deadline_seconds=5.0, priority=priority)
        waits.append(asyncio.create_task(room.turn(want, 5.0, 5.0, lambda: None)))

    wait(0)
    await asyncio.sleep(0)
    wait(1)  # runs before the task that is cancelled now does
    waits[0].cancel()
    await asyncio.sleep(0)
    assert not waits[1].done()
    wait(0)
    results = await asyncio.wait_for(asyncio.gather(waits[0], waits[2], return_exceptions=True), 5)
    assert [type(result) for result in results] == [asyncio.CancelledError, Overloaded]
    waits[1].cancel()


def crowded(**fields):
    made = Dispatcher(
        table=ReplicaTable(), fleet=Fleet(), new_policy=LeastLoaded, replica_wait_seconds=30.0, full_at_capacities=1.0
    )
    made.table.register(ReplicaInfo(name="replicas/a", model_id="m", http_url="http://a", capacity=1, **fields), 0.0)
    return made


def request(made, served, name, gate, **fields):
    async def attempt(replica, share):
        served.append(name)
        await gate.wait()
        return True

    want = Want(model_id="m", num_tokens=1, deadline_seconds=30.0, **fields)
    return asyncio.create_task(made.serve(want, attempt))


async def turns():
    for _ in range(20):
        await asyncio.sleep(0)


async def test_what_goes_on_passes_however_many_beginnings_are_held_back_in_the_queue():
    made, served, first, gate = crowded(), [], asyncio.Event(), asyncio.Event()
    tasks = [request(made, served, "first", first)]
    await turns()
    tasks += [request(made, served, "begins", gate, begins=True) for _ in range(100)]
    await turns()
    made.fleet.hold_back("m")
    made.changes.notify()
    tasks.append(request(made, served, "goes on", gate))
    await turns()
    first.set()
    await turns()
    assert served == ["first", "goes on"]
    gate.set()
    made.fleet.let_begin("m")
    made.changes.notify()
    await asyncio.wait_for(asyncio.gather(*tasks), 10)
    assert served.count("begins") == 100
    assert made.fleet.ledger.balanced()
    assert made.fleet.ledger.completed == 102


async def test_a_request_counts_as_running_from_the_moment_it_has_a_replica():
    made, served, first, gate = crowded(), [], asyncio.Event(), asyncio.Event()
    tasks = [request(made, served, "first", first)]
    await turns()
    tasks.append(request(made, served, "second", gate))
    await turns()
    made.table.register(ReplicaInfo(name="replicas/b", model_id="m", http_url="http://b", capacity=1), 0.0)
    made.changes.notify()  # it is placed here; its task has not run since
    assert served == ["first"]
    assert made.fleet.pause("m") == 2
    first.set()
    gate.set()
    await asyncio.wait_for(asyncio.gather(*tasks), 5)
    assert made.fleet.ledger.balanced()


def test_a_group_of_one_replica_that_is_too_large_for_a_message_comes_in_several():
    samples = [Sample(index=index, token_ids=[7] * 60_000, logprobs=[-0.5] * 60_000) for index in range(3)]
    parts = list(whole_group([("replicas/a", samples)]))
    assert [[sample.index for sample in part.samples] for part in parts] == [[0], [1], [2]]
    assert max(part.ByteSize() for part in parts) < 4 << 20
