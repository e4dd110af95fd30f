"""Do 1,300 streams of 8 seconds come through whole, in time and in bounded memory? 160 events each, one every 50 ms.

Figures: streams without their last byte; wall time through our gateway / direct of the same round, median; and the
largest resident memory of the gateway's process group while the streams ran.
"""

import argparse
import json
import statistics
import sys
import threading
from collections.abc import Mapping

from proxies import Proxy, bench
from rounds import interleaved, show, with_cpu

_SAMPLE_SECONDS = 0.25


def peak_rss_mb(proxy: Proxy, done: threading.Event, peak: list[float]) -> None:
    """Writes the largest memory seen until `done` into `peak[0]`."""
    while True:
        peak[0] = max(peak[0], proxy.rss_mb())
        if done.wait(_SAMPLE_SECONDS):
            return


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=1300)
    parser.add_argument("--events", type=int, default=160)
    parser.add_argument("--pace-ms", type=int, default=50)
    options = parser.parse_args()

    def turn(proxy: Proxy) -> Mapping[str, float]:
        done, peak = threading.Event(), [0.0]
        watch = threading.Thread(target=peak_rss_mb, args=(proxy, done, peak))
        watch.start()

        def work() -> Mapping[str, float]:
            return proxy.load(
                clients=options.streams,
                requests=options.streams,
                max_tokens=options.events,
                stream=True,
                pace_ms=options.pace_ms,
            )

        figures = with_cpu(proxy, work, options.streams * options.events)
        done.set()
        watch.join()
        return {"lost": figures["lost"], "wall_s": figures["seconds"], "cpu_us": figures["cpu_us"], "rss_mb": peak[0]}

    with bench() as running:
        running.start_workers("fast_worker.py", 2)
        proxies = [running.direct(), running.reflux(), *running.routers("round_robin")]
        measured = interleaved(proxies, options.rounds, turn)
    show(measured, {"lost": "", "wall_s": "s", "cpu_us": "us/event", "rss_mb": "MB"})
    figures: dict[str, float] = {}
    for name, suffix in (("reflux", ""), ("vllm", "_router"), ("sglang", "_sglang")):
        if own := measured.get(name):
            walls = zip(own["wall_s"], measured["direct"]["wall_s"], strict=True)
            figures[f"streams{options.streams}_lost{suffix}"] = sum(own["lost"])
            figures[f"streams{options.streams}_wall_ratio{suffix}"] = round(
                statistics.median(through / straight for through, straight in walls), 3
            )
            figures[f"streams{options.streams}_rss_mb{suffix}"] = round(max(own["rss_mb"]), 1)
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
