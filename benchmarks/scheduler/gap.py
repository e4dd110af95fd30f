"""How far a placement costs more than the best one: our search against OR-tools CP-SAT on small random instances.

The exact solver runs in an environment of its own, which is built on the first run. Its placements are checked and
priced with the platform's own code. A gap is (ours - best) / best in seconds per step; instances without any placement
must be refused by us, and those with one must be placed. The last line of output is JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from small_instances import instance

from reflux_placement.gang import Assignment, GangDemand
from reflux_placement.place.check import broken
from reflux_placement.place.cost import Cost, cost
from reflux_placement.place.search import assignment_of, find_place
from reflux_placement.place.tree import tree_of
from reflux_placement.room import Room

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENVIRONMENT = HERE / ".venv"
SECONDS_PER_SEED = 120


@dataclass(frozen=True, slots=True)
class Outcome:
    """One instance: what ours and the exact solver's placement cost."""

    seed: int
    status: str
    ours: Cost | None
    best: Cost | None
    place_ms: float

    @property
    def gap(self) -> float:
        """Relative excess of our cost; at least 0 when the best is proven."""
        assert self.ours is not None, "only for instances that both placed"
        assert self.best is not None, "only for instances that both placed"
        return self.ours.total / self.best.total - 1


def exact_answers(seeds: list[int], python: Path) -> Iterator[dict[str, object]]:
    """The exact solver's answer to every seed, in order."""
    source = str(ROOT / "libs" / "placement" / "src")
    command = [str(python), str(HERE / "exact.py"), *map(str, seeds)]
    environment = {**os.environ, "PYTHONPATH": source}
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=SECONDS_PER_SEED * len(seeds)
    )
    yield from map(json.loads, done.stdout.splitlines())


def prepared_environment() -> Path:
    """The Python that has OR-tools; built when it is not there."""
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        print(f"building {ENVIRONMENT.relative_to(ROOT)} with OR-tools", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
        requirements = str(HERE / "exact-requirements.txt")
        subprocess.run([str(python), "-m", "pip", "install", "-q", "-r", requirements], check=True)
    return python


def compare(seed: int, answer: dict[str, object]) -> Outcome:
    """Places the instance and prices both placements; stops when the exact one breaks a demand."""
    room, gang = instance(seed)
    started = time.perf_counter()
    ours = find_place(room, gang)
    place_ms = (time.perf_counter() - started) * 1e3
    best = _exact_cost(room, gang, answer.get("nodes"))
    priced = cost(room, gang, ours) if isinstance(ours, Assignment) else None
    return Outcome(seed, str(answer["status"]), priced, best, place_ms)


def _exact_cost(room: Room, gang: GangDemand, nodes: object) -> Cost | None:
    if not isinstance(nodes, dict):
        return None
    ranks = {role: np.array(indices, dtype=np.int64) for role, indices in nodes.items()}
    assignment = assignment_of(room.topology, tree_of(room.topology), ranks)
    complaint = broken(room.topology, room.usable_NR(), gang, assignment)
    assert complaint is None, f"the exact model allows what the platform does not: {complaint}"
    return cost(room, gang, assignment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=200, help="how many random instances")
    parser.add_argument("--first-seed", type=int, default=0, help="seed of the first one")
    parser.add_argument("--python", type=Path, help="Python that has OR-tools; default: an environment built here")
    parser.add_argument("--verbose", action="store_true", help="print every instance with a gap")
    asked = parser.parse_args()
    seeds = list(range(asked.first_seed, asked.first_seed + asked.instances))
    answers = exact_answers(seeds, asked.python or prepared_environment())
    outcomes = [compare(seed, answer) for seed, answer in zip(seeds, answers, strict=True)]
    if asked.verbose:
        for each in outcomes:
            if each.ours and each.best and each.gap > 1e-6:
                print(f"seed {each.seed}: gap {each.gap:.4f}, ours {each.ours}, best {each.best}")
    print(json.dumps(figures(outcomes)))


def figures(outcomes: list[Outcome]) -> dict[str, float]:
    """Figures of the benchmark; the gaps are those of instances whose best cost is proven."""
    both = [each for each in outcomes if each.ours and each.best and each.status == "OPTIMAL"]
    gaps = np.array([each.gap for each in both])
    missed = [each.seed for each in outcomes if each.best and not each.ours]
    wrong = [each.seed for each in outcomes if each.ours and each.status == "INFEASIBLE"]
    open_ones = [each.seed for each in outcomes if each.status not in ("OPTIMAL", "INFEASIBLE")]
    print(f"{len(both)} placed and proven, {len(open_ones)} not proven, missed {missed}, placed but impossible {wrong}")
    return {
        "gap_mean": round(float(gaps.mean()), 6),
        "gap_max": round(float(gaps.max()), 6),
        "gap_instances": len(both),
        "gap_missed": len(missed) + len(wrong),
        "gap_place_ms_p50": round(float(np.median([each.place_ms for each in outcomes])), 3),
        "gap_place_ms_max": round(max(each.place_ms for each in outcomes), 3),
    }


if __name__ == "__main__":
    main()
