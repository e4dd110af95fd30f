"""Owns which cells (NVLink domains) of a local search lie together at each level, and the demands on counts in them."""

from collections.abc import Callable, Collection

from reflux_placement.place.pack import Question

Counts = tuple[tuple[int, ...], ...]
"""Members per role and cell [R][K]."""

Check = Callable[[Counts], bool]

Kept = tuple[list[int], int]
"""Roles that stay inside one domain of a level."""


class Cells:
    """K parts of the fast level."""

    def __init__(self, question: Question, cells: list[int]) -> None:
        self._question = question
        self.fast = question.prices.fast
        self.parts = cells
        layer = question.tree.layers[self.fast]
        self.spans = [(int(layer.starts_P[cell]), int(layer.stops_P[cell])) for cell in cells]

    def groups(self, level: int) -> list[int]:
        """The part of a level that each cell lies in, numbered from 0."""
        layer = self._question.tree.layers[level]
        part_K = [int(layer.part_N[first]) for first, _ in self.spans]
        seen: dict[int, int] = {}
        return [seen.setdefault(part, len(seen)) for part in part_K]

    def real(self, level: int) -> list[bool]:
        """Whether each cell lies in a domain of a level."""
        layer = self._question.tree.layers[level]
        return [bool(layer.real_P[layer.part_N[first]]) for first, _ in self.spans]

    def demands(self, kept: list[Kept]) -> list[Check]:
        """All demands of the question on domains of the fast level and above, and the roles that stay together."""
        checks = [self._one_group(*each) for each in kept if each[1] >= self.fast]
        top = self._question.topology.tightness(self._question.gang.required_level)
        if top >= self.fast:
            checks.append(self._one_group(list(range(len(self._question.plans))), top))
        for index, plan in enumerate(self._question.plans):
            shape = plan.shape
            if shape.required >= self.fast:
                checks.append(self._one_group([index], shape.required))
            else:
                checks.append(self._one_group([index], self.fast))
            if shape.segment_size > 1:
                checks.append(self._multiples(index, max(shape.segment_level, self.fast), shape.segment_size))
            if shape.cap and shape.cap_level >= self.fast:
                checks.append(self._bounded(index, shape.cap_level, shape.cap))
        names = [plan.demand.role for plan in self._question.plans]
        for relation in self._question.relations:
            if relation.level and relation.required:
                checks.append(self._beside(names.index(relation.role), names.index(relation.near), relation.level))
        return checks

    def _one_group(self, roles: list[int], level: int) -> Check:
        group_K, real_K = self.groups(level), self.real(level)

        def check(counts: Counts) -> bool:
            used = {
                group_K[cell] if real_K[cell] else -1
                for role in roles
                for cell, count in enumerate(counts[role])
                if count
            }
            return len(used) <= 1 and -1 not in used

        return check

    def _multiples(self, role: int, level: int, size: int) -> Check:
        return self._sums(role, level, lambda held: not any(each % size for each in held))

    def _bounded(self, role: int, level: int, most: int) -> Check:
        return self._sums(role, level, lambda held: max(held) <= most)

    def _sums(self, role: int, level: int, holds: Callable[[Collection[int]], bool]) -> Check:
        """Whether a role lies in real domains of a level only, and what is demanded of its members in each holds."""
        group_K, real_K = self.groups(level), self.real(level)

        def check(counts: Counts) -> bool:
            held: dict[int, int] = {}
            for cell, count in enumerate(counts[role]):
                if count and not real_K[cell]:
                    return False
                held[group_K[cell]] = held.get(group_K[cell], 0) + count
            return holds(held.values())

        return check

    def _beside(self, role: int, near: int, level: str) -> Check:
        position = self._question.topology.tightness(level)
        group_K, real_K = self.groups(position), self.real(position)

        def check(counts: Counts) -> bool:
            mine = [group_K[cell] if real_K[cell] else -1 for cell, n in enumerate(counts[role]) for _ in range(n)]
            theirs = [group_K[cell] for cell, n in enumerate(counts[near]) for _ in range(n)]
            return all(each == theirs[i * len(theirs) // len(mine)] for i, each in enumerate(mine))

        return check
