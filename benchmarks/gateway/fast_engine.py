"""A replica like `reflux-engine` that answers at once: `fast_worker.py` and the engine's gRPC service in one process.

    python fast_engine.py           prints "http://127.0.0.1:PORT,127.0.0.1:PORT"

Over gRPC every sample is finished by itself and is a message of its own, as samples of unequal lengths are; a caller
that wants the whole group gets one message.
"""

import asyncio
from collections.abc import AsyncIterator
from functools import lru_cache
from typing import Any

from fast_worker import FastWorker
from grpc import aio

from reflux.common.v1.common_pb2 import Sample, VersionSpan
from reflux.inference_gateway.v1 import engine_service_pb2 as pb
from reflux.inference_gateway.v1.engine_service_pb2_grpc import (
    EngineServiceServicer,
    add_EngineServiceServicer_to_server,
)


@lru_cache(maxsize=1024)
def sample(index: int, num_tokens: int) -> Sample:
    """The same tokens and log-probs that `fast_worker` answers with."""
    return Sample(
        index=index,
        token_ids=[(7919 * (index + 1) + 31 * place) % 150_000 for place in range(num_tokens)],
        logprobs=[-0.01 * ((7 * index + 13 * place) % 97) - 0.0001234 for place in range(num_tokens)],
        finish_reason="length",
        versions=[VersionSpan(start=0, end=num_tokens)],
    )


class FastEngine(EngineServiceServicer):
    """`Generate` only."""

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        samples = [sample(index, request.sampling.max_tokens) for index in range(request.num_samples)]
        for part in [samples] if request.whole_group else [[each] for each in samples]:
            yield pb.GenerateResponse(samples=part)


async def main() -> None:
    engine = aio.server()
    add_EngineServiceServicer_to_server(FastEngine(), engine)  # pyright: ignore[reportAbstractUsage]
    port = engine.add_insecure_port("127.0.0.1:0")
    await engine.start()
    server = await asyncio.get_running_loop().create_server(FastWorker, "127.0.0.1", 0, backlog=4096)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]},127.0.0.1:{port}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
