"""One step of rollouts at once: 64 groups of 8 and 4 groups of 64 on four replicas with a token-time model.

Ours is `GenerateGroup` with the default policy. Each router runs with each of its policies, cache_aware also with tight
thresholds, and gets the samples as single requests or as one request per group; its best median counts. All ways place
the same lengths; costs are those of `token_model.Costs` (a prompt is computed once per replica that has it). Figures of
ours: largest / mean busy time of the replicas; prompt tokens computed / sum of all prompts' lengths; time until the
last sample / that of the best way of the better router.
"""

import argparse
import asyncio
import itertools
import json
import random
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.request import Request, urlopen

import aiohttp
from grpc import aio
from proxies import MODEL, PEERS, Bench, Proxy, bench
from rounds import Measured, interleaved, middle, show
from token_model import Costs
from workload import MAX_TOKENS, PROMPT_TOKENS, Group, groups

from reflux.common.v1.common_pb2 import SamplingParams
from reflux.inference_gateway.v1 import inference_gateway_service_pb2 as pb
from reflux.inference_gateway.v1.inference_gateway_service_pb2_grpc import InferenceGatewayServiceStub

if TYPE_CHECKING:
    from reflux.inference_gateway.v1.inference_gateway_service_pb2_grpc import InferenceGatewayServiceAsyncStub

_LIMIT_SECONDS = 300.0
_TIGHT = ("--balance-abs-threshold", "8", "--balance-rel-threshold", "1.1")
_POLICIES = {
    "round_robin": ("round_robin",),
    "power_of_two": ("power_of_two",),
    "cache_aware": ("cache_aware",),
    "cache_aware-tight": ("cache_aware", *_TIGHT),
}


