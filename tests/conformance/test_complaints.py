"""Complaints that users of other gateways have filed, as tests (README.md says which is which)."""

import asyncio
import hashlib
import json
import random
from collections import Counter
from contextlib import AsyncExitStack

import pytest
from aiohttp import web
from gateway_harness import FakeEngine, answers, engine_server, gateway, group, http_server

from reflux.common.v1.common_pb2 import Sample
from reflux.inference_gateway.v1 import engine_service_pb2
from reflux.inference_gateway.v1 import inference_gateway_service_pb2 as pb
from reflux.inference_gateway.v1.engine_service_pb2_grpc import EngineServiceServicer

GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/inference/v1/generate", "/generate")
OWN_EDITS = {"cache_salt", "extra_key"}
"""What the gateway may add to a body or set in it."""


async def ok(request):
    return web.json_response({"path": request.path})


def nested(draw, depth):
    """A random JSON value."""
    if depth == 0:
        return draw.choice([None, True, draw.random(), draw.randrange(1 << 53), "\u6f22\u2028\U0001f642", ""])
    size = draw.randrange(4)
    if draw.random() < 0.5:
        return [nested(draw, depth - 1) for _ in range(size)]
    return {f"k{place}": nested(draw, depth - 1) for place in range(size)}


@pytest.mark.parametrize("path", GENERATING)
async def test_g01_every_field_and_header_reaches_the_engine(path):
    seen = {}

    async def keep(request):
        seen["body"], seen["headers"] = await request.json(), request.headers
        return web.json_response({})

    draw = random.Random(7)
    body = {"model": "m", "prompt": "x", "messages": [], "n": 64, "priority": 3, "rid": "r", "weight_version": "v"}
    body |= {"return_token_ids": True, "kv_transfer_params": {"do_remote_decode": True}, "max_tokens": 5}
    body |= {f"unknown_{place}": nested(draw, 3) for place in range(20)}
    headers = {"x-session-id": "s", "x-data-parallel-rank": "1", "x-custom": "c", "x-request-id": "id"}
    async with gateway() as door, http_server(keep) as url:
        await door.register("a", http_url=url)
        async with door.http.post(path, json=body, headers=headers) as response:
            assert response.status == 200
    assert {name: value for name, value in seen["body"].items() if name not in OWN_EDITS} == body
    assert {name: seen["headers"][name] for name in headers} == headers


async def test_g02_and_g08_one_replica_that_never_answers_holds_nobody_else_up():
    stuck, counts = asyncio.Event(), Counter()

    async def never(request):
        stuck.set()
        await asyncio.Event().wait()
        return web.Response()

    async def lives(request):
        counts["lives"] += 1
        return web.json_response({})

    async with gateway() as door, http_server(never) as first, http_server(lives) as second:
        await door.register("slow", http_url=first)
        held = asyncio.create_task(door.http.post("/v1/completions", json={"model": "m", "prompt": "held"}))
        await asyncio.wait_for(stuck.wait(), 10)
        await door.register("idle", http_url=second)
        for number in range(20):
            body = {"model": "m", "prompt": f"{number} is new", "max_tokens": 4}
            async with asyncio.timeout(10), door.http.post("/v1/completions", json=body) as response:
                assert response.status == 200
        held.cancel()
    assert counts["lives"] == 20


@pytest.mark.parametrize("path", GENERATING)
async def test_g03_a_burst_is_spread_whatever_its_path(path):
    counts, gate = Counter(), asyncio.Event()

    async def handler(request):
        counts[request.host] += 1
        if counts.total() == 40:
            gate.set()
        await gate.wait()
        return web.json_response({})

    async with gateway() as door, AsyncExitStack() as stack:
        for name in "abcd":
            await door.register(name, http_url=await stack.enter_async_context(http_server(handler)))
        body = {"model": "m", "prompt": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 8}
        async with asyncio.timeout(20):
            responses = await asyncio.gather(*(door.http.post(path, json=body) for _ in range(40)))
    assert {response.status for response in responses} == {200}
    assert sorted(counts.values()) == [10] * 4


