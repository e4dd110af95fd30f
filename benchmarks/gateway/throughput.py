"""What does a request cost a proxy, and how many pass, with 32 clients that wait for nothing?

CPU is user and system time of the proxy's whole process group over the run (/proc), per request; what a proxy does in
the background counts. Workers, clients and proxy share the machine, so that requests per second are a mixture of all
three: compare them within the run. Figures: ours / vllm-router's, medians over the rounds.
"""

import argparse
import json
import sys
from collections.abc import Mapping

from proxies import Proxy, bench
from rounds import interleaved, middle, show, versus, with_cpu

CLIENTS = 32


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=15_000)
    options = parser.parse_args()

    def turn(proxy: Proxy) -> Mapping[str, float]:
        def work() -> Mapping[str, float]:
            result = proxy.load(clients=CLIENTS, requests=options.requests)
            return {"rps": result["requests"] / result["seconds"], "p99_ms": result["p99_ms"]}

        return with_cpu(proxy, work, options.requests)

    with bench() as running:
        running.start_workers("fast_worker.py", 2)
        proxies = [running.direct(), running.reflux(), *running.routers("round_robin")]
        measured = interleaved(proxies, options.rounds, turn)
    show(measured, {"rps": "requests/s", "cpu_us": "us/request", "p99_ms": "ms"})
    figures = {
        "cpu_us_per_request": round(middle(measured, "reflux", "cpu_us"), 1),
        "rps_c32": round(middle(measured, "reflux", "rps")),
    }
    for peer, suffix in (("vllm", "router"), ("sglang", "sglang")):
        figures |= versus(measured, f"cpu_per_request_vs_{suffix}", "cpu_us", peer)
        figures |= versus(measured, f"rps_c32_vs_{suffix}", "rps", peer)
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
