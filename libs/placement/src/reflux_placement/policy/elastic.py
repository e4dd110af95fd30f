"""Owns the size of running elastic jobs: they grow into idle room and give it back before anybody is preempted.

Order of a cycle: after the pending asks were placed, `shrink_for` for one that does not fit (tried before preemption,
because no work is lost), and `grow` at the very end, into what nobody waits for.

A size changes in whole segments (single members without segments) and only at the high end of the ranks, so that
members that stay keep rank and node. Fairness is max-min over current / desired size: a job that was shrunk is back at
its desired size before another goes beyond its own.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from reflux_placement.gang import Assignment, GangDemand, RoleDemand
from reflux_placement.place.search import find_place
from reflux_placement.policy.members import resized, size_changes
from reflux_placement.policy.view import Ask, Live, Resize
from reflux_placement.room import Holding, Room
from reflux_placement.topology import Ints, Resources

MAX_GROW_ROUNDS = 4
"""Passes over the jobs of one `grow`; what is left after them grows in the next cycle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrink:
    """Jobs that give room back, as one set, and where the ask fits once they have (not booked)."""

    resizes: tuple[Resize, ...]
    assignment: Assignment


def grow(
    room: Room,
    live: Mapping[str, Live],
    *,
    waiting: Sequence[Ask] = (),
    reserved: Sequence[int] | Ints = (),
    may_hold: Callable[[str, Resources], bool] = lambda _queue, _more: True,
) -> list[Resize]:
    """Grows running elastic jobs towards their `max_count` and books it on `room`.

    Args:
        room: what is free after everything else was placed in this cycle.
        live: the running jobs.
        waiting: asks that wait for room without a reservation; while there is one, nobody grows.
        reserved: node indices that a reservation has promised; nobody grows into them.
        may_hold: (queue, amount) -> whether the queue may hold that much more than at the start of this call (quota).
    """
    if waiting:
        return []
    before_N = room.open_N
    room.open_N = before_N.copy()
    room.open_N[np.asarray(reserved, dtype=np.int64)] = False
    old = {job: room.holdings[job].assignment for job in live if job in room.holdings}
    grown: dict[str, Assignment] = {}
    more: dict[str, Resources] = {}
    stuck: set[tuple[str, str]] = set()
    for _ in range(MAX_GROW_ROUNDS):
        goals = _fair_goals(room, live, may_hold, more, stuck)
        for goal in goals:
            had = _count(room, goal)
            if (assignment := _grow_role(room, goal)) is not None:
                grown[goal.ask.job] = assignment
                amount = goal.demand.each.times(_count(room, goal) - had)
                more[goal.ask.queue] = more.get(goal.ask.queue, Resources()) + amount
            if _count(room, goal) < goal.count:
                stuck.add((goal.ask.job, goal.demand.role))
        if not goals:
            break
    room.open_N = before_N
    return [Resize(job, assignment, size_changes(old[job], assignment)) for job, assignment in grown.items()]


@dataclass(slots=True)
class _Goal:
    """The size that a role of a running job is on its way to."""

    ask: Ask
    demand: RoleDemand
    count: int

    @property
    def unit(self) -> int:
        return self.demand.segment_size or 1

    def key(self) -> tuple[float, int, int, str]:
        """Smallest first: how far it is from its desired size, then priority, then order of submission."""
        share = self.count / max(1, self.demand.count)
        return (share, -self.ask.priority, self.ask.number, self.demand.role)


def _count(room: Room, goal: _Goal) -> int:
    return len(room.holdings[goal.ask.job].assignment.nodes.get(goal.demand.role, ()))


def _fair_goals(
    room: Room,
    live: Mapping[str, Live],
    may_hold: Callable[[str, Resources], bool],
    grown: Mapping[str, Resources],
    stuck: set[tuple[str, str]],
) -> list[_Goal]:
    """Sizes by water-filling: the role that is furthest below its desired size gets the next unit, as long as the sum
    of free amounts lasts. Roles that got nothing are left out; the neediest come first."""
    usable_NR = room.usable_NR()
    idle = Resources(*np.where(usable_NR > 0, usable_NR, 0).sum(axis=0).tolist())
    goals = [
        _Goal(each.ask, demand, len(room.holdings[job].assignment.nodes.get(demand.role, ())))
        for job, each in live.items()
        if job in room.holdings
        for demand in each.ask.gang.roles
        if (job, demand.role) not in stuck
    ]
    goals = sorted((goal for goal in goals if goal.count < goal.demand.most), key=_Goal.key)
    heap = [(goal.key(), index) for index, goal in enumerate(goals)]
    more = dict(grown)
    raised: set[int] = set()
    while heap:
        _, index = heapq.heappop(heap)
        goal = goals[index]
        step = goal.demand.each.times(goal.unit)
        total = more.get(goal.ask.queue, Resources()) + step
        if not step.fits_in(idle) or not may_hold(goal.ask.queue, total):
            continue
        idle = idle - step
        more[goal.ask.queue] = total
        goal.count += goal.unit
        raised.add(index)
        if goal.count < goal.demand.most:
            heapq.heappush(heap, (goal.key(), index))
    return [goals[index] for index in sorted(raised)]


def _grow_role(room: Room, goal: _Goal) -> Assignment | None:
    """Books the largest size up to the goal that fits; None when not even one unit does."""
    holding = room.holdings[goal.ask.job]
    have = _count(room, goal)
    room.release(goal.ask.job)
    best: Assignment | None = None
    low, high = 0, (goal.count - have) // goal.unit
    middle = high
    while low < high:
        found = resized(room, holding, {goal.demand.role: have + middle * goal.unit})
        if isinstance(found, Assignment):
            best, low = found, middle
        else:
            high = middle - 1
        middle = (low + high + 1) // 2
    if best is None:
        room.restore(goal.ask.job, holding)
        return None
    room.take(goal.ask.job, holding.demand, best, keep=holding)
    return best


