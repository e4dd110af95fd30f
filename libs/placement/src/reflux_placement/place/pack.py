"""Owns how the roles of a gang are packed into one part of the tree together: role by role, related ones by peers.

Each role is tried compactly and beside the roles that it talks to; the cheaper of both stays. Where hard relations
leave a dependent role without room, the role that it follows gets less of that domain and both are tried again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from reflux_placement.gang import GangDemand, Relation
from reflux_placement.place.capacity import copies_per_node, shape_of
from reflux_placement.place.check import constraint_broken
from reflux_placement.place.cost import (
    DEFAULT_WEIGHTS,
    Prices,
    Weights,
    cost_of_nodes,
    flows_of,
    peers,
    prices_of,
    running_sums,
)
from reflux_placement.place.fill import Slice, keys_of
from reflux_placement.place.role import RolePlan, fill_wants, place_alone, place_role, plan_of
from reflux_placement.place.tree import Tree, tree_of
from reflux_placement.topology import Ints, Topology

MAX_REPAIRS = 48


@dataclass(frozen=True, eq=False)
class Question:
    """A gang at fixed counts, prepared for a topology. Roles without members are left out of everything."""

    topology: Topology
    tree: Tree
    gang: GangDemand
    plans: tuple[RolePlan, ...]
    """In the order in which they are packed."""

    prices: Prices
    weights: Weights
    relations: tuple[Relation, ...]
    """Those between roles that have members."""

    bytes_by_pair: Mapping[tuple[str, str], float] = field(default_factory=dict)

    @property
    def need(self) -> Ints:
        """GPUs, thousandths of a CPU and bytes of all members."""
        return sum(
            (np.array(plan.demand.each.row, dtype=np.int64) * plan.count for plan in self.plans),
            start=np.zeros(3, dtype=np.int64),
        )

    def plan(self, role: str) -> RolePlan:
        """The plan of a role that has members."""
        return next(each for each in self.plans if each.demand.role == role)

    def followers(self, role: str, level: int) -> set[str]:
        """Roles that lie in the same domains of a level as a role, because they follow it or one that does."""
        found: set[str] = set()
        todo = [role]
        while todo:
            near = todo.pop()
            for relation in self.relations:
                inside = relation.level and relation.required and self.topology.tightness(relation.level) <= level
                if inside and relation.near == near and relation.role not in found | {role}:
                    found.add(relation.role)
                    todo.append(relation.role)
        return found

    def hard(self, role: str) -> list[Relation]:
        """Hard relations in which a role follows another one."""
        return [r for r in self.relations if r.role == role and r.level and r.required]


def prepare(
    topology: Topology, gang: GangDemand, counts: Mapping[str, int], weights: Weights = DEFAULT_WEIGHTS
) -> Question:
    """The question at given counts per role. Raises UnknownLevel."""
    present = [demand for demand in gang.roles if counts[demand.role]]
    names = {demand.role for demand in present}
    relations = tuple(r for r in gang.relations if r.role in names and r.near in names)
    plans: list[RolePlan] = []
    for demand in present:
        near = {r.level for r in relations if r.level and r.required and _all_inside(r, demand.role, counts)}
        shape = shape_of(topology, demand, tuple(sorted(topology.tightness(level) for level in near)))
        plans.append(plan_of(topology, demand, shape, counts[demand.role]))
    flows = flows_of(topology, tuple(present), relations, tuple(plan.count for plan in plans), weights)
    pairs = {
        (one.role, other.role): float(flows.bytes_RR[i, j])
        for i, one in enumerate(present)
        for j, other in enumerate(present)
    }
    prices = prices_of(topology, weights)
    return Question(topology, tree_of(topology), gang, _order(plans, relations), prices, weights, relations, pairs)


def _all_inside(relation: Relation, role: str, counts: Mapping[str, int]) -> bool:
    """Whether a relation puts every member of a role into a domain: all followers, and all that have a follower."""
    return role == relation.role or (role == relation.near and counts[relation.role] >= counts[role])


def _order(plans: list[RolePlan], relations: tuple[Relation, ...]) -> tuple[RolePlan, ...]:
    """Those with the fewest places first, and a role behind the ones that it must be near."""

    def key(plan: RolePlan) -> tuple[int, int, int, int]:
        return (
            plan.shape.required,
            -plan.shape.segment_size * plan.demand.each.gpus,
            -plan.demand.each.gpus,
            -plan.count,
        )

    leaders = {r.role: {o.near for o in relations if o.role == r.role and o.level and o.required} for r in relations}
    ordered: list[RolePlan] = []
    left = sorted(plans, key=key)
    while left:
        done = {plan.demand.role for plan in ordered}
        ready = [plan for plan in left if leaders.get(plan.demand.role, set()) <= done]
        chosen = (ready or left)[0]
        ordered.append(chosen)
        left.remove(chosen)
    return tuple(ordered)


def pull_of(question: Question, role: str, nodes: Mapping[str, Ints]) -> Ints:
    """How much traffic a member of a role would have with the members placed on every node, 0 .. 1000 [N]."""
    weight_N = np.zeros(question.topology.num_nodes)
    for other, ranks in nodes.items():
        rate = question.bytes_by_pair.get((role, other), 0.0)
        if rate and len(ranks):
            np.add.at(weight_N, ranks, rate / len(ranks))
    top = float(weight_N.max(initial=0.0))
    return np.round(weight_N / top * 1000).astype(np.int64) if top else np.zeros(len(weight_N), dtype=np.int64)


def leading(question: Question, view: Slice, role: str, nodes: Mapping[str, Ints]) -> Relation | None:
    """The tightest hard relation of a role to a placed one; none counts whose level is not below the slice's."""
    topology = question.topology
    found = [r for r in question.hard(role) if r.near in nodes and topology.tightness(r.level) < view.top]
    return min(found, key=lambda each: topology.tightness(each.level), default=None)


