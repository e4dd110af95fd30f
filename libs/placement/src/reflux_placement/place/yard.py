"""Owns the counts of small gangs per cell (one NVLink domain), what they cost, and whether a cell can hold them.

The local search moves members between cells only; which nodes of a cell they use follows from a best fit inside it.
"""

from math import inf

import numpy as np

from reflux_placement.gang import Relation
from reflux_placement.place.cells import Cells, Counts, Kept
from reflux_placement.place.cost import Floats, flows_of
from reflux_placement.place.pack import Question
from reflux_placement.place.role import RolePlan
from reflux_placement.topology import Ints

NODES_PER_STEP = 4
"""Packing this many nodes of a cell takes about as long as pricing counts whose cells are packed."""

PricedLevel = tuple[list[int], int, list[tuple[int, int, float]], float, list[int]]
"""Groups of the cells, their number, (a, b, seconds per pair that is together), price and free GPUs of the groups."""


class Yard:
    """R roles on K cells of one question; costs are those of `cost_of_nodes`, up to a constant."""

    def __init__(self, question: Question, free_NR: Ints, cells: list[int], kept: list[Kept]) -> None:
        self.question, self.plans, self.cells = question, question.plans, Cells(question, cells)
        self.fast = self.cells.fast
        self._rows = [free_NR[first:last].tolist() for first, last in self.cells.spans]
        self._packed: list[dict[tuple[int, ...], tuple[int, list[list[int]]] | None]] = [{} for _ in cells]
        self._needs = [plan.demand.each.row for plan in self.plans]
        self._levels = self._price_levels(free_NR)
        self._checks = self.cells.demands(kept)
        self._allowed: dict[Counts, bool] = {}
        self.work = 0.0
        """Steps spent on packing cells so far."""

        self.rates = self._rates()
        self._soft = [r for r in question.relations if r.level and not r.required]

    def room(self) -> tuple[Ints, Ints]:
        """Needs of a member [R, 3] and free amounts of every cell [K, 3]; closed nodes have none."""
        free_KR = [np.maximum(np.array(rows, dtype=np.int64), 0).sum(axis=0) for rows in self._rows]
        return np.array(self._needs, dtype=np.int64), np.array(free_KR)

    def _price_levels(self, free_NR: Ints) -> list[PricedLevel]:
        """Levels at which something is priced."""
        question = self.question
        roles = tuple(plan.demand for plan in self.plans)
        counts = tuple(plan.count for plan in self.plans)
        flows = flows_of(question.topology, roles, question.relations, counts, question.weights)
        found = []
        for level in range(self.fast, len(question.tree.layers) - 1):
            terms = []
            for a in range(len(roles)):
                for b in range(a, len(roles)):
                    rate = -question.prices.apart[level] * float(flows.bytes_RR[a, b]) * (1 if a == b else 2)
                    if a == b and flows.spread_R[a] == level:
                        rate += question.weights.spread_seconds
                    if rate:
                        terms.append((a, b, rate / (counts[a] * counts[b])))
            price = question.prices.fragment[level] if level else 0.0
            if terms or price:
                group_K = self.cells.groups(level)
                layer = question.tree.layers[level]
                free = [0] * (max(group_K) + 1)
                for (first, _), group in zip(self.cells.spans, group_K, strict=True):
                    part = int(layer.part_N[first])
                    free[group] = int(np.maximum(free_NR[layer.starts_P[part] : layer.stops_P[part], 0], 0).sum())
                found.append((group_K, len(free), terms, price, free))
        return found

    def _rates(self) -> list[tuple[Ints, Floats, float, Floats]]:
        """The priced levels as arrays: group of every cell, symmetric rates [R, R], price, free GPUs per group."""
        found = []
        for group_K, _, terms, price, free in self._levels:
            rate_RR = np.zeros((len(self.plans), len(self.plans)))
            for a, b, rate in terms:
                rate_RR[a, b] = rate_RR[b, a] = rate
            found.append((np.array(group_K), rate_RR, price, np.array(free, dtype=np.float64)))
        return found

    def allows(self, counts: Counts) -> bool:
        """Whether counts keep all demands on domains; they may still not fit."""
        known = self._allowed.get(counts)
        if known is None:
            known = self._allowed[counts] = all(check(counts) for check in self._checks)
        return known

    def price(self, counts: Counts) -> float:
        """Seconds up to a constant; inf when a demand is broken or a cell cannot hold its members."""
        if not self.allows(counts):
            return inf
        total = 0.0
        node_price = self.question.prices.fragment[0]
        for cell, held in enumerate(zip(*counts, strict=True)):
            packed = self._pack(cell, held)
            if packed is None:
                return inf
            total += node_price * packed[0]
        for group_K, num_groups, terms, price, free in self._levels:
            sums = []
            for row in counts:
                held = [0] * num_groups
                for group, count in zip(group_K, row, strict=True):
                    held[group] += count
                sums.append(held)
            for a, b, rate in terms:
                total += rate * sum(x * y for x, y in zip(sums[a], sums[b], strict=True))
            if price:
                total += price * sum(room for room, *held in zip(free, *sums, strict=True) if any(held))
        for relation in self._soft:
            total += self.question.weights.apart_seconds * self._share_apart(relation, counts)
        return total

    def _pack(self, cell: int, held: tuple[int, ...]) -> tuple[int, list[list[int]]] | None:
        """(free GPUs of touched nodes, members per role and node) by best fit, large members first; None if no fit."""
        memo = self._packed[cell]
        if held not in memo:
            self.work += len(self._rows[cell]) / NODES_PER_STEP
            memo[held] = self._best_fit(cell, held)
        return memo[held]

    def _best_fit(self, cell: int, held: tuple[int, ...]) -> tuple[int, list[list[int]]] | None:
        if not any(held):
            return 0, [[0] * len(self._rows[cell]) for _ in held]
        best: tuple[int, list[list[int]]] | None = None
        order = sorted(range(len(held)), key=lambda role: self._needs[role], reverse=True)
        for touched_first in (True, False):
            found = self._fit(cell, held, order, touched_first)
            if found is not None and (best is None or found[0] < best[0]):
                best = found
        return best

    def _fit(
        self, cell: int, held: tuple[int, ...], order: list[int], touched_first: bool
    ) -> tuple[int, list[list[int]]] | None:
        rows = [list(row) for row in self._rows[cell]]
        taken = [[0] * len(rows) for _ in held]
        touched = [False] * len(rows)
        for role in order:
            options = []
            for node, row in enumerate(rows):
                copies = self._copies(role, row, held[role])
                if copies:
                    options.append((copies, row[0], row[1], node))
            chosen = self._choose(options, held[role], touched if touched_first else [])
            if chosen is None:
                return None
            for node, copies in chosen:
                rows[node] = [have - copies * each for have, each in zip(rows[node], self._needs[role], strict=True)]
                taken[role][node] = copies
                touched[node] = True
        return sum(max(self._rows[cell][node][0], 0) for node in range(len(rows)) if touched[node]), taken

    @staticmethod
    def _choose(
        options: list[tuple[int, int, int, int]], left: int, touched: list[bool]
    ) -> list[tuple[int, int]] | None:
        """(node, members) of `left` members: nodes in use first, large ones first, the last piece where it fits best.

        Options are (members that fit, free GPUs, free CPUs, node).
        """
        chosen: list[tuple[int, int]] = []
        for in_use in (True, False) if touched else (False,):
            pool = [each for each in options if not touched or touched[each[3]] == in_use]
            pool.sort(key=lambda each: (-each[0], each[2], each[3]))
            while pool and left:
                full = [each for each in pool if each[0] >= left]
                best = min(full, key=lambda each: each[1:]) if full else pool.pop(0)
                chosen.append((best[3], min(best[0], left)))
                left -= chosen[-1][1]
        return None if left else chosen

    def _copies(self, role: int, row: list[int], left: int) -> int:
        """Members that a node takes of those left, under the role's demands on single nodes."""
        if row[0] < 0:
            return 0
        shape = self.plans[role].shape
        copies = left
        for have, each in zip(row, self._needs[role], strict=True):
            if each:
                copies = min(copies, have // each)
        if shape.cap and shape.cap_level < self.fast:
            copies = min(copies, shape.cap)
        if shape.segment_size > 1 and shape.segment_level < self.fast:
            copies -= copies % shape.segment_size
        return copies if copies == left or shape.required >= self.fast else 0

    def _share_apart(self, relation: Relation, counts: Counts) -> float:
        names = [plan.demand.role for plan in self.plans]
        position = max(self.question.topology.tightness(relation.level), self.fast)
        group_K, real_K = self.cells.groups(position), self.cells.real(position)
        mine = [
            group_K[cell] if real_K[cell] else -1
            for cell, n in enumerate(counts[names.index(relation.role)])
            for _ in range(n)
        ]
        theirs = [group_K[cell] for cell, n in enumerate(counts[names.index(relation.near)]) for _ in range(n)]
        apart = sum(each != theirs[i * len(theirs) // len(mine)] for i, each in enumerate(mine))
        return apart / len(mine)

    def counts_of(self, nodes: dict[str, Ints]) -> Counts:
        """Members per role and cell of ranks on nodes."""
        part_N = self.question.tree.layers[self.fast].part_N
        found = []
        for plan in self.plans:
            parts = part_N[nodes[plan.demand.role]]
            found.append(tuple(int((parts == cell).sum()) for cell in self.cells.parts))
        return tuple(found)

    def nodes_of(self, counts: Counts) -> dict[str, Ints]:
        """Ranks on nodes; the counts must have a finite price."""
        count_RN = np.zeros((len(self.plans), self.question.topology.num_nodes), dtype=np.int64)
        for cell, held in enumerate(zip(*counts, strict=True)):
            packed = self._pack(cell, held)
            assert packed is not None, "counts with a price fit"
            first, last = self.cells.spans[cell]
            count_RN[:, first:last] = packed[1]
        every = np.arange(self.question.topology.num_nodes)
        return {plan.demand.role: np.repeat(every, row) for plan, row in zip(self.plans, count_RN, strict=True)}

    def unit(self, plan: RolePlan) -> int:
        """Members that move together between cells."""
        return plan.shape.segment_size if plan.shape.segment_level == self.fast else 1
