"""Owns the search for the reason of a misfit: a member's size, then each role, then the sum, then the arrangement."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from reflux_placement.gang import GangDemand, RoleDemand
from reflux_placement.place.capacity import Shape, copies_per_node
from reflux_placement.place.fill import Slice
from reflux_placement.place.misfit import RESOURCES, Constraint, Holder, Misfit
from reflux_placement.place.pack import Question
from reflux_placement.place.role import RolePlan, capacity_in
from reflux_placement.room import Room
from reflux_placement.topology import Ints

MAX_SHRUNK_ROLES = 4
"""The hint on what would fit is not worth more than a few searches."""


def diagnose(question: Question, free_NR: Ints) -> Misfit:
    """The first reason why a gang that was not placed does not fit, in the domain that comes closest."""
    if (free_NR[:, 0] < 0).all():
        return Misfit(role="", constraint="nodes", level="cluster", resource="nodes", needed=1, available=0)
    room_NR = np.maximum(free_NR, 0)
    required = question.topology.tightness(question.gang.required_level)
    for plan in question.plans:
        found = _too_large(question, plan, room_NR)
        if found is not None:
            return found
    for plan in question.plans:
        found = _role_short(question, plan, room_NR, min(required, plan.shape.required))
        if found is not None:
            return found
    return _sum_short(question, room_NR, required) or _shape_short(question, room_NR, required)


def _too_large(question: Question, plan: RolePlan, room_NR: Ints) -> Misfit | None:
    """A member that no node holds."""
    if copies_per_node(room_NR, plan.demand.each).any():
        return None
    row = np.array(plan.demand.each.row, dtype=np.float64)
    lack_NR = np.where(row > 0, (row - room_NR) / np.where(row > 0, row, 1), 0.0)
    node = int(lack_NR.max(axis=1).argmin())
    column = int(lack_NR[node].argmax())
    return made(question, plan, "size", 0, node, column, plan.demand.each.row[column], int(room_NR[node, column]))


def _role_short(question: Question, plan: RolePlan, room_NR: Ints, level: int) -> Misfit | None:
    """A role that no domain of its required level holds, with the constraint that makes the difference."""
    view = Slice(question.tree, len(question.topology.levels) - 1, 0, question.topology.num_nodes)
    copies_N = copies_per_node(room_NR, plan.demand.each)
    layer = question.tree.layers[level]
    shape = plan.shape
    trials: list[tuple[Constraint, Shape]] = [
        ("count", Shape(required=shape.required)),
        ("segments", replace(shape, cap=0, near_levels=())),
        ("spread", replace(shape, near_levels=())),
        ("relation", shape),
    ]
    for constraint, trial in trials:
        trial_plan = replace(plan, shape=trial)
        members_P = np.where(layer.real_P, capacity_in(view, trial_plan, copies_N).members(level), -1)
        part = int(members_P.argmax())
        if int(members_P[part]) < plan.count:
            column = _column(plan.demand, room_NR[layer.starts_P[part] : layer.stops_P[part]])
            each = plan.demand.each.row[column]
            fits = max(0, int(members_P[part]))
            found = made(question, plan, constraint, level, part, column, plan.count * each, fits * each)
            fragmented = _sum_of(room_NR, layer.starts_P[part], layer.stops_P[part], column) >= found.needed
            return replace(found, fragmented=fragmented)
    return None


def _column(demand: RoleDemand, room_NR: Ints) -> int:
    """The scarcest resource of a role in some nodes: the one that limits copies most."""
    row = demand.each.row
    asked = [column for column in range(3) if row[column]]
    return min(asked, key=lambda column: int((room_NR[:, column] // row[column]).sum()), default=0)


def _sum_of(room_NR: Ints, first: int, last: int, column: int) -> int:
    return int(room_NR[first:last, column].sum())


def _sum_short(question: Question, room_NR: Ints, level: int) -> Misfit | None:
    """The sum of all roles is more than any domain of the gang's level has."""
    layer = question.tree.layers[level]
    need = question.need
    sums_PR = np.add.reduceat(room_NR, layer.starts_P, axis=0)
    lack_PR = np.where(need > 0, (need - sums_PR) / np.where(need > 0, need, 1), 0.0)
    worst_P = np.where(layer.real_P, lack_PR.max(axis=1), np.inf)
    part = int(worst_P.argmin())
    if worst_P[part] <= 0:
        return None
    column = int(lack_PR[part].argmax())
    return made(question, None, "sum", level, part, column, int(need[column]), int(sums_PR[part, column]))


