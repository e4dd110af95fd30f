"""Packs the members of a gang into one domain: greedy for locality, then an exact search with a step budget.

Members of several sizes in bins of several dimensions are a vector bin packing problem; the greedy descent solves a
single role exactly and nearly every real gang. What it misses, the search finds on small domains.
"""

from collections.abc import Iterator, Sequence

from reflux_scheduler.gang import GangDemand, RoleDemand
from reflux_scheduler.topology import NOTHING, UNAVAILABLE, Domain, Resources, Topology, tightness, total

Counts = dict[int, int]
"""Members of one role per node index."""

MAX_SEARCH_NODES = 64
MAX_SEARCH_STEPS = 20_000
"""About 50 ms; a gang that needs more is treated as one that does not fit."""


class Budget:
    """Steps that the exact search may still take, shared by all domains of one question."""

    def __init__(self, steps: int = MAX_SEARCH_STEPS) -> None:
        self._steps = steps

    @property
    def left(self) -> bool:
        """Whether a search may begin."""
        return self._steps > 0

    def spend(self) -> None:
        """Takes one step. Raises OutOfSteps when none is left."""
        self._steps -= 1
        if self._steps < 0:
            raise OutOfSteps


class OutOfSteps(Exception):
    """The exact search was given up."""


def could_hold(domain: Domain, gang: GangDemand, free: Sequence[Resources]) -> bool:
    """A cheap necessary condition: sums over the domain, and every role on its own."""
    if not gang.total().fits_in(total(free, domain)):
        return False
    return all(capacity(domain, demand, free) >= demand.count for demand in gang.roles)


def capacity(domain: Domain, demand: RoleDemand, free: Sequence[Resources]) -> int:
    """How many members of a role the free room of a domain holds."""
    return sum(demand.each.copies_in(free[index]) for index in domain.indices)


def pack(
    topology: Topology, domain: Domain, gang: GangDemand, free: Sequence[Resources], budget: Budget
) -> dict[str, Counts] | None:
    """Members per role and node index inside `domain`, or None when no arrangement was found."""
    room = list(free)
    # The narrow roles and the big members first: they have the fewest places to go.
    order = sorted(gang.roles, key=lambda demand: (tightness(demand.required_level), _size_key(demand.each)))
    packed = _Packer(topology, domain, room, None).place(order)
    usable = sum(1 for index in domain.indices if free[index] not in (NOTHING, UNAVAILABLE))
    if packed is None and len(order) > 1 and usable <= MAX_SEARCH_NODES and budget.left:
        try:
            packed = _Packer(topology, domain, list(free), budget).place(order)
        except OutOfSteps:
            return None
    return packed


def _size_key(each: Resources) -> tuple[int, int, int]:
    return (-each.gpus, -each.millicpus, -each.memory_bytes)


def domain_order(domain: Domain, free: Sequence[Resources]) -> tuple[int, int, int, int]:
    """Best fit: the domain with the least room left comes first, GPUs before CPUs before memory."""
    room = total(free, domain)
    return (room.gpus, room.millicpus, room.memory_bytes, domain.start)


class _Packer:
    """Greedy without a budget, exact with one."""

    def __init__(self, topology: Topology, domain: Domain, room: list[Resources], budget: Budget | None) -> None:
        self._topology = topology
        self._domain = domain
        self._room = room
        self._budget = budget

    def place(self, roles: Sequence[RoleDemand]) -> dict[str, Counts] | None:
        if not roles:
            return {}
        demand, rest = roles[0], roles[1:]
        for counts in self._options(demand):
            self._take(demand, counts, 1)
            packed = self.place(rest)
            self._take(demand, counts, -1)
            if packed is not None:
                return {demand.role: counts, **packed}
        return None

    def _take(self, demand: RoleDemand, counts: Counts, sign: int) -> None:
        for index, count in counts.items():
            self._room[index] = self._room[index] - demand.each.times(sign * count)

    def _options(self, demand: RoleDemand) -> Iterator[Counts]:
        for domain in self._choices(demand):
            if capacity(domain, demand, self._room) < demand.count:
                continue
            if self._budget is None:
                yield descend(domain, demand, demand.count, self._room)
            else:
                holds = [demand.each.copies_in(self._room[index]) for index in domain.indices]
                yield from _spreads(domain.start, holds, sum(holds), demand.count, self._budget)

    def _choices(self, demand: RoleDemand) -> list[Domain]:
        if tightness(demand.required_level) >= tightness(self._domain.level):
            return [self._domain]
        inside = [
            domain
            for domain in self._topology.domains(demand.required_level)
            if self._domain.start <= domain.start and domain.stop <= self._domain.stop
        ]
        return sorted(inside, key=lambda domain: domain_order(domain, self._room))


def _spreads(index: int, holds: list[int], left: int, wanted: int, budget: Budget) -> Iterator[Counts]:
    """All ways to spread `wanted` members over nodes `index`, `index` + 1, ... that hold `holds` (sum `left`) members.

    Large pieces come first.
    """
    budget.spend()
    if wanted == 0:
        yield {}
        return
    left -= holds[0]
    for count in range(min(wanted, holds[0]), max(0, wanted - left) - 1, -1):
        for counts in _spreads(index + 1, holds[1:], left, wanted - count, budget):
            yield {index: count, **counts} if count else counts


def descend(domain: Domain, demand: RoleDemand, count: int, room: Sequence[Resources]) -> Counts:
    """Spreads `count` members that fit into `domain`, best fit: one child if one suffices, else the fewest children.

    The smallest child that holds the rest is taken; while none does, the largest is filled. So the last piece is the
    one that is fitted best, and whole racks stay free.
    """
    if not domain.children:
        return {domain.start: count}
    counts: Counts = {}
    holds = {child.start: capacity(child, demand, room) for child in domain.children}
    children = list(domain.children)
    while count:
        fitting = [child for child in children if holds[child.start] >= count]
        if fitting:
            child = min(fitting, key=lambda child: (holds[child.start], domain_order(child, room)))
        else:
            child = max(children, key=lambda child: (holds[child.start], -child.start))
        piece = min(count, holds[child.start])
        counts.update(descend(child, demand, piece, room))
        children.remove(child)
        count -= piece
    return counts
