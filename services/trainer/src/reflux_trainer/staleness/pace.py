"""`pace`: what has arrived is trained on, the oldest first; nothing is discarded and nothing exceeds the bound."""

from collections.abc import Sequence
from typing import ClassVar

from reflux_trainer.staleness.base import StalenessPolicy, Ticket


class Pace(StalenessPolicy):
    """Earliest due first, with slack for those that are still out.

    A batch at version v is taken as soon as what it leaves behind can still be trained in time: of the open prompts at
    most j * groups_per_step may be due by version v + j, for every j >= 0. Under `max_open` that can always be reached
    by waiting (by induction: it holds for one more j before the batch), so that no group ever misses its bound.
    """

    name: ClassVar[str] = "pace"

    def choose(self, tickets: Sequence[Ticket], version: int) -> list[int] | None:
        ready = sorted((ticket for ticket in tickets if ticket.arrived), key=self._urgency)[: self._size]
        if len(ready) < self._size:
            return None
        taken = {ticket.index for ticket in ready}
        left = [self.due(ticket) for ticket in tickets if ticket.index not in taken]
        for ahead in range(self._max_lag):
            if sum(due <= version + ahead for due in left) > ahead * self._size:
                return None
        return [ticket.index for ticket in ready]

    def _urgency(self, ticket: Ticket) -> tuple[int, int]:
        return self.due(ticket), ticket.index
