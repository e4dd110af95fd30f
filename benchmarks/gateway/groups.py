"""What does one sample of a group of 16 cost a proxy? 64 tokens with ids and log-probs per sample.

`http16` is one HTTP request with n = 16 in the same shape through every proxy; `http1` one request with n = 1.
`grpc` is GenerateGroup with a message per finished sample in front of replicas that have both doors, as `reflux-engine`
has, and finish their samples one by one; `grpc_whole` the same with one message per group. `grpc_http` and
`grpc_http_whole` are the same in front of replicas that have the HTTP door only and, when they are asked for a stream,
send an event per token and sample. A way that the gateway refuses is left out, and why is printed. Figures, in
processor time of the proxy: our `http16` / vllm-router's; our `grpc` / vllm-router's `http1`.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from functools import partial

from proxies import Proxy, bench, run_load
from rounds import Measured, interleaved, middle, show, versus, with_cpu

SAMPLES, TOKENS = 16, 64
CLIENTS = 8
SHAPES = ("http1", "http16", "grpc", "grpc_whole", "grpc_http", "grpc_http_whole")
_PROBE_SECONDS = 5.0


def http_us(proxy: Proxy, requests: int, samples: int) -> float:
    """Microseconds per sample of HTTP requests with n = `samples`."""
    work = partial(proxy.load, clients=CLIENTS, requests=requests, samples=samples, max_tokens=TOKENS)
    return with_cpu(proxy, work, requests * samples)["cpu_us"]


def grpc_us(proxy: Proxy, groups: int, whole_group: bool) -> float:
    """Microseconds per sample of GenerateGroup."""
    options = {"token": proxy.token, "clients": CLIENTS, "requests": groups, "whole_group": whole_group}
    options |= {"samples": SAMPLES, "max_tokens": TOKENS}
    return with_cpu(proxy, lambda: run_load("load_groups.py", proxy.grpc, options), groups * SAMPLES)["cpu_us"]


def answers_groups(proxy: Proxy) -> bool:
    """Whether the gateway draws a group from the replicas behind it at all."""
    options = {"token": proxy.token, "requests": 1, "clients": 1, "deadline_seconds": _PROBE_SECONDS}
    try:
        run_load("load_groups.py", proxy.grpc, options)
    except subprocess.CalledProcessError:
        print(f"{proxy.name}: left out, GenerateGroup has no answer from replicas without a gRPC door", flush=True)
        return False
    return True


def figures_of(measured: Measured) -> dict[str, float]:
    """Ratios to vllm-router, every way of GenerateGroup to its single request."""
    figures = {"grpc_cpu_us_per_sample": round(middle(measured, "reflux", "grpc"), 1)}
    figures |= versus(measured, "group16_vs_router", "http16")
    figures |= versus(measured, "group16_vs_sglang", "http16", "sglang")
    single = middle(measured, "vllm", "http1") if "vllm" in measured else 0.0
    if not single:
        return figures
    for name in ("reflux", "reflux-http"):
        for shape in (each for each in measured.get(name, ()) if each.startswith("grpc")):
            key = f"grpc_sample{shape.removeprefix('grpc')}_vs_router_single"
            figures[key] = round(middle(measured, name, shape) / single, 3)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--groups", type=int, default=300)
    options = parser.parse_args()

    def turn(proxy: Proxy) -> Mapping[str, float]:
        if proxy.name == "reflux-http":
            streamed = grpc_us(proxy, max(CLIENTS, options.groups // 4), False)
            return {"grpc_http": streamed, "grpc_http_whole": grpc_us(proxy, options.groups, True)}
        figures = {"http1": http_us(proxy, options.requests, 1), "http16": http_us(proxy, options.requests, SAMPLES)}
        if proxy.grpc:
            figures |= {
                "grpc": grpc_us(proxy, options.groups, False),
                "grpc_whole": grpc_us(proxy, options.groups, True),
            }
        return figures

    with bench() as engines, bench() as foreign:
        engines.start_workers("fast_engine.py", 2)
        foreign.start_workers("fast_worker.py", 2)
        without_grpc = foreign.reflux(name="reflux-http")
        proxies = [engines.reflux(), *engines.routers("round_robin")]
        proxies += [without_grpc] if answers_groups(without_grpc) else []
        measured = interleaved(proxies, options.rounds, turn)
    show(measured, dict.fromkeys(SHAPES, "us/sample"))
    print(json.dumps(figures_of(measured)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
