"""`wait`: batches in the order of prompt indices. What a batch is made of depends on rewards only, never on timing."""

from collections.abc import Sequence
from typing import ClassVar

from reflux_trainer.staleness.base import StalenessPolicy, Ticket


class Wait(StalenessPolicy):
    """Waits for the next index, whatever else has arrived.

    The bound holds by the number of open prompts: at issue fewer than (max_lag + 1) * groups_per_step prompts lie
    before one, that is max_lag whole batches at most.
    """

    name: ClassVar[str] = "wait"

    def choose(self, tickets: Sequence[Ticket], version: int) -> list[int] | None:
        first = sorted(tickets, key=lambda ticket: ticket.index)[: self._size]
        if len(first) < self._size or not all(ticket.arrived for ticket in first):
            return None
        return [ticket.index for ticket in first]
