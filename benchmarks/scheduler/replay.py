"""Do jobs end sooner, and gangs span fewer racks, under our policy than under the best of its rivals?

Replays the openb trace (8,152 tasks on 1,213 nodes; gang sizes resampled, as every output says) under our policy and
under FIFO first-fit, Kueue's BestFit and Slurm's block plugin, each with EASY backfill, on equal jobs for several
seeds. A ratio is ours / the least of the rivals' for that seed; the figure is the median over seeds. Also written as a
table with the least and the largest. `replay_s` is the slowest whole replay under our policy. One knob of ours is set:
gangs wait for their preferred rack for up to a day (of the peers only Slurm has it, as `--switches=N@time`, for trees
and not for its block rule, which spans no more racks than it has to); the policy as shipped, which waits for 5 minutes,
is replayed beside it on the first seed. The last line is JSON.

    python benchmarks/scheduler/replay.py [--traces FOLDER] [--seeds 3] [--sizes log2]
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from reflux_placement.simulate.engine import simulate
from reflux_placement.simulate.figures import Figures, figures
from reflux_placement.simulate.files import InputError, read_cluster, read_tasks
from reflux_placement.simulate.jobs import Options
from reflux_placement.simulate.openb import SIZES, openb_workload
from reflux_placement.simulate.policies import DEFAULTS, OURS, PATIENCE_SECONDS, RIVALS, chosen

TASKS, NODES = "openb_pod_list_default.csv", "openb_node_list_gpu_node.csv"
TRACES = Path(__file__).resolve().parents[3] / "shared" / "data" / "traces"
RESTART_SECONDS = 60.0
SEEDS = 3


@dataclass(frozen=True)
class Trial:
    """One replay."""

    policy: str
    seed: int
    figures: Figures
    seconds: float
    notes: tuple[str, ...]


def replay(traces: Path, policy: str, seed: int, sizes: str = "log2", load: float | None = None) -> Trial:
    """One policy on one seed's jobs, with the wall time of the simulation. Raises InputError."""
    topology = read_cluster(traces / NODES)
    workload = openb_workload(read_tasks(traces / TASKS), topology, sizes=SIZES[sizes], seed=seed, load=load)
    (decides,) = chosen([policy]).values()
    started = time.perf_counter()
    history = simulate(topology, workload.jobs, decides, options=Options(restart_seconds=RESTART_SECONDS))
    return Trial(policy, seed, figures(history), time.perf_counter() - started, workload.notes)


def replay_figures(trials: Sequence[Trial]) -> dict[str, float]:
    """The figures of the benchmark from the trials of ours and of the rivals."""
    ratios = {name: _ratios(trials, name) for name in ("jct_mean", "cross_rack_gangs")}
    return {
        "replay_jct_vs_best": round(statistics.median(ratios["jct_mean"]), 4),
        "replay_cross_rack_vs_best": round(statistics.median(ratios["cross_rack_gangs"]), 4),
        "replay_jct_vs_best_as_shipped": round(_ratios(trials, "jct_mean", DEFAULTS)[0], 4),
        "replay_cross_rack_vs_best_as_shipped": round(_ratios(trials, "cross_rack_gangs", DEFAULTS)[0], 4),
        "replay_s": round(max(trial.seconds for trial in trials if trial.policy == OURS), 1),
    }


def _ratios(trials: Sequence[Trial], name: str, ours: str = OURS) -> list[float]:
    """Ours / the best rival's, by seed; smaller is better."""
    result = []
    for seed in sorted({trial.seed for trial in trials if trial.policy == ours}):
        value = {each.policy: float(getattr(each.figures, name)) for each in trials if each.seed == seed}
        best = min(value[rival] for rival in RIVALS)
        result.append(value[ours] / best if best else float(value[ours] > 0) + 1.0)
    return result


_SHOWN = {
    "jct_mean": "{:.0f} s", "wait_mean": "{:.0f} s", "wait_p99": "{:.0f} s", "slowdown_mean": "{:.1f}",
    "utilisation": "{:.3f}", "fragmentation": "{:.3f}", "cross_rack_gangs": "{:.0f}",
    "avoidable_cross_rack_gangs": "{:.0f}", "excess_racks": "{:.2f}", "cross_rack_traffic": "{:.3f}",
    "preemptions": "{:.0f}", "lost_gpu_hours": "{:.0f}", "unfinished": "{:.0f}",
}  # fmt: skip


def _table(trials: Sequence[Trial]) -> str:
    """Median, least and largest over seeds, a line per figure."""
    policies = list(dict.fromkeys(trial.policy for trial in trials))
    lines = ["| figure | " + " | ".join(policies) + " |", "|---|" + "---|" * len(policies)]
    for name, told in _SHOWN.items():
        cells = []
        for policy in policies:
            values = [float(getattr(trial.figures, name)) for trial in trials if trial.policy == policy]
            spread = f" ({told.format(min(values))} .. {told.format(max(values))})"
            cells.append(told.format(statistics.median(values)) + (spread if len(values) > 1 else ""))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    seconds = [[trial.seconds for trial in trials if trial.policy == policy] for policy in policies]
    lines.append("| replayed in | " + " | ".join(f"{statistics.median(each):.1f} s" for each in seconds) + " |")
    for name in ("jct_mean", "wait_mean", "cross_rack_gangs", "avoidable_cross_rack_gangs", "excess_racks"):
        lines.append(f"{name} / best rival, by seed: " + ", ".join(f"{each:.3f}" for each in _ratios(trials, name)))
    return "\n".join(lines)


def main() -> int:
    """Runs all trials in two processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=TRACES, help=f"folder with {TASKS} and {NODES}")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--sizes", choices=list(SIZES), default="log2")
    parser.add_argument("--load", type=float, help="scale arrivals to this offered load")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    wanted = [(policy, seed) for seed in range(options.seeds) for policy in (OURS, *RIVALS)] + [(DEFAULTS, 0)]
    trials = []
    try:
        with ProcessPoolExecutor(options.processes) as pool:
            for trial in pool.map(_one, [(options.traces, *each, options.sizes, options.load) for each in wanted]):
                if not trials:
                    print("\n".join(trial.notes), flush=True)
                    print(
                        f"{OURS}: gangs wait for their preferred level for up to {PATIENCE_SECONDS:.0f} s", flush=True
                    )
                told = f"jct {trial.figures.jct_mean:.0f} s, {trial.figures.cross_rack_gangs} cross-rack gangs"
                print(f"{trial.policy}, seed {trial.seed}: {told}, replayed in {trial.seconds:.1f} s", flush=True)
                trials.append(trial)
    except InputError as error:
        print(f"{error}\nThe trace is cluster-trace-gpu-v2023 of github.com/alibaba/clusterdata.", file=sys.stderr)
        return 2
    print(_table(trials))
    print(json.dumps(replay_figures(trials)))
    return 0


def _one(arguments: tuple[Path, str, int, str, float | None]) -> Trial:
    return replay(*arguments)


if __name__ == "__main__":
    sys.exit(main())
