"""What a handed-over prompt costs beside its prefill, and whether the planner of roles predicts two real engines.

`python -m benchmarks.gateway.handover [rounds]`: real engine cores, one thread each, in this process. No gateway: the
groups go where the planner's simulation puts them, so that its error is that of its rates and its model of a step.
"""

import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import replace
from pathlib import Path

import torch

from reflux_inference_gateway.engine.core import EngineCore
from reflux_inference_gateway.engine.handover import KvExchange
from reflux_inference_gateway.engine.legs import Legs
from reflux_inference_gateway.engine.loop import EngineLoop
from reflux_inference_gateway.engine.served import CoreOptions, Weights
from reflux_inference_gateway.engine.types import GroupRequest, Sampling
from reflux_inference_gateway.policy.role_planner import Group, Rates, propose
from reflux_model.config import ModelConfig
from reflux_model.creation import create_folder
from reflux_model.folder import load_folder
from reflux_model.presets import SMOLLM2_135M
from reflux_transfer.handles import Scope
from reflux_transfer.registry import open_backend

PROMPT_TOKENS = 1024
SMALL = replace(SMOLLM2_135M, num_layers=6, vocab_size=4096)
"""Of which a step takes milliseconds, so that a round of the planner's check takes seconds."""
OPTIONS = CoreOptions(max_rows=16, max_model_len=2048, kv_tokens=16 * 2048, prefix_blocks=1024)


def asked(name: str, prompt: Sequence[int], lengths: Sequence[int], **fields: object) -> list[GroupRequest]:
    """One request per sample: each has a length of its own, and ends there."""
    return [
        GroupRequest(
            request_id=f"{name}.{number}",
            prompt_ids=tuple(prompt),
            num_samples=1,
            sampling=Sampling(max_tokens=length, ignore_eos=True, seed=number),
            **fields,  # pyright: ignore[reportArgumentType]
        )
        for number, length in enumerate(lengths)
    ]


def prompt_of(config: ModelConfig, length: int, seed: int) -> list[int]:
    """Random ids."""
    draw = random.Random(seed)
    return [draw.randrange(2, config.vocab_size) for _ in range(length)]


def exchange_of(config: ModelConfig) -> KvExchange:
    """Over shared memory."""
    return KvExchange(config, torch.float32, open_backend, "shm", Scope("bench"), limit_bytes=1 << 30, lease_seconds=60)


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def run(core: EngineCore, requests: Sequence[GroupRequest]) -> None:
    """To the end."""
    for request in requests:
        core.submit(request)
    while core.step():
        pass


