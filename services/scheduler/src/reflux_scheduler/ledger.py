"""Owns the plan: who is booked where, who still stands in room that is promised to others, which nodes take work.

The plan (`room`) is ahead of the machines: a preempted or migrating job leaves it when that is decided, and goes on
standing in its old room until its processes are gone. Its successor is booked meanwhile and starts when nobody stands
in its way. What is booked follows from the stored jobs alone (`sync`), so a restart finds the same plan.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from reflux_placement.errors import Occupied
from reflux_placement.gang import Assignment
from reflux_placement.room import Holding, Room, gpu_indices
from reflux_placement.topology import NODE, Ints, Topology
from reflux_scheduler.job import Job, Placement, RolePlaces, Seat

log = logging.getLogger(__name__)

_STRANDED = "/stranded"


def bookings_of(job: str) -> tuple[str, str]:
    """The names under which the room of a job is booked: what it has, and what the cluster does not take back yet."""
    return job, job + _STRANDED


def job_of(booking: str) -> str:
    """The job whose room a booking is."""
    return booking.removesuffix(_STRANDED)


"""Follows the name of a job in the name of the booking of its `Job.stranded`."""


class Ledger:
    """Bookings of all jobs on one topology, by resource name ("jobs/..."), which is how the policy calls them too."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.room = Room(topology)
        self._planned: dict[str, Placement] = {}
        self._standing: dict[str, list[Holding]] = {}
        self._standers: _Standers | None = None
        self._left = False
        self._names = [node.name for node in topology.nodes]

    def sync(self, job: Job) -> None:
        """Brings bookings in line with a job. Raises LookupError or Occupied when its places are not there."""
        planned = planned_placement(job)
        if self._planned.get(job.name) is not planned:
            self.room.release(job.name)
            self._planned.pop(job.name, None)
            if planned is not None:
                self.room.restore(job.name, self.holding(job, planned))
                self._planned[job.name] = planned
        self._keep_stranded(job)
        standing = _left_places(job)
        before = self._standing.pop(job.name, [])
        if standing:
            self._standing[job.name] = [self.holding(job, each) for each in standing]
        if standing or before:
            self._standers = None
            self._left = self._left or len(standing) < len(before)

    def _keep_stranded(self, job: Job) -> None:
        """Books what the cluster does not take back yet, so that nobody is placed there."""
        _, name = bookings_of(job.name)
        self.room.release(name)
        if job.stranded and not job.final:
            kept = Placement(NODE, "", _by_role(job.stranded))
            try:
                self.room.restore(name, self.holding(job, kept))
            except Occupied as error:
                # Members of the job itself were placed over it: they wait for the cluster, and no one else may come.
                log.warning("%s", error)

    @property
    def planned(self) -> Mapping[str, Placement]:
        """The booked places of jobs, by resource name: the very objects that the jobs hold."""
        return self._planned

    def take_left(self) -> bool:
        """Whether somebody has left room that is promised to others, since the last call."""
        left, self._left = self._left, False
        return left

    def take(self, job: Job, assignment: Assignment, part: int) -> Placement:
        """Books a decided assignment and picks GPUs; members that stay where they are keep theirs.

        Args:
            job: the job, with its places when it has some.
            assignment: where it goes.
            part: number of the grant of members that are new or move. A job that holds grants asks for one per role,
                numbered from here on, so that each can be given back when its role shrinks.

        Raises:
            Occupied: some node has too little free; the bookings are as before.
        """
        before = self.room.holdings.get(job.name)
        demand = job.spec.demand()
        self.room.release(job.name)
        try:
            holding = self.room.take(job.name, demand, assignment, keep=before)
        except Occupied:
            if before is not None:
                self.room.restore(job.name, before)
            raise
        placement = self._placement(job, holding, part)
        self._planned[job.name] = placement
        return placement

    def undo(self, job: Job) -> None:
        """Takes the bookings of a job back to what is stored, after a write that failed."""
        self._planned.pop(job.name, None)
        self.room.release(job.name)
        self.sync(job)

    def in_the_way(self, job: Job) -> str:
        """A job that still stands in room that is promised to this one; empty when there is none."""
        seats = job.placement.seats() if job.placement is not None else ()
        return next(iter(self.blockers(job, seats).values()), "")

    def blockers(self, job: Job, seats: Iterable[Seat]) -> dict[Seat, str]:
        """Which of a job's booked seats cannot be used yet, and who still stands there: on the GPUs, or with so much of
        the node that what is booked there does not fit beside it. That may be the job itself, with members that leave.
        """
        if not self._standing or job.name not in self._planned:
            return {}
        if self._standers is None:
            self._standers = _Standers(self._standing)
        blocked: dict[Seat, str] = {}
        for seat in seats:
            other = self._standers.on(self.topology.index_of(seat.node), seat.gpus, self.room)
            if other:
                blocked[seat] = other
        return blocked

    def holding(self, job: Job, placement: Placement) -> Holding:
        """The booking of stored places. Raises LookupError for a node that the topology does not have."""
        nodes = {places.role: self._indices(places.nodes) for places in placement.roles}
        level = placement.level if placement.level in self.topology.levels else self.topology.levels[-1]
        assignment = Assignment(level, 0, nodes)
        gpus = [mask for places in _in_order(job, placement) for mask in places.gpus]
        node_M = np.concatenate([nodes[places.role] for places in _in_order(job, placement)])
        return Holding(job.spec.demand(), assignment, node_M, np.array(gpus, dtype=np.int64))

    def _indices(self, names: Iterable[str]) -> Ints:
        index_of = self.topology.index_of
        return np.array([index_of(name) for name in names], dtype=np.int64)

    def _placement(self, job: Job, holding: Holding, part: int) -> Placement:
        domain = self.topology.domains(holding.assignment.level)[holding.assignment.domain]
        roles, start = [], 0
        for demand in holding.demand.roles:
            indices = holding.assignment.nodes.get(demand.role)
            count = 0 if indices is None else len(indices)
            names = self._names
            nodes = tuple([names[index] for index in holding.node_M[start : start + count].tolist()])
            gpus = tuple(holding.gpus_M[start : start + count].tolist())
            parts = _parts(job, demand.role, nodes, gpus, part)
            roles.append(RolePlaces(demand.role, nodes, gpus, parts))
            start += count
            part += bool(job.parts) and job.ending is None and part in parts
        return Placement(domain.level, domain.label, tuple(roles))


