"""Owns room that is kept for a pending job: which part of it nobody else may take while others still hold the rest."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from reflux_placement.gang import Assignment, GangDemand
from reflux_placement.policy.view import Ask, Claim
from reflux_placement.room import Room, member_needs
from reflux_placement.topology import Ints


def needs_by_node(gang: GangDemand, assignment: Assignment) -> tuple[Ints, Ints]:
    """The K nodes of an assignment, ascending, and what it takes on each, (K, 3)."""
    node_M, need_MR = member_needs(gang, assignment)
    nodes_K, position_M = np.unique(node_M, return_inverse=True)
    need_KR = np.zeros((len(nodes_K), 3), dtype=np.int64)
    np.add.at(need_KR, position_M, need_MR)
    return nodes_K, need_KR


def held_on(room: Room, jobs: Iterable[str], nodes_K: Ints) -> Ints:
    """What jobs hold on nodes (ascending), (K, 3). Jobs that hold nothing count nothing."""
    held_KR = np.zeros((len(nodes_K), 3), dtype=np.int64)
    holdings = [room.holdings[job] for job in jobs if job in room.holdings]
    if holdings and len(nodes_K):
        node_M = np.concatenate([holding.node_M for holding in holdings])
        need_MR = np.concatenate([holding.need_MR for holding in holdings])
        position_M = np.searchsorted(nodes_K, node_M).clip(max=len(nodes_K) - 1)
        there_M = nodes_K[position_M] == node_M
        np.add.at(held_KR, position_M[there_M], need_MR[there_M])
    return held_KR


@dataclass(frozen=True, eq=False)
class Standing:
    """A claim as it is now: it needs `need_KR` on `nodes_K`."""

    claim: Claim
    ask: Ask
    nodes_K: Ints
    need_KR: Ints

    @property
    def job(self) -> str:
        """The job that the room is for."""
        return self.ask.job

    @property
    def amount(self) -> tuple[int, int, int]:
        """All of it: GPUs, thousandths of a CPU, bytes."""
        gpus, millicpus, memory_bytes = self.need_KR.sum(axis=0).tolist()
        return (gpus, millicpus, memory_bytes)

    def touches(self, nodes_J: Ints) -> bool:
        """Whether a node of this claim is among `nodes_J`."""
        return bool(np.isin(self.nodes_K, nodes_J).any())


def stand(claim: Claim, ask: Ask) -> Standing:
    """The claim with its needs added up per node."""
    nodes_K, need_KR = needs_by_node(ask.gang, claim.assignment)
    return Standing(claim, ask, nodes_K, need_KR)


def blocked(room: Room, standing: Sequence[Standing]) -> tuple[Ints, Ints]:
    """Nodes (ascending) and the amounts on them that must stay free now, so that all these claims get their room when
    the jobs that they wait for have left: what is needed there less what those jobs hold there. An amount may be more
    than is free: then the claims cannot be met."""
    nodes_K = np.unique(np.concatenate([each.nodes_K for each in standing]))
    need_KR = np.zeros((len(nodes_K), 3), dtype=np.int64)
    for each in standing:
        need_KR[np.searchsorted(nodes_K, each.nodes_K)] += each.need_KR
    after = {job: each.claim.keeps.get(job) for each in standing for job in each.claim.after}
    need_KR -= held_on(room, [job for job, kept in after.items() if kept is None], nodes_K)
    for job, kept in after.items():
        if kept is not None:
            need_KR -= _given_up(room, job, kept, nodes_K)
    return nodes_K, need_KR.clip(min=0)


def _given_up(room: Room, job: str, kept: Assignment, nodes_K: Ints) -> Ints:
    """What a job still holds on nodes beyond what it keeps there, (K, 3)."""
    held_KR = held_on(room, [job], nodes_K)
    if job not in room.holdings:
        return held_KR
    kept_J, keeps_JR = needs_by_node(room.holdings[job].demand, kept)
    position_J = np.searchsorted(nodes_K, kept_J).clip(max=len(nodes_K) - 1)
    there_J = nodes_K[position_J] == kept_J
    held_KR[position_J[there_J]] -= keeps_JR[there_J]
    return held_KR.clip(min=0)


def fits_on(room: Room, nodes_K: Ints, need_KR: Ints) -> bool:
    """Whether this much is free right now on nodes that take new work."""
    return bool(room.open_N[nodes_K].all() and (need_KR <= room.free_NR[nodes_K]).all())
