"""How long does a replica under load stand still for new weights? The gap between two decode steps around a swap.

A real torch engine decodes 32 sequences of 64 prompt tokens all the time, with both policies for their keys and
values: `refresh` computes them anew, `keep` goes on with the old ones. A real learner publishes when the rows are fresh
again, or after 10 s. The pause is what the engine reports with its acknowledgement; the bar is the larger of 25 ms and
one decode step of all rows, measured in the same run before the swaps.
"""

import argparse
import itertools
import json
import statistics
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from fleet import Engine, Fleet, fleet, model_folder

from reflux.common.v1.common_pb2 import SamplingParams
from reflux.inference_gateway.v1 import engine_service_pb2 as pb
from reflux.inference_gateway.v1.engine_service_pb2_grpc import EngineServiceStub

ROWS = 32
BAR_MS = 25.0
_PROMPT_TOKENS = 64
_TOKENS = 128
_GENERATED = "reflux_engine_generated_tokens_total"
_STEPS = 30
_POLL_SECONDS = 0.005
_POLICIES = ("refresh", "keep")


@contextmanager
def load(engine: Engine) -> Iterator[None]:
    """Keeps all rows busy: one request per row, followed by the next."""
    done = threading.Event()
    with grpc.insecure_channel(engine.grpc) as channel:
        stub = EngineServiceStub(channel)

        def keep_busy(row: int) -> None:
            number = row * _TOKENS // ROWS  # rows do not end all at once
            while not done.is_set():
                request = pb.GenerateRequest(
                    request_id=str(uuid.uuid4()),
                    prompt_token_ids=[5 + (row + place) % 400 for place in range(_PROMPT_TOKENS)],
                    num_samples=1,
                    sampling=SamplingParams(max_tokens=max(1, _TOKENS - number), temperature=1.0, seed=row),
                )
                number = 0
                calls[row] = stub.Generate(request)
                try:
                    for _ in calls[row]:
                        pass
                except grpc.RpcError:
                    assert done.is_set()

        calls: dict[int, Any] = {}
        threads = [threading.Thread(target=keep_busy, args=(row,), daemon=True) for row in range(ROWS)]
        for thread in threads:
            thread.start()
        while engine.metric("reflux_engine_running_sequences") < ROWS:
            time.sleep(0.1)
        try:
            yield
        finally:
            done.set()
            for call in calls.values():
                call.cancel()
            for thread in threads:
                thread.join()


def decode_step_ms(engine: Engine) -> float:
    """Median time of a decode step of all rows; no row is stale. Prefills between two steps are outliers of it."""
    seen, ends = engine.metric(_GENERATED), []
    while len(ends) <= _STEPS:
        now = engine.metric(_GENERATED)
        if now != seen:
            seen = now
            ends.append(time.perf_counter())
        time.sleep(_POLL_SECONDS)
    return statistics.median(end - begin for begin, end in itertools.pairwise(ends)) * 1e3


def settle(engine: Engine, swaps: int, seconds: float) -> bool:
    """Waits until the rows of all swaps have been computed anew, so that a swap meets a replica that decodes."""
    end = time.monotonic() + seconds
    while engine.metric("reflux_engine_refresh_seconds_count") < swaps:
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def measure(running: Fleet, policy: str, swaps: int, settle_seconds: float) -> tuple[list[float], float, int]:
    """Pauses of all swaps in milliseconds, the time of a decode step, and how many swaps met stale rows."""
    environment = {
        "REFLUX_ENGINE_KV_AFTER_SWAP": policy,
        "REFLUX_ENGINE_MAX_ROWS": str(ROWS),
        "REFLUX_ENGINE_HTTP_LISTEN": "127.0.0.1:0",
    }
    model = running.learner(f"runs/{policy}", engines=1, environment=environment)
    (engine,) = model.engines
    model.publish()
    with load(engine):
        step = decode_step_ms(engine)
        before, pauses, late = engine.metric("reflux_engine_refresh_seconds_count"), [], 0
        for number in range(swaps):
            _, version = model.publish()
            pauses.append(version.replicas[0].pause_ms)
            late += not settle(engine, int(before) + number + 1, settle_seconds)
    return pauses, step, late


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="auto", help="a folder, auto or tiny")
    parser.add_argument("--swaps", type=int, default=40)
    parser.add_argument("--settle", type=float, default=10.0, help="longest wait for refreshed rows, in seconds")
    options = parser.parse_args()
    figures: dict[str, float] = {}
    with model_folder(options.model) as folder:
        for policy in _POLICIES:
            with fleet(folder) as running:  # one at a time: the other's load would count
                pauses, step, late = measure(running, policy, options.swaps, options.settle)
            p50, p95 = statistics.median(pauses), statistics.quantiles(pauses, n=20, method="inclusive")[-1]
            bar = max(BAR_MS, step)
            print(
                f"{policy:8} pause p50 {p50:.1f} ms, p95 {p95:.1f}, max {max(pauses):.1f}, {len(pauses)} swaps, "
                f"{late} of them before all rows were fresh again; decode step of {ROWS} rows {step:.1f} ms",
                flush=True,
            )
            figures[f"pause_ms_p95_{policy}"] = round(p95, 2)
            figures[f"decode_step_ms_{policy}"] = round(step, 2)
            figures[f"pause_over_bar_{policy}"] = round(p95 / bar, 3)
    figures["pause_ms_p95_over_bar"] = max(figures[f"pause_over_bar_{policy}"] for policy in _POLICIES)
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
