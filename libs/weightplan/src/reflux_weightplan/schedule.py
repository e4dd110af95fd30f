"""Owns the order of transfers: who reads from whom when, so that ports neither wait nor serve two at once.

List scheduling of an open shop with one machine per port and direction: whenever ports fall free, the one with the most
work left takes the free partner with the most work left. Only freed ports are matched again, and the side with fewer of
them is scanned, which makes it linear in messages. Any such schedule ends within twice the lower bound (Racsmany, in
Barany and Fiala 1982); with the longest-remaining rule it is within one percent for the layouts of large models, where
taking pairs in enumeration order is 20 to 40 times off.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reflux_weightplan.links import SAME_DOMAIN, LinkModel, Ports, ports_of, tiers
from reflux_weightplan.mesh import Place
from reflux_weightplan.sides import Ints

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Schedule:
    """`start_SD` are the seconds at which a target rank starts to read from a source rank, nan where it never does. The
    transfers of a rank keep to their order; nobody waits for the clock.

    `lower_bound_seconds` counts bytes only: the largest of all ports' bytes over their rate, and of local bytes.
    `makespan_seconds` counts messages too, so the efficiency says what short messages cost.
    """

    makespan_seconds: float
    lower_bound_seconds: float
    start_SD: Floats
    nbytes_SD: Ints


def schedule(
    traffic: Ints, messages: Ints, source_places: Sequence[Place], target_places: Sequence[Place], link: LinkModel
) -> Schedule:
    """Orders all pairs of `traffic` bytes and `messages`, both int64 [S, D]."""
    local = tiers(source_places, target_places) <= SAME_DOMAIN
    sources, targets = ports_of(source_places, link), ports_of(target_places, link)
    local_seconds = (traffic * local).sum(axis=0) / link.local_bytes_per_second
    bytes_PQ = _by_port(np.where(local, 0, traffic), sources, targets)
    messages_PQ = _by_port(np.where(local, 0, messages), sources, targets)
    rates = np.minimum(sources.rates[:, None], targets.rates[None, :])
    start_PQ, makespan = list_schedule(bytes_PQ / rates + messages_PQ * link.alpha_seconds)
    start = start_PQ[np.ix_(sources.port_R, targets.port_R)]
    start[local] = 0.0
    start[traffic == 0] = np.nan
    local_bound = float(local_seconds.max(initial=0.0))
    bound = max(port_bound(bytes_PQ, sources, targets), local_bound)
    return Schedule(max(makespan, local_bound), bound, start, traffic)


def port_bound(bytes_PQ: Ints, sources: Ports, targets: Ports) -> float:
    """Seconds of the busiest port if no port ever waited."""
    out = bytes_PQ.sum(axis=1) / sources.rates
    into = bytes_PQ.sum(axis=0) / targets.rates
    return float(max(out.max(initial=0.0), into.max(initial=0.0)))


def _by_port(values: Ints, sources: Ports, targets: Ports) -> Ints:
    if len(sources.rates) == len(values) and len(targets.rates) == values.shape[1]:
        return values
    sums = np.zeros((len(sources.rates), len(targets.rates)), np.int64)
    np.add.at(sums, (sources.port_R[:, None], targets.port_R[None, :]), values)
    return sums


def list_schedule(seconds_PQ: Floats) -> tuple[Floats, float]:
    """Start times [P, Q] (nan for pairs without work) and the makespan of one-port transfers of given lengths."""
    return _Shop(seconds_PQ).run()


class _Shop:
    """State of the simulation, by side (sources, targets). A key is a port's remaining seconds while it is free, -1
    while it is busy or done. Single values live in lists and rows in arrays, as each is faster there."""

    def __init__(self, seconds_PQ: Floats) -> None:
        self.seconds = seconds_PQ.tolist()
        has_work = (seconds_PQ > 0).astype(float)
        self.open = (has_work, np.ascontiguousarray(has_work.T))
        self.left = (seconds_PQ.sum(axis=1).tolist(), seconds_PQ.sum(axis=0).tolist())
        self.pairs_left = (has_work.sum(axis=1).tolist(), has_work.sum(axis=0).tolist())
        self.keys = tuple(
            np.where(np.array(pairs) > 0, left, -1.0) for left, pairs in zip(self.left, self.pairs_left, strict=True)
        )
        self.idle = tuple({port for port, count in enumerate(pairs) if count} for pairs in self.pairs_left)
        self.start = np.full(seconds_PQ.shape, np.nan)
        self.events: list[tuple[float, int, int]] = []

    def run(self) -> tuple[Floats, float]:
        now = 0.0
        while True:
            self._match(0 if len(self.idle[0]) <= len(self.idle[1]) else 1, now)
            if not self.events:
                return self.start, now
            now = self._advance()

    def _match(self, side: int, now: float) -> None:
        """Gives free ports of one side work, the busiest first."""
        left, open_rows, keys = self.left[side], self.open[side], self.keys[1 - side]
        ports = self.idle[side]
        for port in sorted(ports, key=lambda port: (-left[port], port)) if len(ports) > 1 else tuple(ports):
            candidates = keys * open_rows[port]
            partner = int(candidates.argmax())
            if candidates[partner] > 0:
                self._begin(*((port, partner) if side == 0 else (partner, port)), now)

    def _begin(self, source: int, target: int, now: float) -> None:
        seconds = self.seconds[source][target]
        self.open[0][source, target] = self.open[1][target, source] = 0.0
        self.start[source, target] = now
        self.left[0][source] -= seconds
        self.left[1][target] -= seconds
        self.pairs_left[0][source] -= 1
        self.pairs_left[1][target] -= 1
        self.keys[0][source] = self.keys[1][target] = -1.0
        self.idle[0].discard(source)
        self.idle[1].discard(target)
        heapq.heappush(self.events, (now + seconds, source, target))

    def _advance(self) -> float:
        """Ends the transfers that end next, all that end within a tenth of a microsecond together."""
        events, free = self.events, self._free
        now, source, target = heapq.heappop(events)
        free(0, source)
        free(1, target)
        while events and events[0][0] <= now + 1e-7:
            now, source, target = heapq.heappop(events)
            free(0, source)
            free(1, target)
        return now

    def _free(self, side: int, port: int) -> None:
        if self.pairs_left[side][port]:
            self.idle[side].add(port)
            left = self.left[side][port]
            self.keys[side][port] = left if left > 1e-12 else 1e-12