def shrink_for(
    room: Room,
    live: Mapping[str, Live],
    ask: Ask,
    *,
    may_shrink: Callable[[Live], bool] | None = None,
) -> Shrink | None:
    """The smallest set of shrinks that single steps find after which `find_place` has room for an ask; None, and
    nothing is booked, when even shrinking everybody to the minimum is not enough.

    What a job holds beyond its desired size is borrowed idle room: any ask takes it back. Below the desired size, down
    to `min_count`, a job shrinks only where `may_shrink` says so; by default for asks of at least its priority.
    The resizes are booked on `room`, the ask is not.
    """
    allowed = may_shrink or (lambda other: other.ask.priority <= ask.priority)
    steps = _steps(room, live, allowed)
    trial = _ShrinkTrial(room, ask)
    if not steps or trial.fits_after(dict(steps)) is None:
        return None
    low, high = 0, len(steps)
    while low < high:
        middle = (low + high) // 2
        if trial.fits_after(dict(steps[:middle])) is None:
            low = middle + 1
        else:
            high = middle
    sizes = _pruned(trial, live, dict(steps[:high]))
    fitting = trial.fits_after(sizes)
    if fitting is None or not sizes:
        return None
    after, assignment = fitting
    resizes: list[Resize] = []
    for job in sorted({job for job, _ in sizes}):
        before, new = room.holdings[job], after.holdings[job].assignment
        room.release(job)
        room.take(job, before.demand, new, keep=before)
        resizes.append(Resize(job, new, f"{size_changes(before.assignment, new)} to make room for {ask.job}"))
    return Shrink(resizes=tuple(resizes), assignment=assignment)


Sizes = dict[tuple[str, str], int]
"""Wanted size by job and role."""


def _steps(room: Room, live: Mapping[str, Live], allowed: Callable[[Live], bool]) -> list[tuple[tuple[str, str], int]]:
    """What may be given back, cheapest first: borrowed room, then room down to the minimum; inside each, low priority
    and late submission first."""
    steps: list[tuple[tuple[int, int, int, str], tuple[str, str], int]] = []
    for job, each in live.items():
        if job not in room.holdings:
            continue
        for demand in each.ask.gang.roles:
            have = len(room.holdings[job].assignment.nodes.get(demand.role, ()))
            for turn, wanted in enumerate((demand.count, _floor(each.ask.gang, demand))):
                size = min(each.shrinks_to(demand.role, wanted, have), default=have)
                if size < have and (turn == 0 or allowed(each)):
                    key = (turn, each.ask.priority, -each.ask.number, demand.role)
                    steps.append((key, (job, demand.role), size))
                    have = size
    return [(where, size) for _, where, size in sorted(steps)]


def _floor(gang: GangDemand, demand: RoleDemand) -> int:
    """The size that a role never shrinks below: its minimum, or one unit where the gang would be left empty."""
    may_be_empty = not any(role.least for role in gang.roles)
    first = next(role.role for role in gang.roles if role.count)
    return (demand.segment_size or 1) if may_be_empty and demand.role == first else demand.least


class _ShrinkTrial:
    """Answers whether the ask fits after given shrinks; who holds what smaller is worked out once per job and size."""

    def __init__(self, room: Room, ask: Ask) -> None:
        self.room, self.ask = room, ask
        self._smaller: dict[tuple[str, tuple[tuple[str, int], ...]], Assignment] = {}

    def fits_after(self, sizes: Sizes) -> tuple[Room, Assignment] | None:
        """A copy of the room with the shrinks booked, and where the ask fits in it."""
        after = self.room.copy()
        wanted: dict[str, dict[str, int]] = {}
        for (job, role), size in sizes.items():
            wanted.setdefault(job, {})[role] = size
        for job, counts in wanted.items():
            holding = after.holdings[job]
            after.release(job)
            after.take(job, holding.demand, self._at_sizes(after, job, holding, counts), keep=holding)
        found = find_place(after, self.ask.gang)
        return (after, found) if isinstance(found, Assignment) else None

    def _at_sizes(self, after: Room, job: str, holding: Holding, counts: Mapping[str, int]) -> Assignment:
        """The job at its new sizes; as it is where its constraints forbid them (a peer would change its domain)."""
        key = (job, tuple(sorted(counts.items())))
        if key not in self._smaller:
            found = resized(after, holding, counts)
            self._smaller[key] = found if isinstance(found, Assignment) else holding.assignment
        return self._smaller[key]


def _pruned(trial: _ShrinkTrial, live: Mapping[str, Live], sizes: Sizes) -> Sizes:
    """Every size as large as it can be with the others fixed, the dearest first; jobs that need not shrink are out."""
    room = trial.room
    for where in reversed(list(sizes)):
        job, role = where
        demand = room.holdings[job].demand.demand(role)
        unit = demand.segment_size or 1
        have = len(room.holdings[job].assignment.nodes.get(role, ()))
        options = live[job].shrinks_to(role, sizes[where], have, unit)
        low, high = 0, len(options) - 1
        while low < high:
            middle = (low + high) // 2
            if trial.fits_after(sizes | {where: options[middle]}) is None:
                low = middle + 1
            else:
                high = middle
        sizes = sizes | {where: options[high]}
    return {
        (job, role): size
        for (job, role), size in sizes.items()
        if size < len(room.holdings[job].assignment.nodes.get(role, ()))
    }
