"""Pauses that stop running groups, and aborts by what requests have in common."""

import asyncio

import grpc
import pytest

from reflux.common.v1.common_pb2 import Sample, VersionSpan
from reflux.inference_gateway.v1 import engine_service_pb2, engine_service_pb2_grpc
from reflux.inference_gateway.v1 import inference_gateway_service_pb2 as pb
from reflux_inference_gateway.engine.types import sample_seed
from reflux_inference_gateway.partial import joined

from .gateway_harness import answers, engine_server, gateway, group

PARTIAL = pb.PauseFleetRequest.MODE_PARTIAL
LENGTH = 6


class Stoppable(engine_service_pb2_grpc.EngineServiceServicer):
    """Each token is a function of the sample's seed and its position; `stops_at` tokens come before it waits for an
    abort, none when it waits for nothing. The last sample of a request is done before the others.
    """

    def __init__(self, version=1, stops_at=None):
        self.version, self.stops_at = version, stops_at
        self.requests, self.aborts = [], []
        self.stopped = {}

    async def Generate(self, request, context):
        self.requests.append(request)
        stop = self.stopped.setdefault(request.request_id, asyncio.Event())
        last = request.num_samples - 1
        for index in (last, *range(last)):
            if self.stops_at is not None and (index != last or last == 0):
                await stop.wait()
                yield self.response(request, index, min(self.stops_at, request.sampling.max_tokens), "abort")
            else:
                yield self.response(request, index, request.sampling.max_tokens, "length")

    def response(self, request, index, count, reason):
        sample = Sample(index=index, token_ids=drawn(request, index, count), finish_reason=reason)
        sample.logprobs.extend([-0.5] * count)
        if count:
            sample.versions.append(VersionSpan(version=self.version, start=0, end=count, kv_version=self.version))
        return engine_service_pb2.GenerateResponse(samples=[sample])

    async def AbortRequests(self, request, context):
        self.aborts += request.request_ids
        for request_id in request.request_ids:
            if request_id in self.stopped:
                self.stopped[request_id].set()
        return engine_service_pb2.AbortRequestsResponse(aborted_ids=request.request_ids)


def drawn(request, index, count):
    seed, first = sample_seed(request.sampling.seed, index), len(request.prompt_token_ids)
    return [(seed + position * 7919) % 1009 for position in range(first, first + count)]


def long_group(request_id="r", n=3, **fields):
    request = group(request_id, n=n, **fields)
    request.sampling.max_tokens, request.sampling.seed = LENGTH, 77
    return request


async def started(*engines):
    while not all(engine.requests for engine in engines):
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("whole_group", [False, True])
@pytest.mark.parametrize("stops_at", [0, 2])
async def test_what_a_pause_stopped_goes_on_elsewhere_as_if_nothing_had_been(stops_at, whole_group):
    old, new = Stoppable(version=4, stops_at=stops_at), Stoppable(version=5)
    async with gateway() as door, engine_server(old) as first, engine_server(new) as second:
        await door.register("old", grpc_address=first)
        request = long_group(whole_group=whole_group)
        call = asyncio.create_task(answers(door.stub.GenerateGroup(request, timeout=30)))
        await started(old)
        paused = await door.stub.PauseFleet(pb.PauseFleetRequest(model_id="m", mode=PARTIAL), timeout=20)
        assert (paused.running, paused.ledger.held, paused.ledger.running) == (0, 1, 0)
        await door.register("new", grpc_address=second)
        await door.stub.DeregisterReplica(pb.DeregisterReplicaRequest(name="replicas/old"), timeout=5)
        assert not call.done()
        resumed = await door.stub.ResumeFleet(pb.ResumeFleetRequest(model_id="m"), timeout=5)
        assert resumed.released == 1
        responses = await asyncio.wait_for(call, 20)
        after = (await door.stub.ResumeFleet(pb.ResumeFleetRequest(), timeout=5)).ledger
    samples = [one for r in responses for one in (r.samples if whole_group else [r.sample])]
    samples.sort(key=lambda sample: sample.index)
    assert [list(sample.token_ids) for sample in samples] == [drawn(request, index, LENGTH) for index in range(3)]
    assert {sample.finish_reason for sample in samples} == {"length"}
    spans = [[(span.version, span.start, span.end) for span in sample.versions] for sample in samples]
    stopped = [(4, 0, stops_at), (5, stops_at, LENGTH)] if stops_at else [(5, 0, LENGTH)]
    assert spans == [stopped, stopped, [(4, 0, LENGTH)]]
    assert sorted(one.sampling.max_tokens for one in new.requests) == [LENGTH - stops_at] * 2
    assert (after.entered, after.completed, after.held, after.running) == (1, 1, 0, 0)


