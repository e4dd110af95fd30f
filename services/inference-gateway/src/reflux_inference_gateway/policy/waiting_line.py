"""The requests of one tenant that wait, most urgent first."""

import heapq
from dataclasses import dataclass

Rank = tuple[int, float, int]
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
    is_new_group: bool = False
    """Work that the reward queue's depth may hold back; the rest finishes what was begun."""


class WaitingLine:
    """A heap by rank; what was taken out of its middle stays in the heap until it comes up or is the larger part."""

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, str]] = []
        self._entries: dict[str, tuple[Rank, Entry]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, entry: Entry, arrival: int) -> None:
        """Adds an entry; arrivals are numbered by the caller."""
        rank = (-entry.priority, entry.deadline, arrival)
        self._entries[entry.key] = (rank, entry)
        heapq.heappush(self._heap, (rank, entry.key))

    def head(self) -> Rank | None:
        """The rank of the most urgent entry; None when nobody waits."""
        while self._heap and not self._waits(*self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop(self) -> Entry:
        """Takes out the most urgent entry, of which there must be one."""
        assert self.head() is not None
        return self._entries.pop(heapq.heappop(self._heap)[1])[1]

    def remove(self, key: str) -> None:
        """Takes out an entry that waits."""
        del self._entries[key]
        if len(self._heap) > 2 * len(self._entries) + 1:
            self._heap = [(rank, one) for one, (rank, _) in self._entries.items()]
            heapq.heapify(self._heap)

    def last(self) -> tuple[Rank, Entry] | None:
        """The least urgent entry; None when nobody waits."""
        return max(self._entries.values(), key=lambda one: one[0], default=None)

    def _waits(self, rank: Rank, key: str) -> bool:
        return key in self._entries and self._entries[key][0] == rank
