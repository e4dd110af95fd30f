"""What does a proxy add to a stream of 64 events that come at once? One client; p50 of the time to the last byte.

The worker writes every event by itself. A proxy that leaves Nagle's algorithm on waits for delayed acknowledgements
here, about 40 ms per stream. Figure: our p50 less the direct p50 of the same round, median over the rounds.
"""

import argparse
import json
import sys

from latency import add_differences
from proxies import bench
from rounds import interleaved, middle, show

EVENTS = 64


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--requests", type=int, default=60)
    options = parser.parse_args()
    with bench() as running:
        running.start_workers("fast_worker.py", 2)
        proxies = [running.direct(), running.reflux(), *running.routers("round_robin")]
        measured = interleaved(
            proxies,
            options.rounds,
            lambda proxy: proxy.load(requests=options.requests, max_tokens=EVENTS, stream=True),
        )
    add_differences(measured, "p50_ms", "added_p50_ms")
    show(measured, {"p50_ms": "ms", "added_p50_ms": "ms"})
    figures = {
        f"sse{EVENTS}_added_p50_ms{suffix}": round(middle(measured, name, "added_p50_ms"), 3)
        for name, suffix in (("reflux", ""), ("vllm", "_router"), ("sglang", "_sglang"))
        if name in measured
    }
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
