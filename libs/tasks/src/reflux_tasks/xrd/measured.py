"""Judges the Rietveld verifier on weighed mixtures measured in a laboratory: does the true phase set fit best?

    python -m reflux_tasks.xrd.measured --data DIR --out FILE.json

For every mixture whose phases have structures, the true set is refined, then every set of the same size with one phase
replaced; with --surplus also every set with one phase more or less. Data: Dara (CederGroupHub/dara, MIT).
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from reflux_tasks.verify import VerificationError, VerifierUnavailable
from reflux_tasks.xrd.full import MIN_NEED, fit_detail, gate_reason, score
from reflux_tasks.xrd.profile import Profile
from reflux_tasks.xrd.readers import UnreadablePattern, cut_and_rebin, mixture_truth, read_pattern
from reflux_tasks.xrd.refinement import Candidate, Fit, RefinementOptions, refine, system_python
from reflux_tasks.xrd.structures import candidates

LOW_DEGREES, HIGH_DEGREES = 13.0, 90.0
MAX_POINTS = 4000
"""Scans with more points are rebinned."""
OPTIONS = RefinementOptions()
Kind = Literal["true", "replacement", "addition", "omission"]


@dataclass(frozen=True)
class Trial:
    """One phase set to refine against one scan."""

    kind: Kind
    names: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """A refined trial; `fit` is None when the refinement failed or spent its limit."""

    trial: Trial
    fit: Fit | None

    @property
    def r_wp(self) -> float:
        return self.fit.r_wp if self.fit else float("inf")

    @property
    def score(self) -> float:
        passed = self.fit is not None and not gate_reason(self.fit, OPTIONS.cell_limit, MIN_NEED)
        return score(self.fit) if passed and self.fit else 0.0


def trials(true_names: Sequence[str], pool: Sequence[str], surplus: bool) -> list[Trial]:
    """The true set first, then its single replacements, then (surplus) sets with one phase more or less."""
    others = [name for name in pool if name not in true_names]
    sets = [Trial("true", tuple(true_names))]
    for i in range(len(true_names)):
        rest = (*true_names[:i], *true_names[i + 1 :])
        sets += [Trial("replacement", (*rest[:i], other, *rest[i:])) for other in others]
        if surplus and rest:
            sets.append(Trial("omission", rest))
    if surplus:
        sets += [Trial("addition", (*true_names, other)) for other in others]
    return sets


def prepare(path: Path) -> Profile:
    """The part of a scan that is refined: 13 to 90 degrees, neighbours summed to at most 4000 points."""
    return cut_and_rebin(read_pattern(path), LOW_DEGREES, HIGH_DEGREES, MAX_POINTS)


def evaluate_scan(
    path: Path, pool: Mapping[str, Candidate], workers: int, surplus: bool = False, max_wrong: int | None = None
) -> dict[str, Any]:
    """Refines the true set and the wrong ones of one scan; `max_wrong` takes a random sample of those (fixed seed)."""
    weighed = mixture_truth(path)
    profile = prepare(path)
    sets = trials(list(weighed), list(pool), surplus)
    if max_wrong is not None and len(sets) - 1 > max_wrong:
        chosen = 1 + np.random.default_rng(0).permutation(len(sets) - 1)[:max_wrong]
        sets = [sets[0], *(sets[i] for i in sorted(chosen))]

    def run(trial: Trial) -> Outcome:
        try:
            return Outcome(trial, refine(profile, [pool[name] for name in trial.names], OPTIONS))
        except VerificationError:
            return Outcome(trial, None)

    with ThreadPoolExecutor(workers) as threads:
        true, *wrong = threads.map(run, sets)
    if true.fit is None:
        raise VerificationError(f"{path.name}: the refinement of the true set failed")
    return _scan_report(path, weighed, true, wrong)


def _scan_report(path: Path, weighed: Mapping[str, float], true: Outcome, wrong: Sequence[Outcome]) -> dict[str, Any]:
    assert true.fit is not None
    refined = {phase.name: round(phase.mass_fraction, 4) for phase in true.fit.phases}
    replaced = [outcome for outcome in wrong if outcome.trial.kind == "replacement"]
    best = min(replaced, key=lambda outcome: outcome.r_wp, default=None)
    report: dict[str, Any] = {
        "file": path.name,
        "weighed": dict(weighed),
        "refined": refined,
        "mass_fraction_error": round(float(np.mean([abs(refined[name] - weighed[name]) for name in weighed])), 4),
        **fit_detail(true.fit),
        "score": round(true.score, 4),
        "wrong_sets": {
            kind: sum(o.trial.kind == kind for o in wrong) for kind in ("replacement", "addition", "omission")
        },
        "failed_refinements": sum(outcome.fit is None for outcome in wrong),
        "true_set_has_best_r_wp": all(true.r_wp < outcome.r_wp for outcome in replaced),
        "true_set_has_best_score": all(true.score > outcome.score for outcome in wrong),
    }
    if best is not None:
        report["best_wrong_set"] = {"phases": list(best.trial.names), "r_wp": round(best.r_wp, 5)}
    return report


def evaluate_measured(
    data_dir: Path,
    *,
    scans: Sequence[str] = ("8min", "2min"),
    workers: int | None = None,
    surplus: bool = False,
    max_wrong: int | None = None,
    on_scan: Callable[[Mapping[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Evaluates all mixtures below `data_dir`/measured; those without structures are named under `skipped`.

    `on_scan` gets the result of each scan as soon as it is there. Raises VerifierUnavailable without ObjCryst++,
    FileNotFoundError without any scan.
    """
    system_python()
    files = [path for scan in scans for path in sorted((data_dir / "measured").glob(f"*--{scan}.xrdml"))]
    if not files:
        raise FileNotFoundError(f"no *--{scans[0]}.xrdml in {data_dir / 'measured'}")
    mixtures: dict[Path, set[str]] = {}
    skipped: dict[str, str] = {}
    for path in files:
        try:
            mixtures[path] = set(mixture_truth(path))
        except UnreadablePattern as error:
            skipped[path.name] = str(error)
    pool = candidates(data_dir, set().union(*mixtures.values()))
    results = []
    for path, names in mixtures.items():
        if missing := sorted(names - set(pool)):
            skipped[path.name] = f"no structure of {', '.join(missing)}"
        else:
            results.append(evaluate_scan(path, pool, workers or os.cpu_count() or 1, surplus, max_wrong))
            if on_scan:
                on_scan(results[-1])
    return {"candidates": sorted(pool), "scans": results, "skipped": skipped, "summary": summarise(results)}


