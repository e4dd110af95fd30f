"""`make bench-scheduler`: one question per module, each in a process of its own, figures and bars as a table.

The last line of output is one JSON object: {"bench": "scheduler", "figures": {...}}. Each module prints its own figures
as its last line, so that one question can be asked alone: `python benchmarks/scheduler/place.py`.
"""

import argparse
import json
import operator
import platform
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
QUESTIONS = ("golden", "gap", "place", "grpc_place", "defrag_bench", "violations", "decisions", "replay")
LIMIT_SECONDS = 1800

BARS = {
    "place_p99_ms": ("<=", 2.0),
    "place_grpc_p99_ms": ("<=", 10.0),
    "place_rss_mb": ("<=", 200.0),
    "place_feasible": (">=", 0.99),
    "place_blocks_over_min": ("<=", 1.0),
    "defrag_plan_found": (">=", 1),
    "gap_mean": ("<=", 0.01),
    "gap_max": ("<=", 0.05),
    "gap_missed": ("<=", 0),
    "golden_failed": ("<=", 0),
    "replay_jct_vs_best": ("<", 1.0),
    "replay_cross_rack_vs_best": ("<", 1.0),
    "violations": ("<=", 0),
    "replay_s": ("<=", 60.0),
    "decisions_per_s": (">=", 200.0),
}
_HOLDS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt}


def ask(question: str) -> dict[str, float]:
    """Runs one module; its figures, or none when it failed (its output says why)."""
    started = time.monotonic()
    print(f"== {question}", flush=True)
    command = [sys.executable, str(HERE / f"{question}.py")]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        print(f"== {question}: no answer within {LIMIT_SECONDS} s", flush=True)
        return {}
    print(done.stdout, end="", flush=True)
    print(f"== {question}: status {done.returncode}, {time.monotonic() - started:.1f} s", flush=True)
    if done.returncode:
        return {}
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="*", metavar="QUESTION", help=f"of {', '.join(QUESTIONS)}; all without any")
    chosen = parser.parse_args().questions or QUESTIONS
    unknown = [question for question in chosen if question not in QUESTIONS]
    if unknown:
        parser.error(f"there is no question {unknown[0]!r}; choose from {', '.join(QUESTIONS)}")
    figures: dict[str, float] = {}
    for question in chosen:
        figures.update(ask(question))
    print(f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, {platform.system()} {platform.release()}")
    for name, (sign, bar) in BARS.items():
        if name in figures:
            holds = _HOLDS[sign](figures[name], bar)
            print(f"{name:28} {figures[name]:12.4g}   bar {sign} {bar:g}   {'holds' if holds else 'MISSED'}")
    print(json.dumps({"bench": "scheduler", "figures": figures}))
    return 0 if set(BARS) <= set(figures) or len(chosen) < len(QUESTIONS) else 1


if __name__ == "__main__":
    sys.exit(main())