def planned_placement(job: Job) -> Placement | None:
    """Where the plan has a job: nowhere once it is on its way back into the queue, even if it was cancelled since."""
    if job.final:
        return None
    if job.ending is not None and job.ending.gave_room_away:
        return job.next_placement
    return job.placement


def shares(job: Job, part: int) -> dict[str, tuple[Ints, int]]:
    """What one grant of a job holds per node: resources as a row, and its GPUs as a mask."""
    assert job.placement is not None
    each = {role.name: np.array(role.each.row, dtype=np.int64) for role in job.spec.roles}
    sums: dict[str, tuple[Ints, int]] = {}
    for seat in job.placement.seats():
        if seat.part == part:
            row, mask = sums.get(seat.node, (np.zeros(3, dtype=np.int64), 0))
            sums[seat.node] = (row + each[seat.role], mask | seat.gpus)
    return sums


def gpus_on(job: Job, seat: Seat) -> tuple[int, ...]:
    """All GPUs that a member's grant holds on its node, ascending."""
    assert job.placement is not None
    mask = 0
    for each in job.placement.seats():
        if each.node == seat.node and each.part == seat.part:
            mask |= each.gpus
    return gpu_indices(mask)


def _parts(job: Job, role: str, nodes: tuple[str, ...], gpus: tuple[int, ...], part: int) -> tuple[int, ...]:
    """The part of every member: its own where it stays, that of the member whose room it takes over, else `part`."""
    old = next((places for places in job.placement.roles if places.role == role), None) if job.placement else None
    if old is None or job.ending is not None:
        return (part,) * len(nodes)
    before, now = list(zip(old.nodes, old.gpus, strict=True)), list(zip(nodes, gpus, strict=True))
    stays = [rank < len(before) and before[rank] == place for rank, place in enumerate(now)]
    left: dict[tuple[str, int], list[int]] = {}
    for rank, place in enumerate(before):
        if rank >= len(now) or not stays[rank]:
            left.setdefault(place, []).append(old.parts[rank])
    return tuple(
        old.parts[rank] if stays[rank] else left[place].pop() if left.get(place) else part
        for rank, place in enumerate(now)
    )