def handover(folder: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds of a prefill, of its offer and of its fetch; the last two are all that layers could hide."""
    config, params = load_folder(folder)
    samples = []
    core = EngineCore(config, Weights(params, 0, 0), OPTIONS, lambda _, event: samples.append(event))
    figures: dict[str, list[float]] = {"prefill": [], "offer": [], "fetch": []}
    with closing(exchange_of(config)) as here, closing(exchange_of(config)) as there:
        for number in range(rounds):
            prompt = prompt_of(config, PROMPT_TOKENS, number)
            figures["prefill"].append(seconds(lambda: run(core, asked("p", prompt, [1], hand_over=True))))  # noqa: B023
            computed, tickets = samples.pop().computed, []
            figures["offer"].append(seconds(lambda: tickets.append(here.offer(prompt, computed))))  # noqa: B023
            figures["fetch"].append(seconds(lambda: there.fetch(prompt, tickets[0])))  # noqa: B023
            here.release(tickets[0]["generation"])
    return figures


def measured_rates(config: ModelConfig, params: dict[str, torch.Tensor]) -> Rates:
    """Of one engine with nothing else to do."""
    core = EngineCore(config, Weights(params, 0, 0), OPTIONS, lambda _, event: None)
    prefill = statistics.median(
        seconds(lambda: run(core, asked("p", prompt_of(config, 400, number), [1]))) / 400  # noqa: B023
        for number in range(5)
    )
    steps = {}
    for rows in (2, 16):
        prompt = prompt_of(config, 400, rows)
        filled = seconds(lambda: run(core, asked("f", prompt, [1] * rows)))  # noqa: B023
        steps[rows] = (seconds(lambda: run(core, asked("d", prompt, [41] * rows))) - filled) / 40  # noqa: B023
    each = max(1e-6, (steps[16] - steps[2]) / 14)
    return Rates(
        prefill_seconds_per_token=prefill,
        step_seconds=max(0.0, steps[2] - 2 * each),
        step_seconds_per_sequence=each,
        capacity=OPTIONS.max_rows,
    )


async def step(
    config: ModelConfig, params: dict[str, torch.Tensor], groups: Sequence[Group], prefill: int, seed: int
) -> float:
    """Seconds of all groups on two engines: both do all, or one of them computes the prompts for the other."""
    async with AsyncExitStack() as stack:
        engines = []
        for _ in range(2):
            loop = EngineLoop(
                lambda deliver: EngineCore(config, Weights(params, 0, 0), OPTIONS, deliver),
                max_open_samples=1024,
                on_failure=lambda reason: None,
            )
            engines.append(await stack.enter_async_context(loop))
        legs = [Legs(one, stack.enter_context(closing(exchange_of(config)))) for one in engines]
        decoding, loads, tasks = engines[prefill:], [0] * (2 - prefill), []
        start = time.perf_counter()

        async def drawn(engine: EngineLoop, request: GroupRequest) -> None:
            async for _ in engine.generate(request):
                pass

        for number, group in enumerate(groups):
            prompt = prompt_of(config, group.prompt_tokens, 1000 * seed + number)
            at, given = loads.index(min(loads)), None
            if prefill:
                ticket = await legs[0].prefill(f"p{number}", tuple(prompt), "")
                given = await legs[1].given(prompt, ticket)
            loads[at] += sum(group.answer_tokens) + (0 if prefill else group.prompt_tokens)
            requests = asked(f"g{number}", prompt, group.answer_tokens, given=given)
            tasks += [asyncio.create_task(drawn(decoding[at], request)) for request in requests]
        await asyncio.gather(*tasks)
        return time.perf_counter() - start


def planner(folder: Path, rounds: int) -> dict[int, list[tuple[float, float]]]:
    """By number of prefill replicas of two: (predicted, measured) seconds of each round."""
    config, params = load_folder(folder)
    found: dict[int, list[tuple[float, float]]] = {0: [], 1: []}
    for number in range(rounds):
        draw = random.Random(number)
        groups = [
            Group(400, tuple(min(200, max(4, round(draw.lognormvariate(3.5, 0.6)))) for _ in range(4)))
            for _ in range(8)
        ]
        rates = measured_rates(config, params)
        predicted = {one.prefill: one.makespan_seconds for one in propose(groups, rates, 2)}
        for prefill in (0, 1):
            found[prefill].append((predicted[prefill], asyncio.run(step(config, params, groups, prefill, number))))
    return found


def spread(values: Sequence[float]) -> list[float]:
    """Median, least, most."""
    return [round(one, 4) for one in (statistics.median(values), min(values), max(values))]


def main() -> None:
    """Prints the figures; the last line is JSON."""
    torch.set_num_threads(1)
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    with tempfile.TemporaryDirectory() as scratch, torch.inference_mode():
        whole, small = Path(scratch) / "whole", Path(scratch) / "small"
        create_folder(whole, SMOLLM2_135M, seed=1)
        create_folder(small, SMALL, seed=1)
        figures: dict[str, object] = {
            f"handover_{name}_seconds": spread(values) for name, values in handover(whole, rounds).items()
        }
        print(json.dumps(figures), flush=True)
        for prefill, pairs in planner(small, rounds).items():
            figures[f"predicted_{prefill}p_seconds"] = spread([predicted for predicted, _ in pairs])
            figures[f"measured_{prefill}p_seconds"] = spread([measured for _, measured in pairs])
            figures[f"error_{prefill}p"] = spread([predicted / measured - 1 for predicted, measured in pairs])
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
