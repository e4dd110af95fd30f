"""What does a proxy add to a short request? One client, no stream; p50 of its requests through each proxy and direct.

Added p50 of a round is a proxy's p50 less the direct p50 of the same round. Routers run round robin, their cheapest
policy. Figure: our added p50 / vllm-router's, medians over the rounds.
"""

import argparse
import json
import sys

from proxies import bench
from rounds import Measured, interleaved, middle, show, versus


def add_differences(measured: Measured, name: str, into: str) -> None:
    """Adds to every proxy what it has over `direct`, round by round."""
    direct = measured["direct"][name]
    for proxy, figures in measured.items():
        if proxy != "direct":
            figures[into] = [through - straight for through, straight in zip(figures[name], direct, strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=3000)
    options = parser.parse_args()
    with bench() as running:
        running.start_workers("fast_worker.py", 2)
        proxies = [running.direct(), running.reflux(), *running.routers("round_robin")]
        measured = interleaved(proxies, options.rounds, lambda proxy: proxy.load(requests=options.requests))
    add_differences(measured, "p50_ms", "added_p50_ms")
    show(measured, {"p50_ms": "ms", "added_p50_ms": "ms", "p99_ms": "ms"})
    figures = {"added_p50_ms": round(middle(measured, "reflux", "added_p50_ms"), 4)}
    figures |= versus(measured, "added_p50_vs_router", "added_p50_ms")
    figures |= versus(measured, "added_p50_vs_sglang", "added_p50_ms", "sglang")
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
