"""Owns the peers' queueing: first come first served with EASY backfill, the same for each placement rule.

EASY (Lifka 1995, "The ANL/IBM SP scheduling system"): jobs start in order of arrival; the first that does not fit gets
a reservation at the earliest time at which it would fit, from the ends that the running jobs are expected to have;
a later job may go first if it fits now and does not delay that reservation - it ends before it, or the reserved job
still fits beside it. The end times are those that users stated, the same that our policy reads.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np

from reflux_placement.gang import Assignment, GangDemand
from reflux_placement.policy.view import Action, Ask, Decision, Live, Requeue, Start, View, Wait
from reflux_placement.room import Holding, Room
from reflux_placement.simulate.fragmentation import slots
from reflux_placement.topology import CLUSTER, Ints, Resources, Topology

Screen = Callable[[Topology, Ints], Callable[[int], bool] | None]
"""From the members that every node holds: whether so many of one plain role could fit (False is a proof)."""

Rule = Callable[[Room, GangDemand], Assignment | None]
"""A peer's placement: where the gang goes now, or None. Books nothing."""

BACKFILL_DEPTH = 1_000
"""Pending jobs that one cycle tries to backfill (Slurm's bf_max_job_test is 500 by default; more favours the peer)."""


@dataclass(slots=True)
class _Memory:
    """What one cycle leaves for the next, to save time. Decisions do not depend on it: as long as no room came or went,
    whoever was refused is refused again (time only makes a job end later), so only new arrivals are tried."""

    members: WeakKeyDictionary[Holding, tuple[Ints, Ints]] = field(default_factory=WeakKeyDictionary)
    room: tuple[bytes, bytes] | None = None
    refused: set[str] = field(default_factory=set)
    head: str = ""
    shadow: tuple[float, Room | None] = (math.inf, None)


@dataclass(frozen=True)
class FifoBackfill:
    """A policy (callable on a View) of one rule under FIFO with EASY backfill."""

    rule: Rule
    depth: int = BACKFILL_DEPTH
    screen: Screen | None = None
    """A quick proof of refusal that belongs to the rule."""

    _memory: _Memory = field(default_factory=_Memory)

    def __call__(self, view: View) -> Decision:
        """One cycle."""
        return _Cycle(self, view, self._memory).run()


