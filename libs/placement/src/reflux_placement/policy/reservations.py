"""Owns who has a reservation: the first blocked asks of the order, and the oldest one that waited too long.

A reservation is carried from cycle to cycle and binds all asks of its priority or lower, whatever the shares of their
queues are by then. So it is overtaken only by what does not delay it, and its job starts when those that hold its room
have left.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from reflux_placement.gang import Assignment, GangDemand
from reflux_placement.place.misfit import Misfit
from reflux_placement.policy.backfill import expected_end, reserve
from reflux_placement.policy.books import Books
from reflux_placement.policy.claims import Standing, fits_on, stand
from reflux_placement.policy.config import PolicyConfig
from reflux_placement.policy.makeroom import at_least
from reflux_placement.policy.reasons import Reasons
from reflux_placement.policy.view import Ask

MAX_OLDEST = 4
"""Asks that waited too long and are tried for a reservation; those in front may not fit at all."""


class Reserver:
    """Gives reservations out on the books of a cycle."""

    def __init__(self, books: Books, config: PolicyConfig, reasons: Reasons) -> None:
        self._books, self._config, self._reasons = books, config, reasons
        self._never: set[tuple[GangDemand, tuple[str, ...]]] = set()
        """Do not fit beside these reservations when every live job has left either."""

        self._seen: tuple[str, ...] = ()
        self._weakest: str | None = None
        """Of the reservations of `_seen`: most asks of a full cluster only need to know this."""

    def keep(self, standing: Standing) -> None:
        """It stays as long as its time has not passed: whoever was promised room is not overtaken again and again.
        After `patience_seconds` it stays in any case."""
        books, claim, ask = self._books, standing.claim, standing.ask
        late = books.now > claim.due_at and books.now - ask.submitted_at <= self._config.patience_seconds
        if late or not books.can_hold(standing):
            return
        ends = [expected_end(books.live[job], books.now) for job in claim.after if job in books.live]
        claim = replace(claim, due_at=max([books.now, *ends]))
        books.reserved[ask.job] = replace(standing, claim=claim)

    def place(self, ask: Ask) -> Assignment | None:
        """Its reserved room, if that is free: searches within a budget may miss what an earlier one found."""
        standing = self._books.reserved.get(ask.job)
        if standing is None or not fits_on(self._books.room, standing.nodes_K, standing.need_KR):
            return None
        return standing.claim.assignment

    def overdue(self, ask: Ask) -> bool:
        """Whether it waited too long to be overtaken any more."""
        return self._books.now - ask.submitted_at > self._config.patience_seconds

    def reserve(self, ask: Ask) -> None:
        """A reservation while there are slots; one of lower priority makes way. One overdue ask needs no slot."""
        held = self._books.reserved
        if not self._config.reservations or ask.job in held:
            return
        names = tuple(held)
        if names != self._seen:
            self._seen, self._weakest = names, self._weakest_of(list(held.values()))
        if self._weakest is not None and held[self._weakest].ask.priority >= ask.priority:
            return
        self._reserve_beside(ask, [each for each in held.values() if each.job != self._weakest])

    def _weakest_of(self, reserved: Sequence[Standing]) -> str | None:
        """Whose reservation makes way for one of a higher priority; None while a slot is left."""
        overdue = any(self.overdue(each.ask) for each in reserved)
        if len(reserved) - overdue < self._config.reservations:
            return None
        return min(reserved, key=lambda each: (each.ask.priority, -each.ask.number)).job

    def reserve_for_oldest(self, waiting: Sequence[Ask]) -> None:
        """The oldest ask that waited too long has a reservation, however small the shares of other queues are, before
        others of its priority."""
        books = self._books
        overdue = [ask for ask in waiting if self.overdue(ask)] if self._config.reservations else []
        for ask in sorted(overdue, key=lambda ask: (-ask.priority, ask.number))[:MAX_OLDEST]:
            above = [each for each in books.reserved.values() if each.ask.priority > ask.priority]
            if ask.job in books.reserved or self._reserve_beside(ask, above):
                return

    def _reserve_beside(self, ask: Ask, kept: list[Standing]) -> bool:
        """Reserves around the reservations `kept`; others stay if they can do without the same nodes."""
        books = self._books
        key = (ask.gang, tuple(each.job for each in kept))
        if key in self._never:
            return False
        free = books.room.free_NR.clip(min=0).sum(axis=0).tolist()
        smallest = replace(ask, gang=at_least(ask.gang))
        out_of_reach = books.kept(kept)
        result = reserve(books.drain(), smallest, books.now, free, out_of_reach)
        if isinstance(result, Misfit):
            self._never.add(key)
            if not out_of_reach:
                self._reasons.never(ask.gang, result)
            return False
        for each in [each for each in books.reserved.values() if each not in kept]:
            if each.touches(result.nodes_K) or len(books.reserved) > self._config.reservations:
                del books.reserved[each.job]
        tried_at = max((claim.tried_at for claim in books.old_claims if claim.job == ask.job), default=-math.inf)
        books.reserved[ask.job] = stand(replace(result.claim, tried_at=tried_at), ask)
        return True
