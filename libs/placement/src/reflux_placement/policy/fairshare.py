"""Owns whose turn it is: the order of the asks within a cycle.

Priority first. Within a priority the queue with the smallest weighted dominant share goes next (dominant resource
fairness, Ghodsi et al., NSDI 2011), compared from the top of the tree of queues downwards (as in hierarchical DRF,
Bhattacharya et al., SoCC 2013, without its rescaling of blocked nodes: a blocked queue is passed over here). Within a
queue the order of submission decides, and behind its first blocked ask, on request, the smallest area.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from reflux_placement.policy.quota import Ledger
from reflux_placement.policy.view import Ask, Queue

Shares = tuple[float, ...]

_CPUS_PER_GPU = 16
"""So many CPUs weigh as much as a GPU where asks with and without GPUs are compared."""


def dominant_share(ledger: Ledger, queue: Queue) -> float:
    """Largest of used / capacity over the resources, divided by the weight of the queue."""
    held = zip(ledger.used[queue.name], ledger.capacity, strict=True)
    return max(used / capacity if capacity else 0.0 for used, capacity in held) / queue.weight


def shares(ledger: Ledger, queue: str) -> Shares:
    """Shares of the queue's path, top queue first."""
    return tuple(dominant_share(ledger, link) for link in reversed(ledger.path(queue)))


def area(ask: Ask) -> float:
    """GPU-seconds of an ask (CPU-seconds for one without GPUs); infinite if it did not say how long it will run."""
    if not ask.expected_seconds:
        return math.inf
    need = ask.gang.total()
    return ask.expected_seconds * (need.gpus or need.millicpus / 1000 / _CPUS_PER_GPU)


def in_order(pending: Iterable[Ask], ledger: Ledger, *, blocked: Callable[[str], bool] | None = None) -> Iterator[Ask]:
    """Yields every ask once, the next one by the shares as they are then: whoever starts an ask charges the ledger.

    Shares only rise while a cycle hands out room, so a queue whose place in the heap is out of date sinks when it comes
    up. O(log queues) per ask.

    Args:
        pending: the asks.
        ledger: what queues hold.
        blocked: whether an ask of a queue was blocked in this cycle. The asks behind it come smallest area first: what
            is short and small fits into gaps and leaves them again (EASY with SAF, Carastan-Santos et al., CCGrid
            2019). None keeps the order of submission.
    """
    by_priority: dict[int, dict[str, _Line]] = {}
    for ask in sorted(pending, key=lambda ask: ask.number):
        by_priority.setdefault(ask.priority, {}).setdefault(ask.queue, _Line()).asks.append(ask)
    for priority in sorted(by_priority, reverse=True):
        queues = by_priority[priority]
        if len(queues) == 1:
            queue, line = next(iter(queues.items()))
            while line.asks and not line.by_area:
                yield line.take(blocked is not None and blocked(queue))
            yield from line.asks
            continue
        heap = [(shares(ledger, queue), line.asks[0].number, queue) for queue, line in queues.items()]
        heapq.heapify(heap)
        while heap:
            known, number, queue = heap[0]
            fresh = shares(ledger, queue)
            if fresh > known:
                heapq.heapreplace(heap, (fresh, number, queue))
                continue
            line = queues[queue]
            yield line.take(blocked is not None and blocked(queue))
            if line.asks:
                heapq.heapreplace(heap, (shares(ledger, queue), line.asks[0].number, queue))
            else:
                heapq.heappop(heap)


@dataclass(slots=True)
class _Line:
    """The asks of one queue and priority: by arrival until one is blocked, by area then."""

    asks: deque[Ask] = field(default_factory=deque)
    by_area: bool = False

    def take(self, blocked: bool) -> Ask:
        if blocked and not self.by_area:
            self.by_area = True
            self.asks = deque(sorted(self.asks, key=lambda ask: (area(ask), ask.number)))
        return self.asks.popleft()
