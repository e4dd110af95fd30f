"""Four replicas in the time of `token_model.py`, each with an OpenAI door and the engine's gRPC service.

    python token_worker.py [--time-scale 0.5]    prints "http://127.0.0.1:PORT,127.0.0.1:PORT ..." for all of them

All of them draw the lengths of a group's samples from one list, in the order in which samples come, so that every
proxy has the same work to place. `POST /reset?seed=N&small=64&large=4` empties caches and counters and draws lengths
for a mix, `GET /stats` shows the counters.
"""

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web
from grpc import aio
from token_model import Costs, Replica
from workload import MAX_TOKENS, PROMPT_TOKENS, group_of, groups

from reflux.common.v1.common_pb2 import Sample, VersionSpan
from reflux.inference_gateway.v1 import engine_service_pb2 as pb
from reflux.inference_gateway.v1.engine_service_pb2_grpc import (
    EngineServiceServicer,
    add_EngineServiceServicer_to_server,
)

_REPLICAS = 4
_TOKEN, _LOGPROB = 7, -0.5


class Lengths:
    """What every sample will have in tokens, by group; other prompts get one token."""

    def __init__(self) -> None:
        self._left: dict[int, list[int]] = {}

    def reset(self, seed: int, small: int, large: int) -> None:
        """Fills the lists anew."""
        self._left = {group.number: group.lengths(seed)[::-1] for group in groups(small, large)}

    def take(self, prompt: str | list[int], limit: int) -> int:
        """The next length of the prompt's group."""
        left = self._left.get(group_of(prompt)) if limit == MAX_TOKENS else None
        return min(left.pop(), limit) if left else 1


class Door:
    """One replica's HTTP routes."""

    def __init__(self, replica: Replica, lengths: Lengths) -> None:
        self._replica, self._lengths = replica, lengths

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """`n` samples; as a stream each sample is one event when it is finished."""
        body = await request.json()
        drawn = [self._draw(body, index) for index in range(body.get("n") or 1)]
        if body.get("stream"):
            return await self._stream(request, body, drawn)
        choices = await asyncio.gather(*drawn)
        tokens = sum(len(choice["token_ids"]) for choice in choices)
        usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": tokens, "total_tokens": PROMPT_TOKENS + tokens}
        return web.json_response(_completion(body, choices) | {"usage": usage})

    async def probe(self, request: web.Request) -> web.Response:
        """What routers ask before they use a replica."""
        info = {"model_path": "mock", "served_model_name": "mock", "is_generation": True, "dp_size": 1, "tp_size": 1}
        models = {"object": "list", "data": [{"id": "mock", "object": "model", "owned_by": "mock", "root": "mock"}]}
        return web.json_response(models if request.path == "/v1/models" else info)

    async def load(self, _request: web.Request) -> web.Response:
        """SGLang's load report."""
        return web.json_response([{"rid": "", "dp_rank": 0, "num_reqs": self._replica.load, "num_waiting_reqs": 0}])

    async def _stream(self, request: web.Request, body: dict[str, Any], drawn: list[Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for choice in asyncio.as_completed(drawn):
            await response.write(f"data: {json.dumps(_completion(body, [await choice]))}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _draw(self, body: dict[str, Any], index: int) -> dict[str, Any]:
        prompt = body["prompt"]
        length = self._lengths.take(prompt, body.get("max_tokens") or 1)
        await self._replica.generate(group_of(prompt) if length > 1 else "probe", _size(prompt), length)
        logprobs = {"tokens": ["t"] * length, "token_logprobs": [_LOGPROB] * length}
        ids = {"token_ids": [_TOKEN] * length, "logprobs": logprobs}
        return {"index": index, "text": "t" * length, "finish_reason": "stop", **ids}


class Engine(EngineServiceServicer):
    """The same replica over gRPC."""

    def __init__(self, replica: Replica, lengths: Lengths) -> None:
        self._replica, self._lengths = replica, lengths

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        prompt = list(request.prompt_token_ids)
        drawn = [self._draw(prompt, index, request.sampling.max_tokens) for index in range(request.num_samples)]
        if request.whole_group:
            yield pb.GenerateResponse(samples=await asyncio.gather(*drawn))
            return
        for sample in asyncio.as_completed(drawn):
            yield pb.GenerateResponse(samples=[await sample])

    async def _draw(self, prompt: list[int], index: int, limit: int) -> Sample:
        length = self._lengths.take(prompt, limit)
        await self._replica.generate(group_of(prompt), len(prompt), length)
        spans = [VersionSpan(start=0, end=length)]
        ids = {"token_ids": [_TOKEN] * length, "logprobs": [_LOGPROB] * length}
        return Sample(index=index, finish_reason="stop", versions=spans, **ids)


def _completion(body: dict[str, Any], choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": "c", "object": "text_completion", "created": 1, "model": body["model"], "choices": choices}


def _size(prompt: str | list[int]) -> int:
    """Tokens of a prompt; every text of the mix stands for PROMPT_TOKENS."""
    return len(prompt) if isinstance(prompt, list) else PROMPT_TOKENS if len(prompt) > 1 else 1


async def serve(replica: Replica, lengths: Lengths, control: list[web.RouteDef], engine: aio.Server) -> str:
    """Opens both doors of a replica; its addresses. The caller keeps `engine`, which ends when nobody does."""
    door = Door(replica, lengths)
    app = web.Application(client_max_size=1 << 26)
    app.add_routes([*control, web.post("/v1/completions", door.completions), web.get("/get_load", door.load)])
    app.router.add_get("/{path:.*}", door.probe)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=2048).start()
    servicer = Engine(replica, lengths)  # pyright: ignore[reportAbstractUsage]
    add_EngineServiceServicer_to_server(servicer, engine)
    port = engine.add_insecure_port("127.0.0.1:0")
    await engine.start()
    return f"http://127.0.0.1:{runner.addresses[0][1]},127.0.0.1:{port}"


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time-scale", type=float, default=1.0)
    costs = Costs(time_scale=parser.parse_args().time_scale)
    replicas, lengths = [Replica(costs) for _ in range(_REPLICAS)], Lengths()

    async def reset(request: web.Request) -> web.Response:
        lengths.reset(*(int(request.query[name]) for name in ("seed", "small", "large")))
        for replica in replicas:
            replica.reset()
        return web.json_response({})

    async def stats(_request: web.Request) -> web.Response:
        busy = [replica.busy_seconds for replica in replicas]
        return web.json_response({"busy": busy, "prefilled": [replica.prefilled_tokens for replica in replicas]})

    control = [web.post("/reset", reset), web.get("/stats", stats)]
    servers = [aio.server() for _ in replicas]
    pairs = zip(replicas, servers, strict=True)
    addresses = [await serve(replica, lengths, control, server) for replica, server in pairs]
    print(" ".join(addresses), flush=True)
    async with asyncio.TaskGroup() as engines:
        for replica in replicas:
            engines.create_task(replica.run())


if __name__ == "__main__":
    asyncio.run(main())
