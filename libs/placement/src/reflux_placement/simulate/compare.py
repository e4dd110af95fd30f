"""Owns the comparison of policies on equal jobs: every policy meets the same workload per seed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from reflux_placement.simulate.engine import Progress, simulate
from reflux_placement.simulate.figures import (
    NAMES,
    Bar,
    Figures,
    Floats,
    block_bootstrap,
    completion_seconds,
    figures,
    over_seeds,
    wait_seconds,
)
from reflux_placement.simulate.history import History
from reflux_placement.simulate.jobs import DEFAULT_OPTIONS, Options, Policy
from reflux_placement.simulate.openb import Workload
from reflux_placement.topology import Topology

WorkloadOf = Callable[[int], Workload]
"""A workload from a seed."""

_BOOTSTRAPPED: dict[str, tuple[Callable[..., Floats], Callable[[Floats], float]]] = {
    "jct_mean": (completion_seconds, lambda values: float(values.mean())),
    "jct_p50": (completion_seconds, lambda values: float(np.quantile(values, 0.5))),
    "jct_p99": (completion_seconds, lambda values: float(np.quantile(values, 0.99))),
    "wait_mean": (wait_seconds, lambda values: float(values.mean())),
    "wait_p50": (wait_seconds, lambda values: float(np.quantile(values, 0.5))),
    "wait_p99": (wait_seconds, lambda values: float(np.quantile(values, 0.99))),
}


@dataclass(frozen=True)
class Trial:
    """One policy on one seed."""

    policy: str
    seed: int
    history: History
    figures: Figures


@dataclass(frozen=True)
class Comparison:
    """Trials of several policies on equal workloads. The first policy is the one that is asked about."""

    notes: tuple[str, ...]
    """What was drawn or assumed, for the first seed."""

    trials: tuple[Trial, ...]

    @property
    def policies(self) -> tuple[str, ...]:
        """Names in the order in which they ran."""
        return tuple(dict.fromkeys(trial.policy for trial in self.trials))

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds of the workloads."""
        return tuple(dict.fromkeys(trial.seed for trial in self.trials))

    def of(self, policy: str) -> list[Trial]:
        """The trials of a policy, by seed."""
        return [trial for trial in self.trials if trial.policy == policy]

    def bar(self, policy: str, name: str) -> Bar | None:
        """A figure with its confidence bar: median, least and largest over seeds; with one seed the 95 % bar of a
        block bootstrap over jobs where the figure is one of jobs, else None."""
        trials = self.of(policy)
        if len(trials) > 1:
            return over_seeds([float(getattr(trial.figures, name)) for trial in trials])
        if name not in _BOOTSTRAPPED:
            return None
        values, statistic = _BOOTSTRAPPED[name]
        return block_bootstrap(values(trials[0].history.done), statistic, seed=trials[0].seed)

    def value(self, policy: str, name: str) -> float:
        """The figure itself: of the only seed, or the median over seeds."""
        return float(np.median([float(getattr(trial.figures, name)) for trial in self.of(policy)]))

    def ratios_to_best(self, name: str) -> list[float]:
        """Per seed: the first policy's figure / the least of the others' (smaller is better). A figure of zero on both
        sides counts as 1, zero against more as 0, more against zero as infinite."""
        first, *others = self.policies
        ratios = []
        for seed in self.seeds:
            by_policy = {t.policy: float(getattr(t.figures, name)) for t in self.trials if t.seed == seed}
            best = min(by_policy[other] for other in others)
            ratios.append(by_policy[first] / best if best else 1.0 if not by_policy[first] else float("inf"))
        return ratios


def trials(
    topology: Topology, workload_of: WorkloadOf, policies: Mapping[str, Policy], seeds: Sequence[int], *,
    options: Options = DEFAULT_OPTIONS, progress: Callable[[str, int], Progress] | None = None,
) -> Iterator[tuple[Trial, Workload]]:  # fmt: skip
    """Runs every policy on every seed's workload; yields as they end."""
    for seed in seeds:
        workload = workload_of(seed)
        for name, policy in policies.items():
            told = progress(name, seed) if progress is not None else None
            history = simulate(topology, workload.jobs, policy, options=options, progress=told)
            yield Trial(name, seed, history, figures(history)), workload


def as_data(comparison: Comparison) -> dict[str, object]:
    """The comparison as plain values for JSON."""
    table: dict[str, object] = {}
    for policy in comparison.policies:
        row: dict[str, object] = {}
        for name in NAMES:
            bar = comparison.bar(policy, name)
            value = comparison.value(policy, name)
            low_high = {} if bar is None else {"low": _short(bar.low), "high": _short(bar.high)}
            row[name] = {"value": _short(value), **low_high}
        table[policy] = row
    bars = "median, least and largest over seeds" if len(comparison.seeds) > 1 else "95 % block bootstrap over jobs"
    data: dict[str, object] = {
        "seeds": list(comparison.seeds), "bars": bars, "notes": list(comparison.notes), "policies": table,
    }  # fmt: skip
    if len(comparison.policies) > 1:
        data["vs_best"] = {name: [_short(each) for each in comparison.ratios_to_best(name)] for name in VERSUS}
    return data


VERSUS = ("jct_mean", "wait_mean", "cross_rack_gangs", "excess_racks", "fragmentation")
"""Figures that are told as ratios to the best rival; smaller is better in all of them."""


def _short(value: float) -> float | None:
    return float(f"{value:.6g}") if np.isfinite(value) else None