async def test_a_held_pause_lets_running_groups_end_and_counts_all_in_its_ledger():
    engine = Stoppable(stops_at=1)
    async with gateway() as door, engine_server(engine) as address:
        await door.register("a", grpc_address=address)
        call = asyncio.create_task(answers(door.stub.GenerateGroup(long_group(), timeout=30)))
        await started(engine)
        paused = await door.stub.PauseFleet(pb.PauseFleetRequest(), timeout=5)
        assert (paused.running, paused.ledger) == (1, pb.Ledger(entered=1, running=1))
        assert (await door.stub.Abort(pb.AbortRequest(request_id="r"), timeout=5)).found
        assert len(await asyncio.wait_for(call, 10)) == 3
        assert (await door.stub.ResumeFleet(pb.ResumeFleetRequest(), timeout=5)).ledger == pb.Ledger(
            entered=1, completed=1
        )


async def test_what_begins_is_held_back_while_what_goes_on_passes_whatever_else_is_paused_and_resumed():
    engine = Stoppable()
    beginnings = {"model_id": "m", "mode": pb.PauseFleetRequest.MODE_BEGINNINGS}
    async with gateway() as door, engine_server(engine) as address:
        await door.register("a", grpc_address=address)
        await door.stub.PauseFleet(pb.PauseFleetRequest(**beginnings), timeout=5)
        begins = asyncio.create_task(answers(door.stub.GenerateGroup(long_group("begins"), timeout=30)))
        goes_on = await answers(door.stub.GenerateGroup(long_group("goes_on", continues=True), timeout=30))
        assert len(goes_on) == 3
        await door.stub.PauseFleet(pb.PauseFleetRequest(model_id="m"), timeout=5)
        await door.stub.ResumeFleet(pb.ResumeFleetRequest(model_id="m"), timeout=5)
        watched = await door.stub.WatchFleet(pb.WatchFleetRequest(), timeout=10).read()
        assert (list(watched.paused_models), list(watched.held_back_models)) == ([], ["m"])
        await answers(door.stub.GenerateGroup(long_group("again", continues=True), timeout=30))
        assert not begins.done()
        assert (await door.stub.ResumeFleet(pb.ResumeFleetRequest(**beginnings), timeout=5)).released == 1
        assert len(await asyncio.wait_for(begins, 10)) == 3


async def test_beginnings_that_are_held_on_a_lease_go_on_when_it_is_over():
    beginnings = {"model_id": "m", "mode": pb.PauseFleetRequest.MODE_BEGINNINGS}
    engine = Stoppable()
    async with gateway() as door, engine_server(engine) as address:
        await door.register("a", grpc_address=address)
        for wrong in (-1.0, float("nan"), 1e9):
            with pytest.raises(grpc.aio.AioRpcError, match="lease_seconds"):
                await door.stub.PauseFleet(pb.PauseFleetRequest(lease_seconds=wrong, **beginnings), timeout=5)
        await door.stub.PauseFleet(pb.PauseFleetRequest(lease_seconds=0.5, **beginnings), timeout=5)
        begins = asyncio.create_task(answers(door.stub.GenerateGroup(long_group("begins"), timeout=30)))
        await asyncio.sleep(0.1)
        assert not begins.done()
        assert len(await asyncio.wait_for(begins, 10)) == 3
        watched = await door.stub.WatchFleet(pb.WatchFleetRequest(), timeout=10).read()
        assert list(watched.held_back_models) == []


