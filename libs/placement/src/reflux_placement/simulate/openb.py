"""Owns how tasks of the openb trace become gangs: the trace has almost none, so sizes are drawn anew.

What is kept: arrivals, run times, and what one member asks (CPUs, memory, GPUs; a task that asks for a part of a GPU
gets a whole one - `num_gpu` is 1 there). What is drawn, from a seed: the number of members of every task with GPUs.
Tasks without GPUs stay single. Tasks that the trace never started (Pending, 897 of 8,152) are kept; their run time is
drawn from the started tasks with as many GPUs. `notes` says all of it with figures; every result carries it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from reflux_placement.gang import GangDemand, RoleDemand
from reflux_placement.simulate.fragmentation import slots
from reflux_placement.simulate.jobs import SimJob
from reflux_placement.simulate.load import scale_arrivals
from reflux_placement.topology import CLUSTER, NODE, Ints, Resources, Topology

Sizes = Literal["log2", "acme", "trace"]
SIZES: dict[str, Sizes] = {sizes: sizes for sizes in get_args(Sizes)}
MAX_SIZE = 1024
ACME_MEAN, ACME_MAX = 26.8, 1024
"""GPU jobs of Acme's Kalos cluster (Hu et al., NSDI'24): mean 26.8 GPUs, median 1, largest 1024."""

CLUSTER_SHARE = 0.5
"""No gang may ask for more than this share of what the empty cluster holds."""

CHECKPOINT_SECONDS = 1800.0


@dataclass(frozen=True, slots=True)
class Task:
    """A row of the trace. `seconds` is None for a task that never started."""

    name: str
    arrives_at: float
    seconds: float | None
    each: Resources


@dataclass(frozen=True)
class Workload:
    """Jobs, and in sentences what was changed or drawn to get them."""

    jobs: tuple[SimJob, ...]
    notes: tuple[str, ...]


def openb_workload(
    tasks: Sequence[Task], topology: Topology, *, sizes: Sizes = "log2", seed: int = 0, load: float | None = None
) -> Workload:
    """Jobs from tasks, in order of arrival.

    Args:
        tasks: of the trace.
        topology: bounds the sizes and gives `load` its meaning.
        sizes: "log2": log2-uniform over 1..1024 members. "acme": single with probability 0.84, else log2-uniform over
            2..1024, which has Acme's mean of 26.8 and median of 1. "trace": as in the trace.
        seed: of sizes and of unknown run times.
        load: stretches or squeezes the gaps between arrivals until the offered load in the window is this share of the
            cluster's GPUs; None keeps arrivals.
    """
    rng = np.random.default_rng(seed)
    tasks = sorted(tasks, key=lambda task: task.arrives_at)
    seconds, unknown = _seconds(tasks, rng)
    drawn = _draw(sizes, len(tasks), rng)
    levels = [level for level in topology.levels if level not in (NODE, CLUSTER)]
    jobs, capped = [], 0
    largest: dict[Resources, int] = {}
    for task, run_seconds, wanted in zip(tasks, seconds, drawn.tolist(), strict=True):
        size = wanted if task.each.gpus else 1
        if task.each not in largest:
            largest[task.each] = max(1, int(slots(topology.capacity_NR, task.each).sum() * CLUSTER_SHARE))
        capped += size > largest[task.each]
        size = min(size, largest[task.each])
        role = RoleDemand(role="worker", count=size, each=task.each)
        gang = GangDemand(roles=(role,), preferred_level=levels[0] if levels and size > 1 else "")
        jobs.append(SimJob(
            name=task.name, gang=gang, arrives_at=task.arrives_at, seconds=run_seconds,
            checkpoint_seconds=CHECKPOINT_SECONDS,
        ))  # fmt: skip
    notes = [_sizes_note(sizes, jobs, seed, capped)]
    notes.append(
        f"{unknown} tasks never started in the trace: kept, run times drawn from started tasks of as many GPUs"
    )
    notes.append("parts of a GPU are rounded up to a whole one; every job checkpoints each half hour")
    if load is not None:
        jobs, factor = scale_arrivals(jobs, topology, load)
        notes.append(
            f"gaps between arrivals are {factor:.3f} times those of the trace, for an offered load of {load:.2f}"
        )
    return Workload(tuple(jobs), tuple(notes))


def _seconds(tasks: Sequence[Task], rng: np.random.Generator) -> tuple[list[float], int]:
    """Run times, drawn where the trace has none; and how many were drawn."""
    known: dict[int, list[float]] = {}
    for task in tasks:
        if task.seconds is not None:
            known.setdefault(task.each.gpus, []).append(task.seconds)
    everything = [seconds for each in known.values() for seconds in each] or [600.0]
    drawn, result = 0, []
    for task in tasks:
        if task.seconds is None:
            drawn += 1
            result.append(float(rng.choice(known.get(task.each.gpus, everything))))
        else:
            result.append(task.seconds)
    return result, drawn


def _draw(sizes: Sizes, count: int, rng: np.random.Generator) -> Ints:
    if sizes == "trace":
        return np.ones(count, dtype=np.int64)
    if sizes == "log2":
        return np.rint(2 ** rng.uniform(0, np.log2(MAX_SIZE), count)).astype(np.int64)
    many = np.rint(2 ** rng.uniform(1, np.log2(ACME_MAX), count)).astype(np.int64)
    mean_of_many = (ACME_MAX - 2) / np.log(ACME_MAX / 2)
    single = (mean_of_many - ACME_MEAN) / (mean_of_many - 1)
    return np.where(rng.random(count) < single, 1, many)


def _sizes_note(sizes: Sizes, jobs: Sequence[SimJob], seed: int, capped: int) -> str:
    gpus = np.array([job.gpus for job in jobs if job.gpus])
    told = (
        f"mean {gpus.mean():.1f}, median {np.median(gpus):.0f}, largest {gpus.max()} GPUs" if len(gpus) else "no GPUs"
    )
    if sizes == "trace":
        return f"gang sizes are those of the trace ({told}): almost every job is one task"
    law = {"log2": f"log2-uniform over 1..{MAX_SIZE}", "acme": "mixture with Acme's mean of 26.8 and median of 1"}[
        sizes
    ]
    return (
        f"gang sizes were RESAMPLED ({law}, seed {seed}): {told}; arrivals and run times are the trace's; "
        f"{capped} gangs were capped at {CLUSTER_SHARE:.0%} of the cluster"
    )
