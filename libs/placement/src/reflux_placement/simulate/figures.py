"""Owns the figures of a simulation: utilisation, completion and wait times, fragmentation, locality, lost work."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np
from numpy.typing import NDArray

from reflux_placement.simulate.history import History, JobRecord
from reflux_placement.simulate.jobs import window
from reflux_placement.simulate.spans import fewest_racks

SLOWDOWN_FLOOR_SECONDS = 10.0
"""Bounded slowdown (Feitelson et al., 1997): run times below this count as this."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Locality:
    """How far apart gangs of more than one member were placed."""

    cross_rack_gangs: int
    """Gangs that at some time touched more than one rack."""

    avoidable_cross_rack_gangs: int
    """Of them, those of gangs that fit into one rack."""

    excess_racks: float
    """Mean racks of a gang / fewest racks that hold it in an empty cluster."""

    cross_block_gangs: int
    cross_rack_traffic: float
    """Share of all traffic that leaves a rack; each gang counts by its GPU-seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures(Locality):
    """One run in figures. Times in seconds; shares from 0 to 1. `window`: see simulate.jobs.window."""

    jobs: int
    unfinished: int
    """Jobs that never ended: starved."""

    utilisation: float
    """Share of the cluster's GPU-seconds in the window that jobs held."""

    jct_mean: float
    jct_p50: float
    jct_p99: float
    slowdown_mean: float
    """Mean of completion time / max(run time, 10 s)."""

    wait_mean: float
    wait_p50: float
    wait_p99: float
    fragmentation: float
    """Mean over the window of fragmented GPUs / all GPUs (simulate/fragmentation.py)."""

    preemptions: int
    lost_gpu_hours: float
    """Work stopped by preemption, migration or failure that no checkpoint held."""

    makespan: float
    """From the first arrival to the last end."""


NAMES = tuple(field.name for field in fields(Figures))


def figures(history: History) -> Figures:
    """All figures of a run."""
    done = history.done
    jct, waits, slow = completion_seconds(done), wait_seconds(done), _slowdowns(done)
    arrivals = [record.job.arrives_at for record in history.records]
    return Figures(
        jobs=len(history.records),
        unfinished=len(history.unfinished),
        utilisation=utilisation(history),
        jct_mean=_mean(jct),
        jct_p50=_quantile(jct, 0.5),
        jct_p99=_quantile(jct, 0.99),
        slowdown_mean=_mean(slow),
        wait_mean=_mean(waits),
        wait_p50=_quantile(waits, 0.5),
        wait_p99=_quantile(waits, 0.99),
        **asdict(_locality(history)),
        fragmentation=_fragmentation(history),
        preemptions=sum(record.preemptions for record in history.records),
        lost_gpu_hours=sum(record.lost_gpu_seconds for record in history.records) / 3600,
        makespan=max((record.ended_at or 0.0 for record in done), default=0.0) - min(arrivals, default=0.0),
    )


def completion_seconds(done: Sequence[JobRecord]) -> Floats:
    """Completion time of every job that ended, in order of arrival."""
    return np.array([record.completion_seconds for record in done])


def wait_seconds(done: Sequence[JobRecord]) -> Floats:
    """Wait of every job that ended, in order of arrival."""
    return np.array([record.wait_seconds for record in done])


def utilisation(history: History) -> float:
    """Exact, from every stay: held GPU-seconds inside the window / the cluster's."""
    start, end = window([record.job for record in history.records])
    total = float(history.topology.capacity_NR[:, 0].sum()) * (end - start)
    stays = [stay for record in history.records for stay in record.stays]
    held = sum(stay.gpus * max(0.0, min(stay.end, end) - max(stay.start, start)) for stay in stays)
    return held / total if total else 0.0


def _slowdowns(done: Sequence[JobRecord]) -> Floats:
    return np.array([r.completion_seconds / max(r.job.seconds, SLOWDOWN_FLOOR_SECONDS) for r in done])


def _locality(history: History) -> Locality:
    crossing = avoidable = blocks = 0
    excess: list[float] = []
    weighted = weight = 0.0
    for record in history.records:
        if sum(role.count for role in record.job.gang.roles) < 2:
            continue
        fewest = fewest_racks(history.topology, record.job.gang)
        crossed = any(stay.num_racks > 1 for stay in record.stays)
        crossing += crossed
        avoidable += crossed and fewest == 1
        blocks += any(stay.num_blocks > 1 for stay in record.stays)
        for stay in record.stays:
            excess.append(stay.num_racks / fewest)
            weighted += stay.cross_rack * stay.gpus * (stay.end - stay.start)
            weight += stay.gpus * (stay.end - stay.start)
    return Locality(
        cross_rack_gangs=crossing,
        avoidable_cross_rack_gangs=avoidable,
        cross_block_gangs=blocks,
        excess_racks=float(np.mean(excess)) if excess else 1.0,
        cross_rack_traffic=weighted / weight if weight else 0.0,
    )


def _fragmentation(history: History) -> float:
    _, end = window([record.job for record in history.records])
    total = float(history.topology.capacity_NR[:, 0].sum())
    inside = [sample.fragmented_gpus for sample in history.samples if sample.at <= end]
    return float(np.mean(inside)) / total if inside and total else 0.0


def _mean(values: Floats) -> float:
    return float(values.mean()) if len(values) else 0.0


def _quantile(values: Floats, share: float) -> float:
    return float(np.quantile(values, share)) if len(values) else 0.0


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure with its confidence bar."""

    value: float
    low: float
    high: float


def block_bootstrap(
    values: Floats, statistic: Callable[[Floats], float], *, rounds: int = 500, seed: int = 0, level: float = 0.95
) -> Bar:
    """Confidence bar of a statistic over jobs in order of arrival, by a circular block bootstrap (Politis and Romano
    1992): waits of neighbouring jobs depend on each other, so blocks of about 4 n^(1/3) jobs are drawn, not single
    ones; the circle makes every job as likely, those at the ends too."""
    if not len(values):
        return Bar(0.0, 0.0, 0.0)
    rng = np.random.default_rng(seed)
    length = max(1, min(len(values), round(4 * len(values) ** (1 / 3))))
    blocks = -(-len(values) // length)
    starts = rng.integers(0, len(values), (rounds, blocks))
    places = (starts[:, :, None] + np.arange(length)) % len(values)
    draws = [statistic(values[row.ravel()[: len(values)]]) for row in places]
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
    return Bar(statistic(values), float(low), float(high))


def over_seeds(values: Sequence[float]) -> Bar:
    """Median with the smallest and the largest over seeds: with few seeds no quantile is honest."""
    return Bar(float(np.median(values)), float(min(values)), float(max(values)))
