"""Owns the offered load of a workload: what it asks for in its window, and how to scale arrivals to a wanted load."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from reflux_placement.simulate.jobs import WARM_UP, SimJob
from reflux_placement.topology import Topology

_STEPS = 60
_WIDEST = 1e4


def offered_load(jobs: Sequence[SimJob], topology: Topology, factor: float = 1.0) -> float:
    """GPU-seconds that fall into the window if every job started on arrival / GPU-seconds that the cluster has there.
    Above 1 the queue grows for as long as the window lasts. `factor` multiplies the arrival times."""
    arrivals = np.array([job.arrives_at for job in jobs]) * factor
    seconds = np.array([job.seconds for job in jobs])
    gpus = np.array([job.gpus for job in jobs], dtype=float)
    start, end = float(np.quantile(arrivals, WARM_UP, method="lower")), float(arrivals.max())
    inside = np.clip(np.minimum(arrivals + seconds, end) - np.maximum(arrivals, start), 0, None)
    room = float(topology.capacity_NR[:, 0].sum()) * (end - start)
    return float((inside * gpus).sum()) / room if room else 0.0


def scale_arrivals(jobs: Sequence[SimJob], topology: Topology, load: float) -> tuple[list[SimJob], float]:
    """Jobs with their gaps stretched or squeezed by one factor, so that the offered load is `load`; and the factor.

    Raises:
        ValueError: no factor between 1e-4 and 1e4 gives this load.
    """
    low, high = 1 / _WIDEST, _WIDEST
    if not offered_load(jobs, topology, high) <= load <= offered_load(jobs, topology, low):
        raise ValueError(f"load = {load}: these jobs cannot offer it; write a share such as 0.85")
    for _ in range(_STEPS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if offered_load(jobs, topology, middle) > load else (low, middle)
    return [replace(job, arrives_at=job.arrives_at * high) for job in jobs], high