@dataclass(frozen=True)
class Way:
    """A proxy with a policy, and the shape in which it gets a group: over gRPC, as single requests or as one."""

    name: str
    proxy: Proxy
    shape: str
    max_tokens: int = MAX_TOKENS

    async def place(self, order: Sequence[Group]) -> None:
        """Sends everything and waits for all of it; raises when an answer is short."""
        if self.shape == "grpc":
            await _over_grpc(self.proxy, order, self.max_tokens)
            return
        sizes = [(group, group.num_samples if self.shape == "group" else 1) for group in order]
        parts = [(group, size) for group, size in sizes for _ in range(group.num_samples // size)]
        connector, limit = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=_LIMIT_SECONDS)
        async with (
            aiohttp.ClientSession(connector=connector, timeout=limit) as session,
            asyncio.TaskGroup() as requests,
        ):
            for group, size in parts:
                requests.create_task(_over_http(session, self.proxy, group, size, self.max_tokens))


async def _over_http(session: aiohttp.ClientSession, proxy: Proxy, group: Group, samples: int, max_tokens: int) -> None:
    body = {"model": MODEL, "prompt": group.text(), "n": samples, "max_tokens": max_tokens, "temperature": 1.0}
    async with session.post(f"{proxy.url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{proxy.name}: status {response.status}, {(await response.text())[:200]}")
        choices = (await response.json())["choices"]
    if len(choices) != samples:
        raise RuntimeError(f"{proxy.name}: {len(choices)} of {samples} samples came back")


async def _over_grpc(proxy: Proxy, order: Sequence[Group], max_tokens: int) -> None:
    metadata = (("authorization", f"Bearer {proxy.token}"),)

    async def draw(stub: "InferenceGatewayServiceAsyncStub", group: Group) -> None:
        request = pb.GenerateGroupRequest(
            request_id=uuid.uuid4().hex,
            model_id=MODEL,
            prompt_token_ids=group.ids(),
            num_samples=group.num_samples,
            sampling=SamplingParams(max_tokens=max_tokens, temperature=1.0),
        )
        call = stub.GenerateGroup(request, timeout=_LIMIT_SECONDS, metadata=metadata)
        seen = sorted([answer.sample.index async for answer in call])
        if seen != list(range(group.num_samples)):
            raise RuntimeError(f"group {group.number} came back with samples {seen}")

    async with aio.insecure_channel(proxy.grpc) as channel:
        stub: InferenceGatewayServiceAsyncStub = InferenceGatewayServiceStub(channel)
        async with asyncio.TaskGroup() as calls:
            for group in order:
                calls.create_task(draw(stub, group))


def ways(running: Bench, max_tokens: int = MAX_TOKENS) -> list[Way]:
    """Ours, and every router with every policy in both shapes."""
    found = [Way("reflux", running.reflux(), "grpc", max_tokens)]
    for peer, (label, policy) in itertools.product(PEERS, _POLICIES.items()):
        if proxy := running.router(peer, *policy):
            found += [Way(f"{peer}/{label}/{shape}", proxy, shape, max_tokens) for shape in ("single", "group")]
    return found


def try_out(found: Sequence[Way], small: Group) -> list[Way]:
    """The ways that answer a group at all; why the others do not is printed."""
    able = []
    for way in found:
        try:
            asyncio.run(way.place([small]))
            able.append(way)
        except* RuntimeError as errors:
            print(f"{way.name}: left out, {errors.exceptions[0]}", flush=True)
    return able


def measure(control: str, way: Way, order: Sequence[Group], seed: int) -> Mapping[str, float]:
    """One step of rollouts from empty caches."""
    large = sum(group.num_samples == 64 for group in order)
    mix = f"seed={seed}&small={len(order) - large}&large={large}"
    urlopen(Request(f"{control}/reset?{mix}", b""), timeout=10).close()
    begun = time.perf_counter()
    asyncio.run(way.place(order))
    seconds = time.perf_counter() - begun
    with urlopen(f"{control}/stats", timeout=10) as answer:
        stats = json.load(answer)
    busy, prompts = stats["busy"], len(order) * PROMPT_TOKENS
    hot_spot = max(busy) * len(busy) / sum(busy)
    return {"makespan_s": seconds, "hot_spot": hot_spot, "prefill_ratio": sum(stats["prefilled"]) / prompts}


def makespan_vs_router(measured: Measured, key: str) -> dict[str, float]:
    """{key: our makespan / that of the best way of a router}; which one it is, is printed. Empty without a router."""
    peers = [name for name in measured if name != "reflux"]
    if not peers:
        return {}
    best = min(peers, key=lambda name: middle(measured, name, "makespan_s"))
    print(f"best way of a router: {best}")
    return {key: round(middle(measured, "reflux", "makespan_s") / middle(measured, best, "makespan_s"), 3)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--time-scale", type=float, default=0.5, help="1.0: a step of about 8 s")
    parser.add_argument("--small", type=int, default=64, help="groups of 8")
    parser.add_argument("--large", type=int, default=4, help="groups of 64")
    options = parser.parse_args()
    order = groups(options.small, options.large)
    random.Random(1).shuffle(order)
    turns: dict[str, int] = {}
    with bench() as running:
        scale = ("--time-scale", str(options.time_scale))
        running.start_workers("token_worker.py", 1, *scale, capacity=Costs().max_rows)
        able, control = try_out(ways(running), order[0]), running.workers[0].url

        def turn(way: Way) -> Mapping[str, float]:
            turns[way.name] = turns.get(way.name, 0) + 1
            return measure(control, way, order, seed=turns[way.name])

        measured = interleaved(able, options.rounds, turn, warm_up=0)
    show(measured, {"makespan_s": "s", "hot_spot": "", "prefill_ratio": ""})
    names = ("hot_spot", "prefill_ratio", "makespan_s")
    figures = {f"mix_{name}": round(middle(measured, "reflux", name), 3) for name in names}
    print(json.dumps(figures | makespan_vs_router(measured, "mix_makespan_vs_router")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
