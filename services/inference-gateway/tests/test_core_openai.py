"""Groups on engines that speak HTTP only, against a server that streams as vLLM 0.32 does."""

import asyncio
import json

import grpc
import pytest
from aiohttp import web

from reflux.common.v1.common_pb2 import VersionSpan
from reflux.inference_gateway.v1 import inference_gateway_service_pb2 as pb
from reflux_kit.errors import reason_of

from .gateway_harness import answers, gateway, group, http_server


class VllmServer:
    """Sample i says 10 + i, 20 + i and 2, the end of sequence; the last one waits for `go_on[i]` when there is one."""

    def __init__(self, go_on=None, cut=False, status=200):
        self.go_on = go_on or {}
        self.cut, self.status = cut, status
        self.bodies = []
        self.begun, self.cancelled = asyncio.Event(), asyncio.Event()

    async def __call__(self, request):
        body = await request.json()
        self.bodies.append(body)
        if body["n"] > 1 and body["temperature"] == 0:
            error = {"message": "n must be 1 when using greedy sampling", "code": 400}
            return web.json_response({"error": error}, status=400)
        if self.status != 200:
            return web.json_response({"error": {"message": "no", "code": self.status}}, status=self.status)
        try:
            return await (self.stream(request, body) if body["stream"] else self.whole(body))
        except (asyncio.CancelledError, ConnectionError):
            self.cancelled.set()
            raise

    async def stream(self, request, body):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for index in range(body["n"]):
            await self.event(response, choice(index, [10 + index, 20 + index]))
        self.begun.set()
        if self.cut:
            request.transport.abort()
            return response
        await asyncio.gather(*(self.last(response, index) for index in range(body["n"])))
        await response.write(b"data: [DONE]\n\n")
        return response

    async def last(self, response, index):
        if index in self.go_on:
            await self.go_on[index].wait()
        await self.event(response, choice(index, [2], "stop"))

    async def event(self, response, one):
        event = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m", "choices": [one]}
        text = f"data: {json.dumps(event)}\n\n".encode()
        await response.write(text[:7])
        await response.write(text[7:])

    async def whole(self, body):
        self.begun.set()
        choices = [choice(index, [10 + index, 20 + index, 2], "stop") for index in range(body["n"])]
        return web.json_response({"id": "cmpl-1", "object": "text_completion", "model": "m", "choices": choices})


def choice(index, token_ids, finish_reason=None):
    """One choice of a chunk or of an answer, with every field that vLLM sends."""
    count = len(token_ids)
    logprobs = {
        "text_offset": [0] * count,
        "token_logprobs": [-token / 100 for token in token_ids],
        "tokens": ["\u00e9"] * count,
        "top_logprobs": [{"\u00e9": -0.1}] * count,
    }
    fields = {"finish_reason": finish_reason, "stop_reason": None, "prompt_token_ids": None}
    return {"index": index, "text": "\u00e9" * count, "logprobs": logprobs, "token_ids": token_ids, **fields}


def warm_group(*args, **fields):
    request = group(*args, **fields)
    request.sampling.temperature = 1.0
    return request


def spans(sample):
    return [(span.version, span.start, span.end, span.kv_version) for span in sample.versions]


async def test_samples_come_as_they_finish_with_ids_log_probs_and_the_version_of_each_span():
    last = asyncio.Event()
    engine = VllmServer(go_on={0: last})
    async with gateway() as door, http_server(engine) as url:
        replica = await door.register("a", version=4, http_url=url, engine="vllm")
        request = warm_group(n=2)
        request.sampling.seed, request.sampling.temperature, request.sampling.top_p = 9, 0.5, 0.25
        request.sampling.top_k = 3
        request.sampling.stop_token_ids.extend([2, 5])
        call = door.stub.GenerateGroup(request, timeout=20)
        first = (await call.read()).sample
        replica.version = 5
        await door.stub.Heartbeat(pb.HeartbeatRequest(replica=replica), timeout=5)
        last.set()
        second = (await call.read()).sample
        assert await call.read() == grpc.aio.EOF
    assert (first.index, list(first.token_ids), first.finish_reason) == (1, [11, 21, 2], "stop")
    assert list(first.logprobs) == pytest.approx([-0.11, -0.21, -0.02])
    assert spans(first) == [(4, 0, 3, 4)]
    assert (second.index, list(second.token_ids)) == (0, [10, 20, 2])
    assert spans(second) == [(4, 0, 2, 4), (5, 2, 3, 5)]
    assert engine.bodies == [
        {
            "model": "m",
            "prompt": [1],
            "n": 2,
            "max_tokens": 4,
            "temperature": 0.5,
            "top_p": 0.25,
            "top_k": 3,
            "seed": 9,
            "stop_token_ids": [2, 5],
            "logprobs": 0,
            "return_token_ids": True,
            "stream": True,
            "cache_salt": "weight-version:4",
        }
    ]


