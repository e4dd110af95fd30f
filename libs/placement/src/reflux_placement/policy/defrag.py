"""Owns defragmentation: which running jobs move, at their checkpoints, so that a gang fits; or why none can.

Order of a cycle: after backfill, for the first waiting ask whose misfit is `fragmented`. A `Plan` becomes `Migrate`;
its moves are executed in order, each into room that is free then, and afterwards `find_place` succeeds.

The bound (`defrag_bound`) is asked first, because it is cheap; then the search (`defrag_trial`). The search is a
heuristic: `Undecided` says honestly that neither a plan nor a proof was found.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from reflux_placement.gang import Assignment, GangDemand
from reflux_placement.place.check import broken
from reflux_placement.place.search import find_place
from reflux_placement.policy.defrag_bound import Proof, prove
from reflux_placement.policy.defrag_trial import Limits, Trial
from reflux_placement.policy.defrag_yard import Yard
from reflux_placement.policy.view import Live
from reflux_placement.room import Room
from reflux_placement.topology import CLUSTER

DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Moves in the order of their execution, and where the gang goes afterwards. Executed on a copy before it is
    handed out."""

    moves: tuple[tuple[str, Assignment], ...]
    assignment: Assignment
    moved_gpus: int
    """GPUs of the members that change their node."""

    moved_members: int
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Undecided:
    """Neither a plan nor a proof was found."""

    sentence: str


def plan(
    room: Room, live: Mapping[str, Live], gang: GangDemand, limits: Limits = DEFAULT_LIMITS
) -> Plan | Proof | Undecided:
    """A migration after which the gang fits, a proof that there is none, or the admission that neither was found.

    Only jobs with `Live.movable` move, on open nodes; every constraint of a moved job holds before and after each move.
    `room` is left as it is.
    """
    found = find_place(room, gang)
    if isinstance(found, Assignment):
        return Plan(moves=(), assignment=found, moved_gpus=0, moved_members=0, sentence="it fits without a move")
    proof = prove(room, live, gang)
    if proof is not None:
        return proof
    attempts = limits.attempts
    for first, last in _scopes(room, gang, limits):
        trial = Trial(room, live, replace(limits, attempts=attempts))
        if trial.clear(gang, first, last):
            done = _finish(room, gang, trial.yard, limits)
            if done is not None:
                return done
        attempts -= trial.attempts
        if attempts <= 0:
            break
    return Undecided(sentence=f"no migration was found and none was ruled out: {found.sentence}")


def _scopes(room: Room, gang: GangDemand, limits: Limits) -> list[tuple[int, int]]:
    """Node ranges of the gang's required level, the one with most free GPUs first."""
    topology = room.topology
    if gang.required_level == CLUSTER:
        return [(0, topology.num_nodes)]
    usable_N = np.maximum(room.usable_NR()[:, 0], 0)
    free_D = topology.sums(usable_N, topology.tightness(gang.required_level))
    domains = topology.domains(gang.required_level)
    order = np.argsort(-free_D, kind="stable")[: limits.scopes].tolist()
    return [(domains[index].start, domains[index].stop) for index in order]


def _finish(room: Room, gang: GangDemand, yard: Yard, limits: Limits) -> Plan | None:
    """The journal as a plan that was executed on a copy, every job moved once if that can be."""
    steps = [(move.job, move.after.assignment) for move in yard.journal]
    last = {job: index for index, (job, _) in enumerate(steps)}
    once = [step for index, step in enumerate(steps) if last[step[0]] == index]
    for moves in (once, steps):
        assignment = execute(room, gang, moves)
        if assignment is not None:
            return _plan(room, gang, _polished(room, gang, moves, limits))
    return None


def _polished(
    room: Room, gang: GangDemand, moves: list[tuple[str, Assignment]], limits: Limits
) -> list[tuple[str, Assignment]]:
    """The plan without the jobs that need not move after all."""
    if len(moves) > limits.polish:
        return moves
    for job, _ in list(moves):
        without = [move for move in moves if move[0] != job]
        if execute(room, gang, without) is not None:
            moves = without
    return moves


def _plan(room: Room, gang: GangDemand, moves: list[tuple[str, Assignment]]) -> Plan:
    assignment = execute(room, gang, moves)
    assert assignment is not None
    gpus = members = 0
    for job, after in dict(moves).items():
        holding = room.holdings[job]
        for role, ranks in after.nodes.items():
            moved = int((ranks != holding.assignment.nodes[role]).sum())
            members += moved
            gpus += moved * holding.demand.demand(role).each.gpus
    jobs = len({job for job, _ in moves})
    return Plan(
        moves=tuple(moves), assignment=assignment, moved_gpus=gpus, moved_members=members,
        sentence=f"{jobs} jobs move {members} members ({gpus} GPUs) and make room",
    )  # fmt: skip


def execute(room: Room, gang: GangDemand, moves: Sequence[tuple[str, Assignment]]) -> Assignment | None:
    """Executes moves in order on a copy: every one must fit when its turn comes, keep all constraints of its job and
    go to open nodes. Where the gang fits afterwards; None when a move is not valid or the gang does not fit."""
    after = room.copy()
    for job, assignment in moves:
        before = after.holdings.get(job)
        if before is None:
            return None
        after.release(job)
        counts = {role: len(ranks) for role, ranks in before.assignment.nodes.items()}
        if broken(room.topology, after.free_NR, before.demand, assignment, counts) is not None:
            return None
        stays = before.assignment.used_nodes()
        if not room.open_N[np.setdiff1d(assignment.used_nodes(), stays)].all():
            return None
        after.take(job, before.demand, assignment, keep=before)
    found = find_place(after, gang)
    return found if isinstance(found, Assignment) else None