async def test_g04_a_burst_over_grpc_is_spread_likewise():
    engines = [FakeEngine("hang") for _ in range(4)]
    async with gateway() as door, AsyncExitStack() as stack:
        for place, engine in enumerate(engines):
            await door.register(str(place), grpc_address=await stack.enter_async_context(engine_server(engine)))
        calls = [
            asyncio.create_task(answers(door.stub.GenerateGroup(group(f"r{i}", n=1), timeout=60))) for i in range(40)
        ]
        async with asyncio.timeout(30):
            while sum(len(engine.requests) for engine in engines) < 40:
                await asyncio.sleep(0.005)
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
    assert [len(engine.requests) for engine in engines] == [10] * 4


class Together(FakeEngine):
    """Answers when all samples of all engines have come, so that nobody is idle earlier than others."""

    def __init__(self, came, expected):
        super().__init__()
        self.came, self.expected = came, expected

    async def Generate(self, request, context):
        self.came["samples"] += request.num_samples
        if self.came["samples"] == self.expected:
            self.came["all"].set()
        await self.came["all"].wait()
        async for answer in super().Generate(request, context):
            yield answer


async def test_g05_groups_neither_pile_up_on_a_replica_nor_scatter_over_all():
    came = {"samples": 0, "all": asyncio.Event()}
    engines = [Together(came, 64 * 8) for _ in range(8)]
    async with gateway(routing="group_spread") as door, AsyncExitStack() as stack:
        for place, engine in enumerate(engines):
            await door.register(str(place), grpc_address=await stack.enter_async_context(engine_server(engine)))
        calls = []
        for number in range(64):
            request = group(f"g{number}", n=8)
            request.prompt_token_ids[:] = [number, *range(100, 600)]
            calls.append(answers(door.stub.GenerateGroup(request, timeout=30)))
        responses = await asyncio.gather(*calls)
    assert [len(each) for each in responses] == [8] * 64
    samples = [sum(request.num_samples for request in engine.requests) for engine in engines]
    assert max(samples) <= 1.2 * sum(samples) / len(samples)
    prompts = Counter(request.prompt_token_ids[0] for engine in engines for request in engine.requests)
    assert max(prompts.values()) <= 2


