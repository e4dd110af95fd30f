"""Owns the progress of one running job: work done, what a checkpoint holds, and when it will end.

Work is counted in seconds at the desired size inside one rack. A job of n of its N desired GPUs does n / N of it per
second, less where its traffic leaves the rack (Options.cross_rack_slowdown).
"""

import math
from dataclasses import dataclass

import numpy as np

from reflux_placement.gang import Assignment
from reflux_placement.policy.view import Ask
from reflux_placement.room import Holding
from reflux_placement.simulate.history import End, Stay
from reflux_placement.simulate.jobs import Options, SimJob
from reflux_placement.simulate.spans import block_position, cross_share, num_domains, rack_position
from reflux_placement.topology import Topology


@dataclass(slots=True)
class Running:
    """A job in one place since `since`; a new place or size makes a new one."""

    job: SimJob
    ask: Ask
    holding: Holding
    started_at: float
    """Start of this run (a resize or migration does not change it, a preemption ends it)."""

    since: float
    """Work goes on from here (after the time to be up again)."""

    placed_at: float
    done: float
    """Work at `since`, all of it saved."""

    rate: float
    cross_rack: float
    version: int
    """Invalidates end events of earlier places."""

    broken: bool = False
    """A member's node is gone: no progress until the policy replaces it or the node is back."""

    @property
    def ends_at(self) -> float:
        """When it will end if nothing happens."""
        return self.since + (self.job.seconds - self.done) / self.rate if self.rate and not self.broken else math.inf

    def saved_at(self, now: float) -> float:
        """Time of the last checkpoint, or of the start of this place."""
        period = self.job.checkpoint_seconds
        if self.broken or now < self.since + period or not period:
            return min(self.since, now)
        return self.since + math.floor((now - self.since) / period) * period

    def work_at(self, now: float) -> float:
        """Work done by `now`."""
        return self.done + max(0.0, now - self.since) * self.rate

    def saved_work(self, now: float) -> float:
        """Work that a checkpoint holds at `now`."""
        return self.work_at(self.saved_at(now))

    def break_down(self, now: float) -> float:
        """Stops it where its last checkpoint is; returns the lost GPU-seconds."""
        saved, work = self.saved_work(now), self.work_at(now)
        self.done, self.since, self.broken = saved, now, True
        return (work - saved) * self.job.gpus

    def stay(self, topology: Topology, end: float, ended_by: End) -> Stay:
        """What history keeps of this place."""
        node_M, block = self.holding.node_M, block_position(topology)
        return Stay(
            start=self.placed_at,
            end=end,
            assignment=self.holding.assignment,
            node_M=node_M,
            gpus_M=self.holding.gpus_M,
            gpus=held_gpus(self.holding),
            num_racks=num_domains(topology, rack_position(topology), node_M),
            num_blocks=1 if block is None else num_domains(topology, block, node_M),
            cross_rack=self.cross_rack,
            ended_by=ended_by,
        )


def place(
    job: SimJob, ask: Ask, holding: Holding, topology: Topology, options: Options, *,
    now: float, started_at: float, done: float, version: int, delay: float,
) -> Running:  # fmt: skip
    """A job in a new place: its rate and, from it, its end."""
    share = cross_share(topology, holding.demand, holding.assignment)
    rate = _size(job, holding.assignment) / (1.0 + options.cross_rack_slowdown * share)
    return Running(
        job=job, ask=ask, holding=holding, started_at=started_at, since=now + delay, placed_at=now, done=done,
        rate=rate, cross_rack=share, version=version,
    )  # fmt: skip


def held_gpus(holding: Holding) -> int:
    """GPUs that a holding covers."""
    return sum(mask.bit_count() for mask in holding.gpus_M.tolist())


def _size(job: SimJob, assignment: Assignment) -> float:
    """Members held / members desired, by GPUs where the gang has any."""
    held = wanted = 0
    by_gpus = any(role.each.gpus for role in job.gang.roles)
    for role in job.gang.roles:
        weight = role.each.gpus if by_gpus else 1
        held += weight * len(assignment.nodes.get(role.role, ()))
        wanted += weight * role.count
    return held / wanted if wanted else 1.0


def counts_fit(job: SimJob, assignment: Assignment) -> bool:
    """Whether every role has between its least and its most members: no partial gang."""
    return all(role.least <= len(assignment.nodes.get(role.role, np.zeros(0))) <= role.most for role in job.gang.roles)