class _Cycle:
    def __init__(self, policy: FifoBackfill, view: View, memory: _Memory) -> None:
        self._rule, self._screen, self._depth = policy.rule, policy.screen, policy.depth
        self._view, self._room, self._memory = view, view.room, memory
        self._actions: list[Action] = []
        self._started: list[tuple[float, Holding]] = []
        self._slots: dict[Resources, tuple[int, Callable[[int], bool] | None]] = {}
        self._refused: set[object] = set()
        """Shapes that the rule refused in this cycle, which only takes room."""

    def run(self) -> Decision:
        """Starts the head of the queue while it fits, reserves for the first that does not, backfills behind it."""
        self._requeue_broken()
        queue = sorted(self._view.pending, key=lambda ask: (-ask.priority, ask.number))
        unchanged = self._memory.room == self._fingerprint() and not self._actions
        known = self._memory.refused if unchanged else set()
        at = 0
        while at < len(queue) and queue[at].job not in known and self._start(queue[at], backfilled=False):
            at += 1
        if at < len(queue):
            behind = queue[at + 1 : at + 1 + self._depth]
            self._backfill(queue[at], [ask for ask in behind if ask.job not in known], reuse=queue[at].job in known)
        started = {action.job for action in self._actions if isinstance(action, Start)}
        self._memory.room, self._memory.refused = self._fingerprint(), {a.job for a in queue if a.job not in started}
        waits = {
            ask.job: Wait(ask.job, "resources" if ask is queue[at] else "behind", "does not fit in arrival order")
            for ask in queue[at:]
            if ask.job not in started
        }
        return Decision(tuple(self._actions), waits)

    def _fingerprint(self) -> tuple[bytes, bytes]:
        return self._room.free_NR.tobytes(), self._room.open_N.tobytes()

    def _requeue_broken(self) -> None:
        """Peers here restart a job that lost a node; requeueing is what Slurm does by default."""
        down = {node for node, state in self._view.nodes.items() if state == "down"}
        for job in sorted({job for node in down for job in self._room.jobs_on(node)}):
            self._room.release(job)
            self._actions.append(Requeue(job, "a node is down"))

    # --- places ---

    def _place(self, gang: GangDemand) -> Assignment | None:
        """The rule's answer; asked only where the nodes hold enough members, and once per shape."""
        for role in gang.roles:
            total, check = self._members_of(role.each)
            if total < role.count or (check is not None and _is_plain(gang) and not check(role.count)):
                return None
        if gang in self._refused:
            return None
        placed = self._rule(self._room, gang)
        if placed is None:
            self._refused.add(gang)
        return placed

    def _members_of(self, each: Resources) -> tuple[int, Callable[[int], bool] | None]:
        """Members of a size that all nodes hold, and the rule's screen for them."""
        if each not in self._slots:
            slots_N = slots(self._room.usable_NR(), each)
            check = self._screen(self._room.topology, slots_N) if self._screen is not None else None
            self._slots[each] = (int(slots_N.sum()), check)
        return self._slots[each]

    def _start(self, ask: Ask, *, backfilled: bool) -> bool:
        placed = self._place(ask.gang)
        if placed is not None:
            self._book(ask, placed, backfilled)
        return placed is not None

    def _book(self, ask: Ask, placed: Assignment, backfilled: bool) -> None:
        holding = self._room.take(ask.job, ask.gang, placed)
        self._slots.clear()
        self._started.append((_expected_end(ask, self._view.now), holding))
        self._actions.append(Start(ask.job, placed, "first come first served", backfilled))

    # --- backfill ---

    def _backfill(self, head: Ask, behind: Sequence[Ask], *, reuse: bool) -> None:
        """Later jobs in order. The reservation of the cycle before is good for as long as nothing changed."""
        shadow_at, shadow = self._memory.shadow if reuse else self._reserve(head)
        delaying: set[object] = set()
        for ask in behind:
            late = _expected_end(ask, self._view.now) > shadow_at
            if late and ask.gang in delaying:
                continue
            placed = self._place(ask.gang)
            if placed is None:
                continue
            if late and shadow is not None and not self._still_fits(head, shadow, ask.gang, placed):
                delaying.add(ask.gang)
                continue
            self._book(ask, placed, backfilled=True)
        self._memory.shadow, self._memory.head = (shadow_at, shadow), head.job

    def _still_fits(self, head: Ask, shadow: Room, gang: GangDemand, placed: Assignment) -> bool:
        """Whether the reserved job keeps its time beside a gang that outlasts it; keeps the gang in the shadow then."""
        node_M, need_MR = _members(gang, placed)
        np.subtract.at(shadow.free_NR, node_M, need_MR)
        if _enough(shadow, head.gang) and self._rule(shadow, head.gang) is not None:
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

        def fits(count: int) -> bool:
            room = after(count)
            return _enough(room, head.gang) and self._rule(room, head.gang) is not None

        times = [at for at, _ in ends]
        low, high = self._bounds(times, head, fits)
        if high < 0:
            return math.inf, None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle) else (middle, high)
        shadow_at = max(ends[high - 1][0], self._view.now)
        return shadow_at, after(bisect_right(times, shadow_at))  # with all that end at the same time

    def _bounds(self, ends: Sequence[float], head: Ask, fits: Callable[[int], bool]) -> tuple[int, int]:
        """Numbers of ends (too few, enough) for the head; (0, -1) if all are too few. The reservation that the same job
        had in the cycle before mostly holds still, so two looks replace a search."""
        guess = bisect_right(ends, self._memory.shadow[0]) if self._memory.head == head.job else len(ends)
        if 1 < guess < len(ends) and fits(guess):
            return (0, guess - 1) if fits(guess - 1) else (guess - 1, guess)
        return (0, len(ends)) if fits(len(ends)) else (0, -1)

    def _members(self, holding: Holding) -> tuple[Ints, Ints]:
        if holding not in self._memory.members:
            self._memory.members[holding] = _members(holding.demand, holding.assignment)
        return self._memory.members[holding]

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


def _is_plain(gang: GangDemand) -> bool:
    """One role that only prefers."""
    role = gang.roles[0]
    free = gang.required_level == role.required_level == CLUSTER
    return len(gang.roles) == 1 and free and not role.segment_size and not role.max_per_domain


def _enough(room: Room, gang: GangDemand) -> bool:
    """A cheap necessary condition: the nodes hold as many members of every role."""
    usable_NR = room.usable_NR()
    return all(int(slots(usable_NR, role.each).sum()) >= role.count for role in gang.roles)
