"""Owns who holds what on which node, down to GPUs; never hands out more than a node has.

Booking and giving back are O(members); copies are cheap (a few arrays), so that what-if questions work on a copy.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from reflux_placement.errors import Occupied
from reflux_placement.gang import Assignment, GangDemand
from reflux_placement.topology import Ints, Resources, Topology

MAX_GPUS_PER_NODE = 63
_NONE: Ints = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Holding:
    """What one job holds: M members in the order of its roles, ranks ascending."""

    demand: GangDemand
    assignment: Assignment
    node_M: Ints
    gpus_M: Ints
    """GPUs of each member as a bit mask over the node's GPU indices."""

    @cached_property
    def need_MR(self) -> Ints:
        """GPUs, thousandths of a CPU and bytes of each member."""
        return member_needs(self.demand, self.assignment)[1]

    @cached_property
    def amount(self) -> Resources:
        """All members together."""
        return Resources(*self.need_MR.sum(axis=0).tolist())

    @cached_property
    def is_elastic(self) -> bool:
        """Whether the job may hold more or fewer members."""
        return any(role.most > role.least for role in self.demand.roles)


class Room:
    """Free amounts per node, the GPUs that are free as bit masks, and what each job holds."""

    def __init__(self, topology: Topology) -> None:
        if int(topology.capacity_NR[:, 0].max(initial=0)) > MAX_GPUS_PER_NODE:
            raise Occupied(f"a node has more than {MAX_GPUS_PER_NODE} GPUs")
        self.topology = topology
        self.free_NR: Ints = topology.capacity_NR.copy()
        self.open_N: NDArray[np.bool_] = np.ones(topology.num_nodes, dtype=bool)
        """Whether new work may go to a node (it is up, not draining, not held back as a spare)."""

        self._gpus_N: Ints = (1 << topology.capacity_NR[:, 0]) - 1
        self._held: dict[str, Holding] = {}

    def copy(self) -> "Room":
        """An independent copy for what-if questions."""
        other = Room.__new__(Room)
        other.topology = self.topology
        other.free_NR = self.free_NR.copy()
        other.open_N = self.open_N.copy()
        other._gpus_N = self._gpus_N.copy()
        other._held = dict(self._held)
        return other

    @property
    def holdings(self) -> Mapping[str, Holding]:
        """What each job holds."""
        return self._held

    def usable_NR(self) -> Ints:
        """Free amounts per node, -1 in every column of a node that takes no new work."""
        usable_NR = self.free_NR.copy()
        usable_NR[~self.open_N] = -1
        return usable_NR

    def take(self, job: str, demand: GangDemand, assignment: Assignment, *, keep: Holding | None = None) -> Holding:
        """Books an assignment and picks the GPUs of every member, lowest indices first.

        `keep` is what the job held until it was released for this: members that stay (same role, rank and node) get
        exactly their GPUs again, because their processes run on.

        Raises:
            Occupied: some node has too little free; nothing was taken.
        """
        assert job not in self._held, f"{job} is booked already"
        node_M, need_MR = member_needs(demand, assignment)
        short = self._short_of(node_M, need_MR)
        if len(short):
            raise Occupied(f"{job}: node {self.topology.nodes[int(short[0])].name} has too little free")
        kept_M = _kept_gpus(demand, assignment, keep, len(node_M))
        holding = Holding(demand, assignment, node_M, self._pick_gpus(node_M, need_MR[:, 0], kept_M))
        self._apply(holding, 1)
        self._held[job] = holding
        return holding

    def restore(self, job: str, holding: Holding) -> None:
        """Books what a job held before, GPUs included. Raises Occupied; nothing was taken then."""
        assert job not in self._held, f"{job} is booked already"
        if len(self._short_of(holding.node_M, holding.need_MR)) or _overlap(holding, self._gpus_N):
            raise Occupied(f"{job}: what it held is not free any more")
        self._apply(holding, 1)
        self._held[job] = holding

    def release(self, job: str) -> None:
        """Gives back what a job holds; does nothing when it holds nothing."""
        holding = self._held.pop(job, None)
        if holding is not None:
            self._apply(holding, -1)

    def release_all(self, jobs: Iterable[str]) -> None:
        """Gives back what several jobs hold."""
        for job in jobs:
            self.release(job)

    def jobs_on(self, node: int) -> list[str]:
        """Jobs with a member on a node."""
        return [job for job, holding in self._held.items() if (holding.node_M == node).any()]

    def _short_of(self, node_M: Ints, need_MR: Ints) -> Ints:
        """Nodes with less free than their members need, ascending."""
        nodes_K, position_M = np.unique(node_M, return_inverse=True)
        need_KR = np.zeros((len(nodes_K), 3), dtype=np.int64)
        np.add.at(need_KR, position_M, need_MR)
        return nodes_K[(need_KR > self.free_NR[nodes_K]).any(axis=1)]

    def _pick_gpus(self, node_M: Ints, count_M: Ints, kept_M: Ints) -> Ints:
        picked_M = kept_M.copy()
        nodes_K, position_M, members_K = np.unique(node_M, return_inverse=True, return_counts=True)
        alone_M = (members_K[position_M] == 1) & (kept_M == 0)
        _pick_alone(picked_M, self._gpus_N[node_M], np.where(alone_M, count_M, 0))
        if not (~alone_M & (kept_M == 0) & (count_M > 0)).any():
            return picked_M
        left = {int(node): int(self._gpus_N[node]) for node in nodes_K}
        for member in np.flatnonzero(kept_M).tolist():
            left[int(node_M[member])] &= ~int(kept_M[member])
        for member in np.flatnonzero(~alone_M & (kept_M == 0)).tolist():
            node, mask = int(node_M[member]), 0
            free = left[node]
            for _ in range(int(count_M[member])):
                lowest = free & -free
                mask |= lowest
                free ^= lowest
            left[node] = free
            picked_M[member] = mask
        return picked_M

    def _apply(self, holding: Holding, sign: int) -> None:
        np.subtract.at(self.free_NR, holding.node_M, sign * holding.need_MR)
        if sign > 0:
            np.bitwise_and.at(self._gpus_N, holding.node_M, ~holding.gpus_M)
        else:
            np.bitwise_or.at(self._gpus_N, holding.node_M, holding.gpus_M)