def _by_role(seats: Iterable[Seat]) -> tuple[RolePlaces, ...]:
    """Seats as columns per role, in whatever order of ranks."""
    columns: dict[str, list[Seat]] = {}
    for seat in seats:
        columns.setdefault(seat.role, []).append(seat)
    return tuple(
        RolePlaces(
            role,
            tuple(seat.node for seat in each),
            tuple(seat.gpus for seat in each),
            tuple(seat.part for seat in each),
        )
        for role, each in columns.items()
    )


def _left_places(job: Job) -> list[Placement]:
    """Places that the plan has given away and whose processes may still run."""
    places: list[Placement] = []
    if job.final:
        return places
    if job.ending is not None and job.ending.gave_room_away and job.placement is not None:
        places.append(job.placement)
    for seat in job.retiring:
        places.append(Placement(NODE, "", (RolePlaces(seat.role, (seat.node,), (seat.gpus,), (seat.part,)),)))
    return places


def _in_order(job: Job, placement: Placement) -> list[RolePlaces]:
    """Places in the order of the job's roles, as bookings have them; roles without members left out."""
    by_role = {places.role: places for places in placement.roles}
    return [by_role[role.name] for role in job.spec.roles if role.name in by_role and by_role[role.name].nodes]


def _needs(holding: Holding) -> Ints:
    rows = [
        np.broadcast_to(np.array(role.each.row, dtype=np.int64), (len(holding.assignment.nodes[role.role]), 3))
        for role in holding.demand.roles
        if len(holding.assignment.nodes.get(role.role, ()))
    ]
    return np.concatenate(rows)


class _Standers:
    """Those who still stand in room that is promised to others, by node."""

    def __init__(self, standing: Mapping[str, list[Holding]]) -> None:
        self._on: dict[int, list[tuple[str, int]]] = {}
        self._needs: dict[int, Ints] = {}
        for job, holdings in standing.items():
            for holding in holdings:
                nodes, masks = holding.node_M.tolist(), holding.gpus_M.tolist()
                for node, mask, need in zip(nodes, masks, _needs(holding), strict=True):
                    self._on.setdefault(node, []).append((job, mask))
                    self._needs[node] = self._needs[node] + need if node in self._needs else need

    def on(self, node: int, gpus: int, room: Room) -> str:
        """Who stands on these GPUs of a node, or has more of it than is free in the plan; empty for nobody."""
        there = self._on.get(node)
        if there is None:
            return ""
        if (room.free_NR[node] < self._needs[node]).any():
            return there[0][0]
        return next((job for job, mask in there if mask & gpus), "")


def renumbered(placement: Placement, part: int) -> Placement:
    """The same places, all in one part."""
    roles = tuple(replace(places, parts=(part,) * len(places.nodes)) for places in placement.roles)
    return replace(placement, roles=roles)


def usage(jobs: Mapping[str, Job]) -> dict[str, Ints]:
    """What the placed jobs of each queue hold, as rows of GPUs, thousandths of a CPU, bytes."""
    sums: dict[str, Ints] = {}
    for job in jobs.values():
        placement = planned_placement(job)
        if placement is None:
            continue
        each = {role.name: np.array(role.each.row, dtype=np.int64) for role in job.spec.roles}
        row = sum((each[places.role] * len(places.nodes) for places in placement.roles), np.zeros(3, dtype=np.int64))
        sums[job.spec.queue] = sums.get(job.spec.queue, np.zeros(3, dtype=np.int64)) + row
    return sums
