"""Owns the local search that makes the packing of a small gang cheaper, within a fixed number of prices looked at.

The moves that promise most are priced first and the first improvement is taken; when none is left the best counts are
disturbed by a few moves of a fixed pseudo-random sequence and improved again.
"""

import itertools
import math
import random
from collections.abc import Iterator

import numpy as np

from reflux_placement.place.cells import Counts, Kept
from reflux_placement.place.check import constraint_broken
from reflux_placement.place.moves import Move, Moves
from reflux_placement.place.pack import Question
from reflux_placement.place.yard import Yard
from reflux_placement.topology import Ints

MAX_CELLS = 12
MAX_REPAIRS = 8
"""Moves of one round that break a relation and are mended by a move of a bound role."""

REPAIR_CHOICES = 6
KICKS = 4
PATIENCE = 32
"""Disturbances in a row without a gain after which the search ends."""

RANKED_MOVES = 160
TRIED_MOVES = 24
"""Moves of one round that are priced before the counts pass for a local best; the others break some demand."""

TINY = 1e-12


def improve(question: Question, free_NR: Ints, starts: list[dict[str, Ints]], steps: int) -> dict[str, Ints]:
    """The cheapest arrangement found from the given ones, the first of which is the cheapest so far."""
    cells = _cells(question, free_NR, starts)
    by_node = any(r.level == question.topology.levels[0] for r in question.relations if r.required)
    if len(cells) < 2 or by_node:
        return starts[0]
    yard = Yard(question, free_NR, cells, _kept(question, starts[0]))
    search = _Search(yard, steps)
    best: tuple[float, Counts] | None = None
    for nodes in starts:
        counts = yard.counts_of(nodes)
        if sum(map(sum, counts)) < sum(plan.count for plan in question.plans):
            continue
        found = search.descend(counts, yard.price(counts))
        best = found if best is None or found[0] < best[0] - TINY else best
    if best is None or best[0] == math.inf:
        return starts[0]
    best = search.disturb(best)
    nodes = yard.nodes_of(best[1])
    assert constraint_broken(question.topology, question.tree, question.gang, nodes) is None, "a yard keeps all demands"
    return nodes


def _kept(question: Question, nodes: dict[str, Ints]) -> list[Kept]:
    """Preferred levels, as far as the arrangement reaches them: they come before the cost."""
    topology, gang = question.topology, question.gang
    names = [plan.demand.role for plan in question.plans]
    wishes = [(list(range(len(names))), gang.preferred_level)]
    wishes += [([index], plan.demand.preferred_level) for index, plan in enumerate(question.plans)]
    kept: list[Kept] = []
    for roles, level in wishes:
        if level:
            ranks = np.concatenate([nodes[names[role]] for role in roles])
            for position in range(topology.tightness(level), len(topology.levels)):
                layer = question.tree.layers[position]
                parts = np.unique(layer.part_N[ranks])
                if len(parts) == 1 and layer.real_P[parts[0]]:
                    kept.append((roles, position))
                    break
    return kept


def _cells(question: Question, free_NR: Ints, starts: list[dict[str, Ints]]) -> list[int]:
    """Cells in use by the cheapest arrangement, then those of the others, then those with most room beside them."""
    layer = question.tree.layers[question.prices.fast]
    found: list[int] = []
    for nodes in starts:
        for part in np.unique(np.concatenate([layer.part_N[ranks] for ranks in nodes.values()])).tolist():
            if part not in found:
                found.append(part)
    room_P = np.add.reduceat(np.maximum(free_NR[:, 0], 0), layer.starts_P)
    parents = {int(layer.parent_P[part]) for part in found}
    others = [part for part in np.argsort(-room_P, kind="stable").tolist() if part not in found and room_P[part] > 0]
    others.sort(key=lambda part: int(layer.parent_P[part]) not in parents)
    return sorted((found + others)[:MAX_CELLS])


