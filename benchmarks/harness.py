"""`make bench-scheduler`, `bench-weights`, `bench-gateway`, ...: one question per module, each in a process of its own.

    python benchmarks/harness.py BENCH [QUESTION ...]

BENCH is a folder here with a `bars.toml`: the questions in their order, and a bar such as "<= 2.0" per figure. A module
`<question>.py` prints its figures as one JSON object in its last line, so that it can be run alone. A figure that a
module leaves out has no bar to hold: its output says why (a peer is not installed). The last line of output is one JSON
object: {"bench": BENCH, "figures": {...}}. Status 1 when a question failed; a missed bar is reported, not an error.
"""

import argparse
import json
import operator
import platform
import subprocess
import sys
import time
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
LIMIT_SECONDS = 1800
_HOLDS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}


def ask(folder: Path, question: str) -> dict[str, float] | None:
    """Runs one module; its figures, or None when it failed (its output says why)."""
    started = time.monotonic()
    print(f"== {question}", flush=True)
    command = [sys.executable, str(folder / f"{question}.py")]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        print(f"== {question}: no answer within {LIMIT_SECONDS} s", flush=True)
        return None
    print(done.stdout, end="", flush=True)
    print(f"== {question}: status {done.returncode}, {time.monotonic() - started:.1f} s", flush=True)
    if done.returncode:
        return None
    return json.loads(done.stdout.strip().splitlines()[-1])


def compare(bars: dict[str, str], figures: dict[str, float]) -> None:
    """Prints every figure that has a bar."""
    for name, bar in bars.items():
        if name not in figures:
            print(f"{name:28} {'absent':>12}   bar {bar}")
            continue
        sign, limit = bar.split()
        holds = _HOLDS[sign](figures[name], float(limit))
        print(f"{name:28} {figures[name]:12.4g}   bar {bar}   {'holds' if holds else 'MISSED'}")


def main() -> int:
    benches = sorted(path.parent.name for path in HERE.glob("*/bars.toml"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bench", choices=benches)
    parser.add_argument("questions", nargs="*", metavar="QUESTION", help="all without any")
    options = parser.parse_args()
    folder = HERE / options.bench
    asked = tomllib.loads((folder / "bars.toml").read_text())
    chosen = options.questions or asked["questions"]
    if unknown := [question for question in chosen if question not in asked["questions"]]:
        parser.error(f"there is no question {unknown[0]!r}; choose from {', '.join(asked['questions'])}")
    answers = [ask(folder, question) for question in chosen]
    figures = {name: figure for answer in answers if answer for name, figure in answer.items()}
    print(f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, {platform.system()} {platform.release()}")
    bars = asked["bars"]
    compare({name: bar for name, bar in bars.items() if name in figures or not options.questions}, figures)
    print(json.dumps({"bench": options.bench, "figures": figures}))
    return 1 if None in answers else 0


if __name__ == "__main__":
    sys.exit(main())
