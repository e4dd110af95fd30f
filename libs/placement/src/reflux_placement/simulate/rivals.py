"""Owns the peers' queueing: first come first served with EASY backfill, the same for each placement rule.

EASY (Lifka 1995, "The ANL/IBM SP scheduling system"): jobs start in order of arrival; the first that does not fit gets
a reservation at the earliest time at which it would fit, from the ends that the running jobs are expected to have;
a later job may go first if it fits now and does not delay that reservation - it ends before it, or the reserved job
still fits beside it. The end times are those that users stated, the same that our policy reads.
"""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np

from reflux_placement.gang import Assignment, GangDemand
from reflux_placement.policy.view import Action, Ask, Decision, Live, Requeue, Start, View, Wait
from reflux_placement.room import Holding, Room
from reflux_placement.topology import Ints

Rule = Callable[[Room, GangDemand], Assignment | None]
"""A peer's placement: where the gang goes now, or None. Books nothing."""

BACKFILL_DEPTH = 1_000
"""Pending jobs that one cycle tries to backfill (Slurm's bf_max_job_test is 500 by default; more favours the peer)."""


@dataclass(frozen=True, slots=True)
class _Cache:
    """What is worked out once per job instead of once per cycle; decisions do not depend on it."""

    members: WeakKeyDictionary[Holding, tuple[Ints, Ints]] = field(default_factory=WeakKeyDictionary)
    totals: dict[str, tuple[int, int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class FifoBackfill:
    """A policy (callable on a View) of one rule under FIFO with EASY backfill."""

    rule: Rule
    depth: int = BACKFILL_DEPTH
    _cache: _Cache = field(default_factory=_Cache)

    def __call__(self, view: View) -> Decision:
        """One cycle."""
        return _Cycle(self.rule, view, self.depth, self._cache).run()


@dataclass
class _Refusals:
    """What did not fit in this cycle: the same shape with as many members or more does not fit either, because a cycle
    only takes room. Spares the rule thousands of calls."""

    counts: dict[object, int] = field(default_factory=dict)

    def covers(self, gang: GangDemand) -> bool:
        known = self.counts.get(_shape(gang))
        return known is not None and len(gang.roles) == 1 and gang.roles[0].count >= known

    def add(self, gang: GangDemand) -> None:
        if len(gang.roles) == 1:
            shape = _shape(gang)
            self.counts[shape] = min(self.counts.get(shape, gang.roles[0].count), gang.roles[0].count)


def _shape(gang: GangDemand) -> object:
    role = gang.roles[0]
    return role.each, role.required_level, role.segment_size, gang.required_level, gang.preferred_level


class _Cycle:
    def __init__(self, rule: Rule, view: View, depth: int, cache: _Cache) -> None:
        self._rule, self._view, self._room, self._depth, self._cache = rule, view, view.room, depth, cache
        self._actions: list[Action] = []
        self._started: list[tuple[float, Holding]] = []
        self._refused = _Refusals()

    def run(self) -> Decision:
        """Starts the head of the queue while it fits, reserves for the first that does not, backfills behind it."""
        self._requeue_broken()
        queue = sorted(self._view.pending, key=lambda ask: (-ask.priority, ask.number))
        at = 0
        while at < len(queue) and self._start(queue[at], backfilled=False):
            at += 1
        if at < len(queue) - 1:  # with nobody behind the head there is nothing to reserve against
            self._backfill(queue[at], queue[at + 1 : at + 1 + self._depth])
        started = {action.job for action in self._actions if isinstance(action, Start)}
        waits = {
            ask.job: Wait(ask.job, "resources" if ask is queue[at] else "behind", "does not fit in arrival order")
            for ask in queue[at:]
            if ask.job not in started
        }
        return Decision(tuple(self._actions), waits)

    def _requeue_broken(self) -> None:
        """Peers here restart a job that lost a node; requeueing is what Slurm does by default."""
        down = {node for node, state in self._view.nodes.items() if state == "down"}
        for job in sorted({job for node in down for job in self._room.jobs_on(node)}):
            self._room.release(job)
            self._actions.append(Requeue(job, "a node is down"))

    def _start(self, ask: Ask, *, backfilled: bool) -> bool:
        if self._refused.covers(ask.gang):
            return False
        placed = self._rule(self._room, ask.gang)
        if placed is None:
            self._refused.add(ask.gang)
            return False
        self._book(ask, placed, backfilled)
        return True

    def _book(self, ask: Ask, placed: Assignment, backfilled: bool) -> None:
        holding = self._room.take(ask.job, ask.gang, placed)
        self._started.append((_expected_end(ask, self._view.now), holding))
        self._actions.append(Start(ask.job, placed, "first come first served", backfilled))

    def _backfill(self, head: Ask, behind: Sequence[Ask]) -> None:
        free_R = np.maximum(self._room.usable_NR(), 0).sum(axis=0)
        most = free_R.tolist()
        behind = [ask for ask in behind if all(map(operator.le, self._total(ask), most))]
        if not behind:
            return
        shadow_at, shadow = self._reserve(head)
        delays = _Refusals()
        for ask in behind:
            if self._refused.covers(ask.gang):
                continue
            late = _expected_end(ask, self._view.now) > shadow_at
            if late and delays.covers(ask.gang):
                continue
            placed = self._rule(self._room, ask.gang)
            if placed is None:
                self._refused.add(ask.gang)
            elif late and shadow is not None and not self._still_fits(head, shadow, ask.gang, placed):
                delays.add(ask.gang)
            else:
                self._book(ask, placed, backfilled=True)

    def _still_fits(self, head: Ask, shadow: Room, gang: GangDemand, placed: Assignment) -> bool:
        """Whether the reserved job keeps its time beside a gang that outlasts it; keeps the gang in the shadow then."""
        node_M, need_MR = _members(gang, placed)
        np.subtract.at(shadow.free_NR, node_M, need_MR)
        if self._rule(shadow, head.gang) is not None:
            return True
        np.add.at(shadow.free_NR, node_M, need_MR)
        return False

    def _reserve(self, head: Ask) -> tuple[float, Room | None]:
        """Earliest time at which the head fits, and the room as it will be then; (inf, None) if no end helps it."""
        ends = [(_live_end(self._view.live[job]), holding) for job, holding in self._held()] + self._started
        ends = sorted(((at, holding) for at, holding in ends if at < math.inf), key=lambda each: each[0])
        parts = [self._members(holding) for _, holding in ends]
        bounds = np.cumsum([0] + [len(node_M) for node_M, _ in parts])
        node_M = np.concatenate([part[0] for part in parts]) if parts else np.zeros(0, dtype=np.int64)
        need_MR = np.concatenate([part[1] for part in parts]) if parts else np.zeros((0, 3), dtype=np.int64)

        def after(count: int) -> Room:
            room = self._room.copy()
            upto = int(bounds[count])
            np.add.at(room.free_NR, node_M[:upto], need_MR[:upto])
            return room

        low, high = 0, len(ends)
        if self._rule(after(high), head.gang) is None:
            return math.inf, None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._rule(after(middle), head.gang) is not None else (middle, high)
        return max(ends[high - 1][0], self._view.now), after(high)

    def _total(self, ask: Ask) -> tuple[int, int, int]:
        if ask.job not in self._cache.totals:
            self._cache.totals[ask.job] = ask.gang.total().row
        return self._cache.totals[ask.job]

    def _members(self, holding: Holding) -> tuple[Ints, Ints]:
        if holding not in self._cache.members:
            self._cache.members[holding] = _members(holding.demand, holding.assignment)
        return self._cache.members[holding]

    def _held(self) -> list[tuple[str, Holding]]:
        return [(job, holding) for job, holding in self._room.holdings.items() if job in self._view.live]


def _expected_end(ask: Ask, now: float) -> float:
    return now + ask.expected_seconds if ask.expected_seconds else math.inf


def _live_end(live: Live) -> float:
    return live.started_at + live.ask.expected_seconds if live.ask.expected_seconds else math.inf


def _members(gang: GangDemand, placed: Assignment) -> tuple[Ints, Ints]:
    """Node and need of every member."""
    nodes = [placed.nodes[role.role] for role in gang.roles if role.role in placed.nodes]
    needs = [
        np.broadcast_to(np.array(role.each.row, dtype=np.int64), (len(placed.nodes[role.role]), 3))
        for role in gang.roles
        if role.role in placed.nodes
    ]
    return np.concatenate(nodes), np.concatenate(needs)
