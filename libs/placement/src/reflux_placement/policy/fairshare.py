"""Owns whose turn it is: the order of the asks within a cycle.

Priority first. Within a priority the queue with the smallest weighted dominant share goes next (dominant resource
fairness, Ghodsi et al., NSDI 2011), compared from the top of the tree of queues downwards (as in hierarchical DRF,
Bhattacharya et al., SoCC 2013, without its rescaling of blocked nodes: a blocked queue is passed over here). Within a
queue the order of submission decides.
"""

import heapq
from collections import deque
from collections.abc import Iterable, Iterator

from reflux_placement.policy.quota import Ledger
from reflux_placement.policy.view import Ask, Queue

Shares = tuple[float, ...]


def dominant_share(ledger: Ledger, queue: Queue) -> float:
    """Largest of used / capacity over the resources, divided by the weight of the queue."""
    held = zip(ledger.used[queue.name], ledger.capacity, strict=True)
    return max(used / capacity if capacity else 0.0 for used, capacity in held) / queue.weight


def shares(ledger: Ledger, queue: str) -> Shares:
    """Shares of the queue's path, top queue first."""
    return tuple(dominant_share(ledger, link) for link in reversed(ledger.path(queue)))


def in_order(pending: Iterable[Ask], ledger: Ledger) -> Iterator[Ask]:
    """Yields every ask once, the next one by the shares as they are then: whoever starts an ask charges the ledger.

    Shares only rise while a cycle hands out room, so a queue whose place in the heap is out of date sinks when it comes
    up. O(log queues) per ask.
    """
    by_priority: dict[int, dict[str, deque[Ask]]] = {}
    for ask in sorted(pending, key=lambda ask: ask.number):
        by_priority.setdefault(ask.priority, {}).setdefault(ask.queue, deque()).append(ask)
    for priority in sorted(by_priority, reverse=True):
        queues = by_priority[priority]
        if len(queues) == 1:
            yield from next(iter(queues.values()))
            continue
        heap = [(shares(ledger, queue), fifo[0].number, queue) for queue, fifo in queues.items()]
        heapq.heapify(heap)
        while heap:
            known, number, queue = heap[0]
            fresh = shares(ledger, queue)
            if fresh > known:
                heapq.heapreplace(heap, (fresh, number, queue))
                continue
            fifo = queues[queue]
            yield fifo.popleft()
            if fifo:
                heapq.heapreplace(heap, (shares(ledger, queue), fifo[0].number, queue))
            else:
                heapq.heappop(heap)
