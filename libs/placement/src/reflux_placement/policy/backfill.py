"""Owns reservations: when and where a blocked ask will fit, and so what may start in front of it.

EASY backfill (Lifka, JSSPP 1995; Mu'alem and Feitelson, TPDS 2001): live jobs leave in the order of their expected
ends; the shadow time is the first moment at which the blocked gang fits. Later asks start if they end before it, or
stay off the reserved room. Unlike counted processors, room here has a place: the reservation is an assignment.
"""

import math
from collections.abc import Mapping, Sequence, Set

import numpy as np

from reflux_placement.gang import Assignment
from reflux_placement.place.misfit import Misfit
from reflux_placement.place.search import Limits, find_place
from reflux_placement.policy.claims import Standing, stand
from reflux_placement.policy.view import Ask, Claim, Live
from reflux_placement.room import Room
from reflux_placement.topology import Ints

FEASIBLE = Limits(improve_steps=0)
"""For questions of "would it fit": a good arrangement is worth its time only where the gang starts."""

Kept = tuple[Ints, Ints]
"""K nodes, no node twice, and the amounts (K, 3) that stay out of reach on them."""


def expected_end(live: Live, now: float) -> float:
    """When a job will end, in seconds on the caller's clock; infinite if it did not say. A job that ran over is
    expected to take twice as long as it said, then four times (Tsafrir et al., TPDS 2007, correct a missed prediction
    in growing steps)."""
    expected = live.ask.expected_seconds
    if expected <= 0:
        return math.inf
    ran = now - live.started_at
    if ran > expected:
        expected *= 2.0 ** math.ceil(math.log2(ran / expected))
    return live.started_at + expected


class Drain:
    """The room as live jobs leave it, in the order of their expected ends, the older one first among equals."""

    def __init__(self, room: Room, live: Mapping[str, Live], now: float, leaving: Set[str]) -> None:
        self._room = room
        known = [(now if job in leaving else expected_end(live[job], now), job) for job in room.holdings if job in live]
        known.sort(key=lambda each: (each[0], live[each[1]].started_at, live[each[1]].ask.number))
        self.ends: list[float] = [end for end, _ in known]
        self.jobs: list[str] = [job for _, job in known]
        holdings = [room.holdings[job] for job in self.jobs]
        empty = np.zeros(0, dtype=np.int64)
        self._node_X = np.concatenate([empty, *(holding.node_M for holding in holdings)])
        self._need_XR = np.concatenate([np.zeros((0, 3), np.int64), *(holding.need_MR for holding in holdings)])
        self._rank_X = np.repeat(np.arange(len(holdings)), [len(holding.node_M) for holding in holdings])
        self.num_left_already = sum(job in leaving for job in self.jobs)

    def room_after(self, count: int, kept: Sequence[Kept]) -> Room:
        """The room when the first `count` jobs have left and the claims of `kept` were served."""
        gone = int(np.searchsorted(self._rank_X, count))
        room = self._room.copy()
        np.add.at(room.free_NR, self._node_X[:gone], self._need_XR[:gone])
        for nodes_K, need_KR in kept:
            room.free_NR[nodes_K] -= need_KR
        np.maximum(room.free_NR, 0, out=room.free_NR)
        return room

    def first_enough(self, least: Sequence[int], free: Sequence[int]) -> int:
        """Fewest departures after which the sums of all amounts reach `least`, starting from `free`. A lower bound:
        it knows nothing of places."""
        if not self.jobs:
            return 0
        per_job = np.zeros((len(self.jobs), 3), dtype=np.int64)
        np.add.at(per_job, self._rank_X, self._need_XR)
        reached = (np.cumsum(per_job, axis=0) + np.array(free)) >= np.array(least)
        enough = reached.all(axis=1)
        return int(enough.argmax()) + 1 if enough.any() else len(self.jobs)

    def those_on(self, nodes_K: Ints, count: int) -> tuple[str, ...]:
        """Jobs among the first `count` to leave that hold something on these nodes."""
        gone = int(np.searchsorted(self._rank_X, count))
        there = np.isin(self._node_X[:gone], nodes_K)
        return tuple(self.jobs[rank] for rank in np.unique(self._rank_X[:gone][there]).tolist())


def reserve(drain: Drain, ask: Ask, now: float, free: Sequence[int], kept: Sequence[Kept]) -> Standing | Misfit:
    """The earliest room for an ask that does not fit now; Misfit if it would not fit when all live jobs had left.

    Args:
        drain: the live jobs' departures, over the room of now.
        ask: it was found not to fit now.
        now: seconds.
        free: sums of the free amounts of now, for a lower bound on the departures.
        kept: room of claims and reservations that come first.
    """
    high = len(drain.jobs)
    best = find_place(drain.room_after(high, kept), ask.gang, limits=FEASIBLE)
    if not isinstance(best, Assignment):
        return best
    least = ask.gang.least_total().row
    low = max(drain.num_left_already, min(high, drain.first_enough(least, free) - 1))
    while low < high:
        middle = (low + high) // 2
        found = find_place(drain.room_after(middle, kept), ask.gang, limits=FEASIBLE)
        if isinstance(found, Assignment):
            best, high = found, middle
        else:
            low = middle + 1
    end = drain.ends[high - 1] if high else now
    after = drain.those_on(best.used_nodes(), high)
    claim = Claim(job=ask.job, assignment=best, after=after, evicting=False, due_at=max(now, end))
    return stand(claim, ask)


def ends_before(ask: Ask, now: float, shadow: float) -> bool:
    """Whether an ask that starts now is over by the shadow time of a reservation. A shadow time that nobody knows may
    be any moment."""
    return ask.expected_seconds > 0 and now + ask.expected_seconds <= shadow < math.inf
