"""Owns the load of the placement benchmarks: gangs that come and go through the policy itself, around a level of load.

Uniform random load is meaningless here: at 85 % it leaves no rack with 16 free nodes. This load (M1) starts from an
empty cluster of 175 blocks x 8 racks x 18 nodes x 4 GPUs; a random running gang departs, and gangs of a mix arrive
until the level is reached again; one that does not fit is skipped. Gangs of up to a rack must lie in one rack, larger
ones are segments of 16 (of 18 where only 18 divides). With `soft` the small gangs only prefer one rack. Nodes that go
down do so under load, after the warm-up: the gangs on them are gone, and others arrive until the jobs hold the same
share of the nodes that are left.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from reflux_placement.gang import Assignment, GangDemand, RoleDemand
from reflux_placement.place.search import find_place
from reflux_placement.policy.view import Ask, Live
from reflux_placement.room import Room
from reflux_placement.topology import Node, Resources, Topology, build_topology

BLOCKS, RACKS_PER_BLOCK, NODES_PER_RACK = 175, 8, 18
TRAY = Resources(gpus=4, millicpus=144_000, memory_bytes=960 << 30)
"""A GB200 compute tray: 2 Grace of 72 cores, 480 GB each."""

MEMBER = Resources(gpus=4)

MIX_NODES = (1, 2, 4, 8, 16, 18, 32, 64, 128, 256, 576, 1152)
MIX_SHARE = (25, 20, 15, 12, 10, 6, 5, 4, 1.5, 1, 0.3, 0.2)
OVERSHOOT_NODES = 600
"""A gang that would lift the load by more than this above the level is not drawn."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The cluster at one moment; `room` is a copy."""

    room: Room
    load: float
    """Nodes held by jobs / nodes that are up."""

    refused_share: float
    """Arrivals so far that did not fit."""


class Churn:
    """A running load. `place_seconds` has the time of every `find_place` so far."""

    def __init__(
        self, topology: Topology, level: float, *, seed: int = 0, down_share: float = 0.0, soft: bool = False
    ) -> None:
        self.topology, self.level = topology, level
        self.room = Room(topology)
        self.place_seconds: list[float] = []
        self.departures = self.arrivals = self.refused = 0
        self._rng = np.random.default_rng(seed)
        self._share = np.array(MIX_SHARE) / sum(MIX_SHARE)
        self._jobs: list[tuple[str, int]] = []
        self._gangs = {nodes: gang_of(nodes, soft=soft) for nodes in MIX_NODES}
        self._down_share = down_share
        self.num_up = topology.num_nodes
        self.held_nodes = 0

    def snapshots(self, count: int, *, warm_up: int = 6000, gap: int = 200) -> Iterator[Snapshot]:
        """Copies of the room after `warm_up` departures and then after every `gap` of them."""
        self.run_until(warm_up)
        self._take_down()
        for index in range(count):
            self.run_until(warm_up + index * gap)
            refused = self.refused / max(1, self.arrivals)
            yield Snapshot(self.room.copy(), self.held_nodes / self.num_up, refused)

    def _take_down(self) -> None:
        """Random nodes close at once; gangs with a member there are gone."""
        down = self._rng.choice(self.topology.num_nodes, int(self.topology.num_nodes * self._down_share), replace=False)
        self.room.open_N[down] = False
        self.num_up -= len(down)
        hit = [each for each in self._jobs if np.isin(self.room.holdings[each[0]].node_M, down).any()]
        for job, nodes in hit:
            self.room.release(job)
            self.held_nodes -= nodes
        gone = {job for job, _ in hit}
        self._jobs = [each for each in self._jobs if each[0] not in gone]

    def run_until(self, departures: int) -> None:
        """Goes on until so many gangs have left, and fills up again."""
        self._fill()
        while self.departures < departures:
            self._depart()
            self._fill()

    def _depart(self) -> None:
        chosen = int(self._rng.integers(len(self._jobs)))
        self._jobs[chosen], self._jobs[-1] = self._jobs[-1], self._jobs[chosen]
        job, nodes = self._jobs.pop()
        self.room.release(job)
        self.held_nodes -= nodes
        self.departures += 1

    def _fill(self) -> None:
        target = self.level * self.num_up
        refused_in_a_row = 0
        while self.held_nodes < target and refused_in_a_row < 5:
            nodes = int(self._rng.choice(MIX_NODES, p=self._share))
            if self.held_nodes + nodes > target + OVERSHOOT_NODES:
                continue
            if self._arrive(nodes):
                refused_in_a_row = 0
            else:
                refused_in_a_row += 1

    def _arrive(self, nodes: int) -> bool:
        gang = self._gangs[nodes]
        started = time.perf_counter()
        found = find_place(self.room, gang)
        self.place_seconds.append(time.perf_counter() - started)
        self.arrivals += 1
        if not isinstance(found, Assignment):
            self.refused += 1
            return False
        job = f"jobs/{self.arrivals}"
        self.room.take(job, gang, found)
        self._jobs.append((job, nodes))
        self.held_nodes += nodes
        return True


def cluster() -> Topology:
    """175 blocks x 8 racks x 18 nodes x 4 GPUs = 100,800 GPUs."""
    return build_topology(
        "gb200",
        [
            Node(f"b{block}-r{rack}-n{node}", TRAY, {"block": f"b{block}", "rack": f"r{rack}"})
            for block in range(BLOCKS)
            for rack in range(RACKS_PER_BLOCK)
            for node in range(NODES_PER_RACK)
        ],
    )


def gang_of(nodes: int, *, soft: bool = False) -> GangDemand:
    """A gang of whole nodes: one rack if it can be (`soft`: preferably), else segments of 16 or 18 nodes, one rack
    each."""
    if nodes <= NODES_PER_RACK and soft:
        return GangDemand(roles=(RoleDemand(role="worker", count=nodes, each=MEMBER, preferred_level="rack"),))
    if nodes <= NODES_PER_RACK:
        return GangDemand(roles=(RoleDemand(role="worker", count=nodes, each=MEMBER, required_level="rack"),))
    segment = 18 if nodes % 18 == 0 and nodes % 16 else 16
    return GangDemand(roles=(RoleDemand(role="worker", count=nodes, each=MEMBER, segment_size=segment),))


BIG_GANG = gang_of(1152)
"""4,608 GPUs: 72 segments of 16 nodes."""


def live_jobs(room: Room, movable_share: float = 1.0, seed: int = 0) -> dict[str, Live]:
    """The running jobs as the policy sees them; a random share of them has a checkpoint at hand."""
    rng = np.random.default_rng(seed)
    return {
        job: Live(
            ask=Ask(job=job, number=number, gang=holding.demand, submitted_at=0.0),
            started_at=0.0,
            saved_at=0.0,
            movable=bool(rng.random() < movable_share),
        )
        for number, (job, holding) in enumerate(room.holdings.items())
    }


if __name__ == "__main__":
    begin = time.perf_counter()
    load = Churn(cluster(), 0.85)
    load.run_until(6000)
    print(f"6,000 departures in {time.perf_counter() - begin:.1f} s, {len(load.room.holdings)} gangs live")
