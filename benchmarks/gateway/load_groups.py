"""Closed-loop callers of GenerateGroup; prints one JSON object.

    python load_groups.py 127.0.0.1:PORT --token T --clients 8 --requests 400 [--whole-group]

Every group is counted: its samples by index, and the tokens of each.
"""

import argparse
import asyncio
import json
import time
import uuid
from typing import TYPE_CHECKING

from grpc import aio

from reflux.common.v1.common_pb2 import SamplingParams
from reflux.inference_gateway.v1 import inference_gateway_service_pb2 as pb
from reflux.inference_gateway.v1.inference_gateway_service_pb2_grpc import InferenceGatewayServiceStub

if TYPE_CHECKING:
    from reflux.inference_gateway.v1.inference_gateway_service_pb2_grpc import InferenceGatewayServiceAsyncStub


async def group(stub: "InferenceGatewayServiceAsyncStub", options: argparse.Namespace) -> int:
    """Messages of one group; raises `RuntimeError` when a sample is missing or short."""
    request = pb.GenerateGroupRequest(
        request_id=uuid.uuid4().hex,
        model_id="mock",
        prompt_token_ids=range(64),
        num_samples=options.samples,
        sampling=SamplingParams(max_tokens=options.max_tokens, temperature=1.0),
        whole_group=options.whole_group,
    )
    metadata, messages, tokens = (("authorization", f"Bearer {options.token}"),), 0, {}
    async for answer in stub.GenerateGroup(request, timeout=options.deadline_seconds, metadata=metadata):
        messages += 1
        for sample in answer.samples or [answer.sample]:
            tokens[sample.index] = len(sample.token_ids)
    if tokens != dict.fromkeys(range(options.samples), options.max_tokens):
        raise RuntimeError(f"a group came back with tokens by sample {tokens}")
    return messages


async def run(options: argparse.Namespace) -> dict[str, float]:
    """All groups; the figures of `load.py` that have a meaning here."""
    left, messages, times = options.requests, 0, []

    async def client(stub: "InferenceGatewayServiceAsyncStub") -> None:
        nonlocal left, messages
        while left > 0:
            left -= 1
            begun = time.perf_counter()
            messages += await group(stub, options)
            times.append((time.perf_counter() - begun) * 1e3)

    async with aio.insecure_channel(options.target) as channel:
        stub: InferenceGatewayServiceAsyncStub = InferenceGatewayServiceStub(channel)
        started = time.perf_counter()
        async with asyncio.TaskGroup() as clients:
            for _ in range(options.clients):
                clients.create_task(client(stub))
        seconds = time.perf_counter() - started
    times.sort()
    counts = {"requests": len(times), "failed": 0, "messages_per_group": messages / max(1, len(times))}
    return {**counts, "seconds": seconds, "p50_ms": times[len(times) // 2]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--token", default="")
    parser.add_argument("--deadline-seconds", type=float, default=60.0)
    parser.add_argument("--whole-group", action="store_true")
    print(json.dumps(asyncio.run(run(parser.parse_args()))))


if __name__ == "__main__":
    main()
