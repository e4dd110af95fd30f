"""Figures and bars of a validation run, JSON types only."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from reflux_tasks.xrd.validation import Kind, ScanResult, Trial
from reflux_tasks.xrd.verdict import fit_detail

AT_LEAST = {"same_size_first": 0.95, "extra_allowed_first": 0.90, "accepted_true": 0.95}
AT_MOST = {
    "false_accepts": 0.02,
    "fraction_mae": 0.04,
    "fraction_worst": 0.15,
    "mean_cpu_s": 2.0,
    "max_cpu_s": 15.0,
    "surrogate_ms": 5.0,
}
_SAME_SIZE: tuple[Kind, ...] = ("replacement", "same size")


def row(result: ScanResult) -> dict[str, Any]:
    """Figures of one scan; `fit` is None when the true set could not be refined."""
    true, *wrong = result.trials
    same_size = [trial for trial in wrong if trial.kind in _SAME_SIZE]
    allowed = [trial for trial in wrong if trial.kind in (*_SAME_SIZE, "addition")]
    accepted = [trial for trial in wrong if trial.verdict is not None and trial.verdict.accepted]
    verdict = true.verdict
    refined = {phase.name: phase.mass_fraction for phase in verdict.fit.phases} if verdict else {}
    return {
        "file": result.scan.path.name,
        "weighed": {name: round(fraction, 4) for name, fraction in result.scan.weighed.items()},
        "refined": {name: round(fraction, 4) for name, fraction in refined.items()},
        "fit": fit_detail(verdict.fit) if verdict else None,
        "gate": verdict.gate if verdict else "the refinement failed",
        "score": round(verdict.score, 4) if verdict else 0.0,
        "accepted": bool(verdict and verdict.accepted),
        "same_size_first": _first(true, same_size),
        "extra_allowed_first": _first(true, allowed),
        "best_wrong_same_size": _best(same_size),
        "best_wrong_extra": _best([trial for trial in allowed if trial.kind == "addition"]),
        "falsely_accepted": [{"kind": trial.kind, "phases": list(trial.names)} for trial in accepted],
        "refined_sets": {kind: sum(t.kind == kind for t in result.trials) for kind in _kinds(result.trials)},
        "failed_refinements": sum(trial.verdict is None for trial in result.trials),
        "surrogate": {
            "rank": result.surrogate_rank,
            "of": result.sets_scored,
            "profile_r": round(result.surrogate.profile_r, 4),
            "peak_f1": round(result.surrogate.peak_f1, 4),
            "ms_per_set": round(result.surrogate_ms, 3),
        },
    }


def _first(true: Trial, wrong: Iterable[Trial]) -> bool:
    """Whether the true set passes the gate and costs less than every wrong one that does."""
    if true.verdict is None or true.verdict.gate:
        return False
    return all(trial.verdict is None or true.verdict.rank < trial.verdict.rank for trial in wrong)


def _best(trials: Sequence[Trial]) -> dict[str, Any] | None:
    judged = [trial for trial in trials if trial.verdict is not None]
    best = min(judged, key=lambda trial: trial.verdict.rank if trial.verdict else (True, 0.0), default=None)
    if best is None or best.verdict is None:
        return None
    cost = {"cost": round(best.verdict.cost, 4), "r_wp": round(best.verdict.fit.r_wp, 4)}
    return {"phases": list(best.names), "gate": best.verdict.gate, **cost}


def _kinds(trials: Iterable[Trial]) -> list[Kind]:
    return list(dict.fromkeys(trial.kind for trial in trials))


def report(results: Sequence[ScanResult]) -> dict[str, Any]:
    """The figures of all scans, which bars they miss, and a row per scan; needs at least one scan."""
    rows = [row(result) for result in results]
    wrong = sum(len(result.trials) - 1 for result in results)
    errors = [
        abs(each["refined"].get(name, 0.0) - fraction) for each in rows for name, fraction in each["weighed"].items()
    ]
    seconds = [trial.verdict.fit.cpu_seconds for result in results for trial in result.trials if trial.verdict]
    figures = {
        **{name: _mean([each[name] for each in rows]) for name in ("same_size_first", "extra_allowed_first")},
        "accepted_true": _mean([each["accepted"] for each in rows]),
        "false_accepts": round(sum(len(each["falsely_accepted"]) for each in rows) / max(wrong, 1), 4),
        "fraction_mae": _mean(errors),
        "fraction_worst": round(max(errors), 4),
        "mean_cpu_s": _mean(seconds),
        "max_cpu_s": round(max(seconds, default=0.0), 3),
        "surrogate_ms": _mean([result.surrogate_ms for result in results]),
    }
    return {
        **figures,
        "missed": missed(figures),
        "scans": len(rows),
        "wrong_sets": wrong,
        "failed_refinements": sum(each["failed_refinements"] for each in rows),
        "surrogate_first": _mean([each["surrogate"]["rank"] == 1 for each in rows]),
        "bars": {**{name: f">= {bar}" for name, bar in AT_LEAST.items()}, **{n: f"<= {b}" for n, b in AT_MOST.items()}},
        "mixtures": rows,
    }


def missed(figures: Mapping[str, float]) -> list[str]:
    """Names of the figures that miss their bar."""
    low = [name for name, bar in AT_LEAST.items() if not figures[name] >= bar]
    return low + [name for name, bar in AT_MOST.items() if not figures[name] <= bar]


def _mean(values: Sequence[float]) -> float:
    return round(float(np.mean(values)), 4) if len(values) else float("nan")