def _shape_short(question: Question, room_NR: Ints, level: int) -> Misfit:
    """Every role fits alone and the sum would do; the roles get into each other's way."""
    layer = question.tree.layers[level]
    sums_P = np.where(layer.real_P, np.add.reduceat(room_NR[:, 0], layer.starts_P), -1)
    part = int(sums_P.argmax())
    plan = max(question.plans, key=lambda each: (each.demand.each.gpus, each.demand.each.row))
    column = _column(plan.demand, room_NR[layer.starts_P[part] : layer.stops_P[part]])
    each = plan.demand.each.row[column]
    # At least one member stays outside; how many more depends on which role goes first.
    found = made(question, plan, "shape", level, part, column, plan.count * each, (plan.count - 1) * each)
    return replace(found, fragmented=True)


def made(
    question: Question, plan: RolePlan | None, constraint: Constraint, level: int, part: int, column: int, needed: int,
    available: int,
) -> Misfit:  # fmt: skip
    """A misfit about one part of the tree."""
    topology, layer = question.topology, question.tree.layers[level]
    first, last = int(layer.starts_P[part]), int(layer.stops_P[part])
    domain = int(layer.domain_P[part])
    return Misfit(
        role=plan.demand.role if plan else "",
        constraint=constraint,
        level=topology.levels[level],
        resource=RESOURCES[column],
        needed=needed,
        available=available,
        capacity=int(topology.capacity_NR[first:last, column].sum()),
        domain=topology.domains_by_level[level][domain].label if domain >= 0 else "",
        segment_size=plan.demand.segment_size if plan else 0,
        segment_level=plan.demand.segment_level if plan else "",
        spread_level=plan.demand.spread_level if plan else "",
        bound=plan.demand.max_per_domain if plan else 0,
    )


def with_holders(misfit: Misfit, room: Room) -> Misfit:
    """The misfit with the jobs that hold the missing resource in its domain, the largest first."""
    topology = room.topology
    if misfit.resource not in RESOURCES:
        return misfit
    column = RESOURCES.index(misfit.resource)
    spans = [(d.start, d.stop) for d in topology.domains(misfit.level) if d.label == misfit.domain]
    first, last = spans[0] if spans else (0, topology.num_nodes)
    holders: list[Holder] = []
    for job, holding in room.holdings.items():
        held = 0
        for demand in holding.demand.roles:
            ranks = holding.assignment.nodes.get(demand.role)
            if ranks is not None and len(ranks):
                held += demand.each.row[column] * int(((ranks >= first) & (ranks < last)).sum())
        if held:
            holders.append(Holder(job, held))
    holders.sort(key=lambda holder: (-holder.amount, holder.job))
    return replace(misfit, holders=tuple(holders))


def largest_that_fits(
    misfit: Misfit, gang: GangDemand, counts: Mapping[str, int], fits: Callable[[Mapping[str, int]], bool]
) -> Misfit:
    """The misfit of an empty cluster, with the largest count of one role that fits beside the others as asked."""
    misfit = replace(misfit, ever=True)
    order = sorted(gang.roles, key=lambda demand: -counts[demand.role] * max(1, demand.each.gpus))
    for demand in order[:MAX_SHRUNK_ROLES]:
        unit = max(1, demand.segment_size)
        low, high = 0, counts[demand.role] // unit
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits({**counts, demand.role: middle * unit}) else (low, middle)
        if low:
            return replace(misfit, fitting_role=demand.role, fitting_count=low * unit, asked_count=counts[demand.role])
    return misfit
