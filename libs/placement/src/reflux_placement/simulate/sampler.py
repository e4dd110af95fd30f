"""Owns the time series of a simulation: the state of the cluster on an even grid of times."""

from collections.abc import Mapping, Sequence

import numpy as np

from reflux_placement.policy.view import Ask
from reflux_placement.room import Room
from reflux_placement.simulate.fragmentation import fragmented_gpus, request_mix
from reflux_placement.simulate.history import Sample
from reflux_placement.simulate.jobs import SimJob, window
from reflux_placement.topology import Topology

_AFTER = 0.25
"""Share of the window for which samples go on behind it."""


class Sampler:
    """Takes a sample at every point of the grid, with the state that held from the last event up to it."""

    def __init__(self, topology: Topology, jobs: Sequence[SimJob], count: int) -> None:
        self._topology = topology
        self._gpus = {job.name: job.gpus for job in jobs}
        self._mix = request_mix(topology, (job.gang for job in jobs))
        first, last = window(jobs) if jobs else (0.0, 0.0)
        self._step = max((last - first) / max(1, count), 1e-9)
        self._next, self._last = first, last + (last - first) * _AFTER
        self.samples: list[Sample] = []

    def until(self, now: float, room: Room, pending: Mapping[str, Ask]) -> None:
        """Samples every grid point before `now`; call it before the events of `now` are taken."""
        end = min(now, self._last)
        if self._next >= end:
            return
        state = self._state(room, pending)
        while self._next < end:
            self.samples.append(Sample(self._next, *state))
            self._next += self._step

    def _state(self, room: Room, pending: Mapping[str, Ask]) -> tuple[int, int, float, int, int]:
        usable_NR = room.usable_NR()
        used = int((self._topology.capacity_NR[:, 0] - room.free_NR[:, 0]).sum())
        free = int(np.maximum(usable_NR[:, 0], 0).sum())
        waiting = sum(self._gpus[job] for job in pending)
        return used, free, fragmented_gpus(self._topology, usable_NR, self._mix), len(pending), waiting
