"""How long does a plan take, what does it need, and how good is it? A DeepSeek-V3 list on 256 trainer ranks.

Targets are 128 and 512 inference ranks (one and four replicas), planned directly and with relaying, each in a process
of its own. Seconds are CPU time from the two layouts to the schedule; memory is the process's high-water mark.
`plan_efficiency` is the lower bound (bytes of the busiest port) over the makespan with the cost of messages, direct;
`plan_relay_over_bound` is the makespan over the bound of the relayed route. Last line: one JSON object, in which the
keys without a suffix are the worst of both targets.
"""

import argparse
import json
import resource
import subprocess
import sys
import time

from reflux_weightplan.families.presets import PRESETS
from reflux_weightplan.links import LinkModel
from reflux_weightplan.plan import PlanOptions, plan

TARGETS = (128, 512)
ROUTES = ("direct", "relay")
LIMIT_SECONDS = 300


def measure(ranks: int, route: str, link: LinkModel, pack_below: int) -> dict[str, float | str]:
    """One plan in this process."""
    source, target = PRESETS[f"deepseek-v3-256-to-{ranks}"].make()
    begun, wall = time.process_time(), time.perf_counter()
    relay = "relay" if route == "relay" else "direct"
    made = plan(source, target, PlanOptions(relay=relay, link=link, pack_below=pack_below))
    return {
        "seconds": round(time.process_time() - begun, 3),
        "wall_seconds": round(time.perf_counter() - wall, 3),
        "rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "makespan_seconds": round(made.makespan_seconds, 4),
        "bound_seconds": round(made.lower_bound_seconds, 4),
        "efficiency": round(made.efficiency, 4),
        "route": made.route,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--alpha", type=float, default=LinkModel().alpha_seconds, help="seconds per message")
    parser.add_argument("--pack-below", type=int, default=PlanOptions().pack_below, help="bytes of the shortest run")
    parser.add_argument("--one", nargs=2, metavar=("RANKS", "ROUTE"), help="plan once, in this process")
    options = parser.parse_args()
    if options.one:
        link = LinkModel(alpha_seconds=options.alpha)
        print(json.dumps(measure(int(options.one[0]), options.one[1], link, options.pack_below)))
        return 0
    figures: dict[str, float] = {}
    how = ["--alpha", str(options.alpha), "--pack-below", str(options.pack_below)]
    found = {(ranks, route): _ask(ranks, route, how) for ranks in TARGETS for route in ROUTES}
    for ranks in TARGETS:
        direct, relay = found[ranks, "direct"], found[ranks, "relay"]
        over_bound = relay["makespan_seconds"] / relay["bound_seconds"]
        figures |= {
            f"plan_seconds_{ranks}": max(direct["seconds"], relay["seconds"]),
            f"plan_rss_mb_{ranks}": max(direct["rss_mb"], relay["rss_mb"]),
            f"plan_efficiency_{ranks}": direct["efficiency"],
            f"plan_relay_over_bound_{ranks}": round(over_bound, 4),
        }
    for name, worst in (("seconds", max), ("rss_mb", max), ("efficiency", min), ("relay_over_bound", max)):
        figures[f"plan_{name}"] = worst(figures[f"plan_{name}_{ranks}"] for ranks in TARGETS)
    print(json.dumps(figures))
    return 0


def _ask(ranks: int, route: str, how: list[str]) -> dict[str, float]:
    """One plan in a process of its own, so that memory is that plan's."""
    command = [sys.executable, __file__, *how, "--one", str(ranks), route]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=LIMIT_SECONDS)
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    print(f"256 -> {ranks} {route}: {answer}", flush=True)
    return answer


if __name__ == "__main__":
    sys.exit(main())