def member_needs(demand: GangDemand, assignment: Assignment) -> tuple[Ints, Ints]:
    """Node index (M) and need (M, 3) of every member, roles in the order of the demand."""
    nodes: list[Ints] = [np.zeros(0, dtype=np.int64)]
    needs: list[Ints] = [np.zeros((0, 3), dtype=np.int64)]
    for role in demand.roles:
        ranks = assignment.nodes.get(role.role)
        if ranks is None or not len(ranks):
            continue
        nodes.append(ranks)
        needs.append(np.broadcast_to(np.array(role.each.row, dtype=np.int64), (len(ranks), 3)))
    return np.concatenate(nodes), np.concatenate(needs)


def _kept_gpus(demand: GangDemand, assignment: Assignment, keep: Holding | None, num_members: int) -> Ints:
    """The GPU masks of members that stay where `keep` had them; 0 for the others."""
    kept_M = np.zeros(num_members, dtype=np.int64)
    if keep is None:
        return kept_M
    before: dict[str, tuple[Ints, Ints]] = {}
    member = 0
    for role in keep.demand.roles:
        ranks = keep.assignment.nodes.get(role.role, _NONE)
        before[role.role] = (ranks, keep.gpus_M[member : member + len(ranks)])
        member += len(ranks)
    member = 0
    for role in demand.roles:
        ranks = assignment.nodes.get(role.role, _NONE)
        was, masks = before.get(role.role, (_NONE, _NONE))
        both = min(len(ranks), len(was))
        kept_M[member : member + both] = np.where(ranks[:both] == was[:both], masks[:both], 0)
        member += len(ranks)
    return kept_M


def _overlap(holding: Holding, gpus_N: Ints) -> bool:
    """Whether a member's GPUs were not all free, or two members share one."""
    left = dict(zip(holding.node_M.tolist(), gpus_N[holding.node_M].tolist(), strict=True))
    for node, mask in zip(holding.node_M.tolist(), holding.gpus_M.tolist(), strict=True):
        if mask & ~left[node]:
            return True
        left[node] &= ~mask
    return False


def _pick_alone(picked_M: Ints, free_M: Ints, count_M: Ints) -> None:
    """Takes the `count_M` lowest of the free GPUs for members that have a node to themselves, all at once."""
    for taken in range(int(count_M.max(initial=0))):
        lowest_M = np.where(count_M > taken, free_M & -free_M, 0)
        picked_M |= lowest_M
        free_M = free_M ^ lowest_M


def gpu_indices(mask: int) -> tuple[int, ...]:
    """The GPU indices of a bit mask, ascending."""
    return tuple(index for index in range(mask.bit_length()) if mask >> index & 1)