async def test_g11_and_g12_sockets_that_a_replica_closed_while_idle_never_become_an_error():
    answered = 0

    async def close_after_answer(reader, writer):
        nonlocal answered
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
        )
        await reader.readexactly(length)
        answered += 1
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")
        await writer.drain()
        writer.close()  # without a word: the answer promised to keep the connection

    server = await asyncio.start_server(close_after_answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, gateway(heartbeat_seconds=0.05) as door:
        replica = await door.register("a", http_url=f"http://127.0.0.1:{port}")
        beats = asyncio.create_task(beat(door, replica))
        statuses = Counter()
        for number in range(100):
            async with asyncio.timeout(20), door.http.post("/v1/completions", json={"model": "m", "prompt": "x"}) as it:
                statuses[it.status] += 1
            if number % 10 == 0:
                await asyncio.sleep(0.01)
        beats.cancel()
    assert statuses == {200: 100}
    assert answered == 100


async def beat(door, replica):
    while True:
        await door.stub.Heartbeat(pb.HeartbeatRequest(replica=replica), timeout=5)
        await asyncio.sleep(0.02)


async def test_g13_after_a_part_is_out_nothing_is_sent_again():
    asked = Counter()

    async def breaks(request):
        asked[request.host] += 1
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number in range(3):
            await response.write(f"data: {number}\n\n".encode())
        request.transport.close()
        return response

    async with gateway() as door, http_server(breaks) as first, http_server(breaks) as second:
        await door.register("a", http_url=first)
        await door.register("b", http_url=second)
        async with door.http.post("/v1/completions", json={"model": "m", "prompt": "x", "stream": True}) as response:
            events = (await response.read()).decode().strip().split("\n\n")
    assert events[:3] == ["data: 0", "data: 1", "data: 2"]
    assert len(events) == 4
    assert "error" in json.loads(events[3].removeprefix("data: "))
    assert asked.total() == 1


@pytest.mark.parametrize("megabytes", [1, 8, 60])
async def test_g17_large_bodies_arrive_whole(megabytes):
    digests = []

    async def digest(request):
        digests.append(hashlib.sha256(await request.read()).hexdigest())
        return web.json_response({})

    raw = b'{"model": "m", "prompt": "' + b"abcdefgh" * (megabytes << 17) + b'"}'
    async with gateway() as door, http_server(digest) as url:
        await door.register("a", http_url=url)
        async with door.http.post("/v1/completions", data=raw) as response:
            assert response.status == 200
    assert digests == [hashlib.sha256(raw).hexdigest()]


async def test_g18_headers_of_the_connection_stay_on_it():
    body = b'data: {"a": 1}\n\ndata: [DONE]\n\n'

    async def respond(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n")
        writer.write(b"Connection: keep-alive, x-hop\r\nKeep-Alive: timeout=1\r\nX-Hop: 1\r\nX-Mine: 1\r\n\r\n")
        writer.write(b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")
        await writer.drain()

    server = await asyncio.start_server(respond, "127.0.0.1", 0)
    async with server, gateway() as door:
        await door.register("a", http_url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        async with door.http.post("/v1/completions", json={"model": "m", "prompt": "x", "stream": True}) as response:
            assert await response.read() == body
            names = {name.lower() for name in response.headers}
    assert "x-mine" in names
    assert not names & {"x-hop", "keep-alive"}


async def test_g22_the_list_of_models_does_not_depend_on_any_replica():
    async with gateway() as door:
        for name in ("dead0", "dead1"):
            await door.register(name, http_url="http://127.0.0.1:1")
        for _ in range(5):
            async with door.http.get("/v1/models") as response:
                assert [model["id"] for model in (await response.json())["data"]] == ["m"]


class Abortable(EngineServiceServicer):
    """Draws until it is told to stop."""

    def __init__(self):
        self.stops = {}

    async def Generate(self, request, context):
        await self.stops.setdefault(request.request_id, asyncio.Event()).wait()
        samples = [Sample(index=index, finish_reason="abort") for index in range(request.num_samples)]
        yield engine_service_pb2.GenerateResponse(samples=samples)

    async def AbortRequests(self, request, context):
        for request_id in request.request_ids:
            self.stops.setdefault(request_id, asyncio.Event()).set()
        return engine_service_pb2.AbortRequestsResponse(aborted_ids=request.request_ids)


async def test_g27_no_group_survives_an_abort_that_comes_while_it_is_let_in():
    async with gateway() as door, engine_server(Abortable()) as address:
        await door.register("a", grpc_address=address)
        calls = [asyncio.create_task(answers(door.stub.GenerateGroup(group(f"r{i}"), timeout=60))) for i in range(20)]
        async with asyncio.timeout(30):
            for number in range(20):
                request = pb.AbortRequest(request_id=f"r{number}")
                while not (await door.stub.Abort(request, timeout=10)).found:
                    await asyncio.sleep(0)
            responses = await asyncio.gather(*calls)
    assert {response.sample.finish_reason for each in responses for response in each} == {"abort"}
    assert [len(each) for each in responses] == [2] * 20


async def test_g26_no_prefix_outlives_the_weights_that_computed_it():
    cached, hits = set(), []

    async def draw(request):
        body = await request.json()
        key = (body["cache_salt"], *body["prompt"])
        hits.append(key in cached)
        cached.add(key)
        choices = [{"index": 0, "token_ids": [7], "logprobs": {"token_logprobs": [-0.5]}, "finish_reason": "stop"}]
        return web.json_response({"choices": choices})

    async with gateway() as door, http_server(draw) as url:
        replica = await door.register("a", version=1, http_url=url, engine="vllm")
        for version in (1, 1, 2, 2):
            replica.version = version
            await door.stub.Heartbeat(pb.HeartbeatRequest(replica=replica), timeout=5)
            (answer,) = await answers(door.stub.GenerateGroup(group(n=1, whole_group=True), timeout=10))
            assert answer.samples[0].versions[0].version == version
    assert hits == [False, True, False, True]