async def test_a_whole_group_is_one_answer_without_a_stream():
    engine = VllmServer()
    async with gateway() as door, http_server(engine) as url:
        await door.register("a", http_url=url, engine="sglang")
        (response,) = await answers(door.stub.GenerateGroup(warm_group(n=3, whole_group=True), timeout=20))
    assert [list(sample.token_ids) for sample in response.samples] == [[10, 20, 2], [11, 21, 2], [12, 22, 2]]
    assert engine.bodies[0]["stream"] is False
    assert "seed" not in engine.bodies[0], "SGLang would draw the same three times"


@pytest.mark.parametrize("whole_group", [False, True])
async def test_greedy_samples_are_drawn_once_and_delivered_to_every_index(whole_group):
    engine = VllmServer()
    async with gateway() as door, http_server(engine) as url:
        await door.register("a", http_url=url, engine="vllm")
        responses = await answers(door.stub.GenerateGroup(group(n=3, whole_group=whole_group), timeout=20))
    samples = [one for r in responses for one in (r.samples if whole_group else [r.sample])]
    assert [(sample.index, list(sample.token_ids)) for sample in samples] == [(i, [10, 20, 2]) for i in range(3)]
    assert [body["n"] for body in engine.bodies] == [1]


async def test_abort_hangs_up_and_delivers_the_tokens_so_far():
    engine = VllmServer(go_on={1: asyncio.Event()})
    async with gateway() as door, http_server(engine) as url:
        await door.register("a", http_url=url, engine="vllm")
        call = door.stub.GenerateGroup(warm_group("mine", n=2), timeout=20)
        finished = (await call.read()).sample
        assert (await door.stub.Abort(pb.AbortRequest(request_id="mine"), timeout=5)).found
        aborted = (await call.read()).sample
        await asyncio.wait_for(engine.cancelled.wait(), 10)
    assert (finished.index, finished.finish_reason) == (0, "stop")
    assert (aborted.index, list(aborted.token_ids), aborted.finish_reason) == (1, [11, 21], "abort")
    assert list(aborted.versions) == [VersionSpan(version=0, start=0, end=2, kv_version=0)]


async def test_a_caller_that_goes_away_ends_the_request_at_the_engine():
    engine = VllmServer(go_on={0: asyncio.Event()})
    async with gateway() as door, http_server(engine) as url:
        await door.register("a", http_url=url, engine="vllm")
        call = door.stub.GenerateGroup(warm_group(n=1), timeout=20)
        await asyncio.wait_for(engine.begun.wait(), 10)
        call.cancel()
        await asyncio.wait_for(engine.cancelled.wait(), 10)


@pytest.mark.parametrize("fault", [{"cut": True}, {"status": 503}], ids=["cut", "503"])
async def test_an_engine_that_breaks_with_no_sample_finished_is_replaced(fault):
    bad, good = VllmServer(**fault), VllmServer()
    async with gateway() as door, http_server(bad) as first, http_server(good) as second:
        await door.register("bad", http_url=first, engine="vllm")
        await door.register("good", http_url=second, engine="vllm")
        responses = await answers(door.stub.GenerateGroup(warm_group(n=2), timeout=20))
    assert [response.replica for response in responses] == ["replicas/good"] * 2
    assert len(bad.bodies) == 1


@pytest.mark.parametrize(("status", "code"), [(400, "INVALID_ARGUMENT"), (429, "RESOURCE_EXHAUSTED")])
async def test_what_an_engine_refuses_reaches_the_caller_with_its_words(status, code):
    async with gateway() as door, http_server(VllmServer(status=status)) as url:
        await door.register("a", http_url=url, engine="vllm")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answers(door.stub.GenerateGroup(warm_group(), timeout=20))
    assert caught.value.code().name == code
    assert '"message": "no"' in caught.value.details()


async def test_an_engine_that_sends_no_token_ids_is_named():
    async def plain(request):
        return web.json_response({"choices": [{"index": 0, "text": "x", "finish_reason": "stop"}]})

    async with gateway() as door, http_server(plain) as url:
        await door.register("a", http_url=url)
        await door.register("b", http_url=url)
        with pytest.raises(grpc.aio.AioRpcError, match="return_token_ids") as caught:
            await answers(door.stub.GenerateGroup(warm_group(n=1, whole_group=True), timeout=20))
    assert reason_of(caught.value) == "GENERATION_LOST"
