"""The requests of one tenant that wait, most urgent first."""

import heapq
from dataclasses import dataclass

_Rank = tuple[int, float, int]
"""Minus the priority, deadline, number of arrival."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A request that waits."""

    key: str
    """Unique among those that wait."""
    tenant: str = ""
    cost: float = 1.0
    """What it takes of its tenant's share, in tokens."""
    priority: int = 0
    """Higher goes first among the tenant's own; it buys nothing from other tenants."""
    deadline: float = float("inf")
    """Moment of the caller's clock after which nobody wants the answer; earlier ones go first at equal priority."""
    arrival: int = 0
    """Its number in the order of arrival; what came first goes first among equals."""


class WaitingLine:
    """A heap by rank; what was taken out of its middle stays in the heap until it comes up or is the larger part."""

    def __init__(self) -> None:
        self._heap: list[tuple[_Rank, str]] = []
        self._entries: dict[str, tuple[_Rank, Entry]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, entry: Entry) -> None:
        """Adds an entry."""
        rank = (-entry.priority, entry.deadline, entry.arrival)
        self._entries[entry.key] = (rank, entry)
        heapq.heappush(self._heap, (rank, entry.key))

    def pop(self) -> Entry:
        """Takes out the most urgent entry, of which there must be one."""
        while not self._waits(*self._heap[0]):
            heapq.heappop(self._heap)
        return self._entries.pop(heapq.heappop(self._heap)[1])[1]

    def remove(self, key: str) -> None:
        """Takes out an entry that waits."""
        del self._entries[key]
        if len(self._heap) > 2 * len(self._entries) + 1:
            self._heap = [(rank, one) for one, (rank, _) in self._entries.items()]
            heapq.heapify(self._heap)

    def last(self) -> Entry:
        """The least urgent entry, of which there must be one."""
        return max(self._entries.values(), key=lambda one: one[0])[1]

    def _waits(self, rank: _Rank, key: str) -> bool:
        return key in self._entries and self._entries[key][0] == rank