def summarise(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts and means over the scans; empty without scans."""
    if not results:
        return {}
    return {
        "scans": len(results),
        "true_set_has_best_r_wp": sum(result["true_set_has_best_r_wp"] for result in results),
        "true_set_has_best_score": sum(result["true_set_has_best_score"] for result in results),
        "wrong_sets": sum(sum(result["wrong_sets"].values()) for result in results),
        "mean_r_wp": round(float(np.mean([result["r_wp"] for result in results])), 4),
        "mean_r_wb": round(float(np.mean([result["r_wb"] for result in results])), 4),
        "mean_mass_fraction_error": round(float(np.mean([result["mass_fraction_error"] for result in results])), 4),
        "mean_cpu_seconds": round(float(np.mean([result["cpu_seconds"] for result in results])), 3),
    }


HEADER = """| scan | R_wp | R_wb | GoF | best wrong set / true R_wp | wrong sets | mass fractions: refined (weighed) |
|---|---|---|---|---|---|---|"""


def row(result: Mapping[str, Any]) -> str:
    """One scan as a row of a Markdown table."""
    best = result.get("best_wrong_set")
    ratio = f"{best['r_wp'] / result['r_wp']:.2f} ({', '.join(best['phases'])})" if best else "-"
    fractions = ", ".join(
        f"{name} {result['refined'][name]:.3f} ({weight:.3f})" for name, weight in result["weighed"].items()
    )
    scan = result["file"].removesuffix(".xrdml").split("--")[-1]
    figures = f"{result['r_wp']:.4f} | {result['r_wb']:.3f} | {result['goodness']:.2f}"
    return f"| {scan} | {figures} | {ratio} | {sum(result['wrong_sets'].values())} | {fractions} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry of the command line; returns the exit status: 0 done, 1 a true set lost, 2 it could not run."""
    parser = argparse.ArgumentParser(
        prog="python -m reflux_tasks.xrd.measured", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with measured/ and references/")
    parser.add_argument("--out", type=Path, help="write all figures to this JSON file")
    parser.add_argument("--scans", nargs="+", default=["8min", "2min"], help="which scans, by the end of the file name")
    parser.add_argument("--workers", type=int, help="refinements at once (default: number of cores)")
    parser.add_argument("--surplus", action="store_true", help="also try sets with one phase more or less")
    parser.add_argument("--max-wrong", type=int, help="try at most this many wrong sets per scan")
    given = parser.parse_args(arguments)
    print(HEADER)
    try:
        report = evaluate_measured(
            given.data,
            scans=given.scans,
            workers=given.workers,
            surplus=given.surplus,
            max_wrong=given.max_wrong,
            on_scan=lambda result: print(row(result), flush=True),
        )
    except (VerifierUnavailable, FileNotFoundError) as error:
        print(f"cannot evaluate: {error}", file=sys.stderr)
        return 2
    for name, reason in report["skipped"].items():
        print(f"skipped {name}: {reason}")
    print(json.dumps(report["summary"]))
    if given.out:
        given.out.write_text(json.dumps(report, indent=1), encoding="utf-8")
    lost = report["summary"].get("scans", 0) - report["summary"].get("true_set_has_best_r_wp", 0)
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