class _Search:
    def __init__(self, yard: Yard, steps: int) -> None:
        self._yard, self._steps, self._rounds = yard, steps, 0
        self._random = random.Random(0)
        self._bound = self._components()
        self._moves = Moves(yard, self._bound, RANKED_MOVES)
        self._seen: dict[Counts, float] = {}

    def _components(self) -> list[dict[int, int]]:
        """Roles bound by hard relations, with the members of each that make one share."""
        names = [plan.demand.role for plan in self._yard.plans]
        group = list(range(len(names)))
        for relation in self._yard.question.relations:
            if relation.level and relation.required:
                one, other = group[names.index(relation.role)], group[names.index(relation.near)]
                group = [one if each == other else each for each in group]
        found = []
        for root in sorted(set(group)):
            roles = [role for role, each in enumerate(group) if each == root]
            if len(roles) > 1:
                counts = [self._yard.plans[role].count for role in roles]
                found.append(dict(zip(roles, (n // math.gcd(*counts) for n in counts), strict=True)))
        return found

    def price(self, counts: Counts) -> float:
        """The price of counts, looked at once."""
        known = self._seen.get(counts)
        if known is None:
            known = self._seen[counts] = self._yard.price(counts)
        return known

    @property
    def _spent(self) -> bool:
        """Whether no step is left: prices, cells packed for them, and rankings of moves together."""
        return len(self._seen) + self._rounds + self._yard.work + self._moves.work > self._steps

    def descend(self, counts: Counts, price: float, locked: frozenset[int] = frozenset()) -> tuple[float, Counts]:
        """Improves until none of the promising moves of roles that are not locked helps or no step is left."""
        better = True
        while better and not self._spent:
            better = False
            for trial in self._trials(counts, locked):
                found = self.price(trial)
                if found < price - TINY:
                    counts, price, better = trial, found, True
                    break
                if self._spent:
                    break
        return price, counts

    def _trials(self, counts: Counts, locked: frozenset[int]) -> Iterator[Counts]:
        """Counts after the moves that promise most, those that break a relation mended."""
        yield from self._mended(counts, self._moves.ranked(counts), locked)
        yield from self._mended(counts, self._moves.chained(counts), locked)

    def _mended(self, counts: Counts, moves: list[Move], locked: frozenset[int]) -> Iterator[Counts]:
        tried, repairs = 0, MAX_REPAIRS
        for move in moves:
            trial = None if any(role in locked for role, *_ in move) else _moved(counts, move)
            if trial is None:
                continue
            if self._yard.allows(trial):
                tried += 1
                yield trial
            elif repairs:
                repairs -= 1
                yield from itertools.islice(self._repaired(trial, move), REPAIR_CHOICES)
            if tried == TRIED_MOVES:
                return

    def _repaired(self, counts: Counts, move: Move) -> Iterator[Counts]:
        """Counts that broke a relation, after a move of a bound role that mends it."""
        moved = {role for role, *_ in move}
        for shares in self._bound:
            if moved & shares.keys():
                for role in shares.keys() - moved:
                    unit = self._yard.unit(self._yard.plans[role])
                    for a, held in enumerate(counts[role]):
                        for b in range(len(counts[role])):
                            sizes = {unit, shares[role] * move[0][3] // shares.get(move[0][0], 1)} if a != b else ()
                            for members in sorted(sizes):
                                trial = _moved(counts, ((role, a, b, members),)) if 0 < members <= held else None
                                if trial is not None and self._yard.allows(trial):
                                    yield trial

    def disturb(self, best: tuple[float, Counts]) -> tuple[float, Counts]:
        """Restarts from disturbed counts while steps are left."""
        failures = 0
        while not self._spent and failures < PATIENCE:
            counts, price = best[1], best[0]
            self._rounds += 1
            locked: set[int] = set()
            for _ in range(1 + failures % KICKS):
                role, trial = self._kicked(counts)
                if self.price(trial) < math.inf:
                    counts, price = trial, self._seen[trial]
                    locked.add(role)
            # The others follow first: else the first step down would be the way back.
            price, counts = self.descend(counts, price, frozenset(locked))
            found = self.descend(counts, price)
            failures = 0 if found[0] < best[0] - TINY else failures + 1
            best = found if not failures else best
        return best

    def _kicked(self, counts: Counts) -> tuple[int, Counts]:
        """A role and the counts after a random move of it."""
        role = self._random.randrange(len(counts))
        a = self._random.choice([cell for cell, held in enumerate(counts[role]) if held])
        b = self._random.randrange(len(self._yard.cells.parts))
        unit, held = self._yard.unit(self._yard.plans[role]), counts[role][a]
        members = self._random.choice([held, min(unit, held)])
        bound = next((each for each in self._bound if role in each), None)
        shares = bound if bound and self._random.randrange(2) else {role: members}
        return role, _moved(counts, tuple((each, a, b, held) for each, held in shares.items())) or counts


def _moved(counts: Counts, move: Move) -> Counts | None:
    """The counts after a move; None when a cell has too few members for it."""
    rows = [list(row) for row in counts]
    for role, a, b, members in move:
        rows[role][a] -= members
        rows[role][b] += members
    if any(each < 0 for row in rows for each in row):
        return None
    return tuple(map(tuple, rows))
