"""Owns the complete search for small slices: every way to put the roles on nodes, up to symmetry, within a step budget.

Members of several sizes on nodes of several resources are a vector bin packing problem; the greedy packing solves
nearly every real gang, and what it misses is found here.
"""

from collections.abc import Iterator

import numpy as np

from reflux_placement.place.capacity import copies_per_node
from reflux_placement.place.check import constraint_broken
from reflux_placement.place.cost import peers
from reflux_placement.place.fill import Slice
from reflux_placement.place.pack import Question
from reflux_placement.place.role import RolePlan
from reflux_placement.topology import Ints


class Budget:
    """Steps that complete searches may still take, shared by all slices of one question."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def spend(self) -> bool:
        """Takes one step; False when none is left."""
        self.left -= 1
        return self.left >= 0


class Exhaustive:
    """The complete search of one question in one slice."""

    def __init__(self, question: Question, view: Slice, free_NR: Ints, budget: Budget) -> None:
        self._question = question
        self._view = view
        self._budget = budget
        self._left_NR = free_NR[view.first : view.last].copy()

    def first(self) -> dict[str, Ints] | None:
        """Ranks of every role of the first arrangement that keeps all demands; None when there is none in budget."""
        return next(self._roles(0, {}), None)

    def _roles(self, index: int, nodes: dict[str, Ints]) -> Iterator[dict[str, Ints]]:
        question = self._question
        if index == len(question.plans):
            if constraint_broken(question.topology, question.tree, question.gang, nodes) is None:
                yield nodes
            return
        plan = question.plans[index]
        row = np.array(plan.demand.each.row, dtype=np.int64)
        for count_N in self._spreads(plan, nodes):
            used = np.flatnonzero(count_N)
            taken = count_N[used, None] * row
            self._left_NR[used] -= taken
            yield from self._roles(
                index + 1, {**nodes, plan.demand.role: np.repeat(used + self._view.first, count_N[used])}
            )
            self._left_NR[used] += taken
            if self._budget.left < 0:
                return

    def _spreads(self, plan: RolePlan, nodes: dict[str, Ints]) -> Iterator[Ints]:
        copies_N = copies_per_node(self._left_NR, plan.demand.each)
        layer = self._question.tree.layers[min(plan.shape.required, self._view.top)]
        low, high = self._view.bounds(min(plan.shape.required, self._view.top))
        for part in range(low, high):
            if not layer.real_P[part]:
                continue
            first, last = int(layer.starts_P[part]) - self._view.first, int(layer.stops_P[part]) - self._view.first
            inside_N = np.zeros_like(copies_N)
            inside_N[first:last] = np.minimum(copies_N[first:last], plan.count)
            yield from _RoleSpreads(self._question, self._view, plan, inside_N, self._left_NR, self._budget).every(
                nodes
            )


class _RoleSpreads:
    """All ways to spread one role over the nodes of a slice, large pieces first."""

    def __init__(
        self, question: Question, view: Slice, plan: RolePlan, copies_N: Ints, left_NR: Ints, budget: Budget
    ) -> None:
        self._plan, self._budget = plan, budget
        self._question, self._view = question, view
        shape = plan.shape
        layers = question.tree.layers
        for level in plan.shape.special_levels:
            layer = layers[level]
            copies_N = np.where(layer.real_P[layer.part_N[view.first : view.last]], copies_N, 0)
        self._copies = copies_N.tolist()
        self._behind = np.append(np.cumsum(copies_N[::-1])[::-1], 0).tolist()
        self._segment = self._parts(shape.segment_level) if shape.segment_size > 1 else None
        self._capped = self._parts(shape.cap_level) if shape.cap else None
        rack = self._parts(min(1, len(layers) - 1))
        rows = left_NR.tolist()
        # Equal nodes are exchangeable, except where peers are nodes: then the order of ranks tells them apart.
        by_node = any(r.required and r.level == question.tree.layers[0].name for r in question.relations)
        self._twin = [
            not by_node
            and at > 0
            and rack[at] == rack[at - 1]
            and rows[at] == rows[at - 1]
            and self._copies[at] == self._copies[at - 1]
            for at in range(len(rows))
        ]

    def _parts(self, level: int) -> list[int]:
        return self._question.tree.layers[level].part_N[self._view.first : self._view.last].tolist()

    def every(self, nodes: dict[str, Ints]) -> Iterator[Ints]:
        self._targets = list(self._peer_targets(nodes))
        counts: list[int] = [0] * len(self._copies)
        yield from self._node(0, self._plan.count, counts, 0, 0)

    def _peer_targets(self, nodes: dict[str, Ints]) -> Iterator[tuple[list[int], dict[int, int]]]:
        """Per hard relation to a placed role: the part of each node, and the members wanted per part."""
        for relation in self._question.hard(self._plan.demand.role):
            if relation.near in nodes:
                level = self._question.topology.tightness(relation.level)
                near_M = nodes[relation.near][peers(self._plan.count, len(nodes[relation.near]))]
                part_M, wanted = np.unique(self._question.tree.layers[level].part_N[near_M], return_counts=True)
                yield self._parts(level), dict(zip(part_M.tolist(), wanted.tolist(), strict=True))

    def _node(self, at: int, left: int, counts: list[int], in_segment: int, in_capped: int) -> Iterator[Ints]:
        """`in_segment` and `in_capped`: members in the current parts of those levels so far."""
        if not self._budget.spend():
            return
        if at and self._segment is not None and (at == len(counts) or self._segment[at] != self._segment[at - 1]):
            if in_segment % self._plan.shape.segment_size:
                return
            in_segment = 0
        if at and self._capped is not None and at < len(counts) and self._capped[at] != self._capped[at - 1]:
            in_capped = 0
        if not self._on_target(at, counts):
            return
        if at == len(counts):
            if left == 0:
                yield np.array(counts, dtype=np.int64)
            return
        most = min(left, self._copies[at])
        if self._capped is not None:
            most = min(most, self._plan.shape.cap - in_capped)
        if self._twin[at]:
            most = min(most, counts[at - 1])
        for count in range(most, max(0, left - self._behind[at + 1]) - 1, -1):
            counts[at] = count
            yield from self._node(at + 1, left - count, counts, in_segment + count, in_capped + count)
        counts[at] = 0

    def _on_target(self, at: int, counts: list[int]) -> bool:
        """Whether every part that ends before node `at` holds exactly the members that its peers call for."""
        for parts, wanted in self._targets:
            if at and (at == len(counts) or parts[at] != parts[at - 1]):
                held = sum(counts[i] for i in range(at) if parts[i] == parts[at - 1])
                if held != wanted.get(parts[at - 1], 0):
                    return False
        return True