def wanted_by_peers(
    question: Question, view: Slice, plan: RolePlan, nodes: Mapping[str, Ints]
) -> tuple[int, Ints] | None:
    """The level of a role's leading relation, and the members that its peers call for in every part of the slice."""
    relation = leading(question, view, plan.demand.role, nodes)
    if relation is None:
        return None
    level = question.topology.tightness(relation.level)
    near_M = nodes[relation.near][peers(plan.count, len(nodes[relation.near]))]
    low, high = view.bounds(level)
    part_M = question.tree.layers[level].part_N[near_M] - low
    return level, np.bincount(part_M, minlength=high - low)


class Packer:
    """Packs one question into one slice."""

    def __init__(self, question: Question, view: Slice, free_NR: Ints) -> None:
        self._question = question
        self._view = view
        self._free_NR = free_NR[view.first : view.last]
        self._free_gpus_N = np.maximum(free_NR[:, 0], 0)
        self._running = running_sums(self._free_gpus_N)
        self._limits = self._joint_limits()

    def _joint_limits(self) -> dict[str, tuple[int, Ints]]:
        """For roles that others must be beside: members per part such that the sums leave room for the followers."""
        question, limits = self._question, {}
        for plan in question.plans:
            followers = [r for r in question.relations if r.near == plan.demand.role and r.level and r.required]
            inside = [r for r in followers if question.topology.tightness(r.level) < self._view.top]
            if not inside:
                continue
            level = max(question.topology.tightness(relation.level) for relation in inside)
            together = np.array(plan.demand.each.row, dtype=np.float64)
            for role in question.followers(plan.demand.role, level):
                follower = question.plan(role)
                together += np.array(follower.demand.each.row) * (follower.count / plan.count)
            layer = question.tree.layers[level]
            low, high = self._view.bounds(level)
            begin_P = layer.starts_P[low:high] - self._view.first
            sums_PR = np.add.reduceat(np.maximum(self._free_NR, 0), begin_P, axis=0)
            needed = together > 0
            fits_P = np.full(high - low, plan.count, dtype=np.int64)
            if needed.any():
                # Followers are whole members: one more may fit than their mean share says.
                ratio_P = (sums_PR[:, needed] / together[needed]).min(axis=1)
                fits_P = np.minimum(fits_P, np.floor(ratio_P + 1).astype(np.int64))
            limit_P = np.full(layer.num_parts, plan.count, dtype=np.int64)
            limit_P[low:high] = fits_P
            limits[plan.demand.role] = (level, limit_P)
        return limits

    def pack(self) -> dict[str, Ints] | None:
        """Node index of every rank per role (indices of the topology), or None when no arrangement was found."""
        hard = any(relation.level and relation.required for relation in self._question.relations)
        for _ in range(MAX_REPAIRS if hard else 1):
            nodes = self._attempt()
            if nodes is not None:
                return nodes
            if not self._tightened:
                return None
        return None

    def _attempt(self) -> dict[str, Ints] | None:
        self._tightened = False
        left_NR = self._free_NR.copy()
        nodes: dict[str, Ints] = {}
        for plan in self._question.plans:
            options = self._options(plan, left_NR, nodes)
            if not options:
                return None
            count_N = options[0] if len(options) == 1 else self._cheapest(plan, options, nodes)
            used = np.flatnonzero(count_N)
            left_NR[used] -= count_N[used, None] * np.array(plan.demand.each.row, dtype=np.int64)
            nodes[plan.demand.role] = np.repeat(used + self._view.first, count_N[used])
        question = self._question
        if question.relations and constraint_broken(question.topology, question.tree, question.gang, nodes):
            return None
        return nodes

    def _options(self, plan: RolePlan, left_NR: Ints, nodes: dict[str, Ints]) -> list[Ints]:
        copies_N = copies_per_node(left_NR, plan.demand.each)
        limit = self._limits.get(plan.demand.role)
        if limit is not None:
            plan = replace(plan, shape=replace(plan.shape, limit=limit))
        prefers = [None, *self._affinity(plan, nodes)]
        wanted = wanted_by_peers(self._question, self._view, plan, nodes)
        found: list[Ints] = []
        for prefer_N in prefers:
            keys = keys_of(self._view, np.maximum(left_NR[:, 0], 0), prefer_N)
            if wanted is None and prefer_N is None:
                count_N = place_alone(self._view, plan, left_NR)
            elif wanted is None:
                count_N = place_role(self._view, plan, copies_N, keys)
            else:
                count_N = fill_wants(self._view, plan, copies_N, keys, *wanted)
                if count_N is None:
                    self._tighten(plan, copies_N, *wanted, nodes)
            if count_N is None:
                break
            found.append(count_N)
        return found

    def _affinity(self, plan: RolePlan, nodes: dict[str, Ints]) -> list[Ints]:
        pull_N = pull_of(self._question, plan.demand.role, nodes)[self._view.first : self._view.last]
        return [pull_N] if pull_N.any() else []

    def _tighten(self, plan: RolePlan, copies_N: Ints, level: int, want_P: Ints, nodes: dict[str, Ints]) -> None:
        """Lowers how many members of the role that it follows may lie in the domains where this one does not fit."""
        starts_P = self._question.tree.layers[level].starts_P[slice(*self._view.bounds(level))] - self._view.first
        short_P = want_P > np.add.reduceat(copies_N, starts_P)
        near = self._question.plan(self._leader(plan.demand.role, level, nodes))
        near_M = nodes[near.demand.role]
        low, high = self._view.bounds(level)
        near_P = np.bincount(self._question.tree.layers[level].part_N[near_M] - low, minlength=high - low)
        if not short_P.any():
            short_P = want_P > 0
        step = near.shape.segment_size if near.shape.segment_level <= level else 1
        deficit_P = np.maximum(want_P - np.add.reduceat(copies_N, starts_P), 1)
        # A member of the near role that leaves makes room too: half of the shortfall at once, and at least one step.
        cut_P = np.maximum(deficit_P * near.count // (2 * plan.count), step)
        old = self._limits.get(near.demand.role)
        layer = self._question.tree.layers[level]
        limit_P = old[1].copy() if old is not None and old[0] == level else np.full(layer.num_parts, near.count)
        lowered_P = np.where(short_P, np.minimum(limit_P[low:high], np.maximum(near_P - cut_P, 0)), limit_P[low:high])
        self._tightened = bool((lowered_P < limit_P[low:high]).any())
        limit_P[low:high] = lowered_P
        self._limits[near.demand.role] = (level, limit_P)

    def _leader(self, role: str, level: int, nodes: dict[str, Ints]) -> str:
        """The role that decides how many of `role` lie in every part of a level."""
        seen = {role}
        while True:
            relation = leading(self._question, self._view, role, nodes)
            decided = relation is not None and self._question.topology.tightness(relation.level) <= level
            if relation is None or not decided or relation.near in seen:
                return role
            role = relation.near
            seen.add(role)

    def _cheapest(self, plan: RolePlan, options: list[Ints], nodes: dict[str, Ints]) -> Ints:
        """The option with the lowest cost of all roles placed so far."""
        question = self._question

        def price(count_N: Ints) -> float:
            used = np.flatnonzero(count_N)
            ranks = np.repeat(used + self._view.first, count_N[used])
            trial = {**nodes, plan.demand.role: ranks}
            return cost_of_nodes(
                question.topology,
                question.tree,
                question.gang,
                trial,
                self._free_gpus_N,
                question.prices,
                question.weights,
                self._running,
            ).total

        return min(options, key=price)