async def test_an_abort_in_the_pause_delivers_the_tokens_so_far():
    engine = Stoppable(stops_at=2)
    async with gateway() as door, engine_server(engine) as address:
        await door.register("a", grpc_address=address)
        request = long_group()
        call = asyncio.create_task(answers(door.stub.GenerateGroup(request, timeout=30)))
        await started(engine)
        await door.stub.PauseFleet(pb.PauseFleetRequest(mode=PARTIAL), timeout=20)
        assert (await door.stub.Abort(pb.AbortRequest(request_id="r"), timeout=5)).num_requests == 1
        responses = await asyncio.wait_for(call, 10)
    got = {one.sample.index: (list(one.sample.token_ids), one.sample.finish_reason) for one in responses}
    assert got == {
        0: (drawn(request, 0, 2), "abort"),
        1: (drawn(request, 1, 2), "abort"),
        2: (drawn(request, 2, LENGTH), "length"),
    }


async def test_abort_stops_what_has_a_session_a_group_or_a_run_in_common():
    engine = Stoppable(stops_at=1)
    async with gateway() as door, engine_server(engine) as address:
        await door.register("a", grpc_address=address)
        await door.register("b", grpc_address=address, model="m/adapters/x")
        calls = {}
        for name, fields in (
            ("one", {"session": "s1", "group": "g1"}),
            ("two", {"session": "s2", "group": "g1"}),
            ("three", {"session": "s2", "group": "g2"}),
            ("four", {}),
        ):
            request = long_group(name, n=1, **fields)
            if name == "four":
                request.model_id = "m/adapters/x"
            calls[name] = asyncio.create_task(answers(door.stub.GenerateGroup(request, timeout=30)))
        while len(engine.requests) < 4:
            await asyncio.sleep(0.005)

        async def ended_by(**fields):
            stopped = await door.stub.Abort(pb.AbortRequest(**fields), timeout=5)
            names = [name for name in calls if name in engine.aborts]
            await asyncio.wait_for(asyncio.gather(*(calls[name] for name in names)), 10)
            engine.aborts.clear()
            assert stopped.num_requests == len(names)
            return names

        assert await ended_by(session="s2", group="g2") == ["three"]
        assert await ended_by(group="g1") == ["one", "two"]
        assert await ended_by(run="m") == ["four"]
        assert not (await door.stub.Abort(pb.AbortRequest(run="m"), timeout=5)).found
        with pytest.raises(grpc.aio.AioRpcError, match="one of request_id, session, group and run") as caught:
            await door.stub.Abort(pb.AbortRequest(), timeout=5)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_pieces_of_one_version_become_one_span_and_those_of_two_stay_apart():
    def piece(version, kv_version, count, reason="stop"):
        span = VersionSpan(version=version, start=0, end=count, kv_version=kv_version)
        return Sample(index=3, token_ids=range(count), logprobs=[-1] * count, versions=[span], finish_reason=reason)

    def spans(sample):
        return [(span.version, span.start, span.end, span.kv_version) for span in sample.versions]

    first = piece(4, 4, 2, "abort")
    same, other = joined(first, piece(4, 4, 3)), joined(first, piece(5, 5, 3))
    assert (same.index, list(same.token_ids), same.finish_reason) == (3, [0, 1, 0, 1, 2], "stop")
    assert spans(same) == [(4, 0, 5, 4)]
    assert spans(other) == [(4, 0, 2, 4), (5, 2, 5, 5)]
    assert spans(joined(first, Sample(index=3, finish_reason="abort"))) == [(4, 0, 2, 4)]
    assert spans(first) == [(4, 0, 2, 4)], "the piece itself stays as it is"
