"""`drop`: never waits for a straggler; a group that arrives too old is discarded and its place refilled."""

from collections.abc import Iterable, Sequence
from typing import ClassVar

from reflux_trainer.staleness.base import StalenessPolicy, Ticket


class Drop(StalenessPolicy):
    """The oldest arrived groups that keep the bound.

    Discarding favours what is quick: short answers and easy verifications (docs/training.md says when that matters).
    """

    name: ClassVar[str] = "drop"

    def stale(self, tickets: Iterable[Ticket], version: int) -> list[int]:
        return [ticket.index for ticket in tickets if ticket.arrived and self.due(ticket) < version]

    def choose(self, tickets: Sequence[Ticket], version: int) -> list[int] | None:
        fresh = [ticket for ticket in tickets if ticket.arrived and self.due(ticket) >= version]
        first = sorted(fresh, key=lambda ticket: (ticket.version, ticket.index))[: self._size]
        return [ticket.index for ticket in first] if len(first) == self._size else None
