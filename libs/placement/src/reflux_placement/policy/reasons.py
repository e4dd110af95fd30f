"""Owns why every pending ask waits: a cause, and one sentence for people."""

import math

from reflux_placement.gang import Assignment, GangDemand
from reflux_placement.place.misfit import Misfit
from reflux_placement.place.search import find_place
from reflux_placement.policy.backfill import FEASIBLE
from reflux_placement.policy.books import Books, Delays
from reflux_placement.policy.claims import Standing
from reflux_placement.policy.quota import Excess
from reflux_placement.policy.view import Ask, Wait
from reflux_placement.room import Room
from reflux_placement.topology import Topology


class Reasons:
    """Collects the waits of a cycle. Sentences that many asks share are made once."""

    def __init__(self, books: Books, *, explain: bool) -> None:
        self.waits: dict[str, Wait] = {}
        self._books, self._explain = books, explain
        self._sentences: dict[int, tuple[Misfit, str]] = {}
        self._never: set[GangDemand] = set()
        self._away: dict[GangDemand, str] = {}

    def start(self, assignment: Assignment, backfilled: bool) -> str:
        """Why a job starts where it does."""
        if not self._explain:
            return ""
        where = _where(self._books.room.topology, assignment)
        return f"{where}{', in front of jobs that it does not delay' if backfilled else ''}"

    def behind(self, ask: Ask) -> None:
        """It was not looked at."""
        self._wait(ask, "behind", f"queue {ask.queue} has enough jobs that wait in front of it")

    def quota(self, ask: Ask, excess: list[Excess]) -> None:
        """It may not hold that much."""
        self._wait(ask, "quota", excess[0].sentence)

    def being_freed(self, standing: Standing) -> None:
        """Its room is on the way."""
        if not self._explain:
            self._wait(standing.ask, "resources", "")
            return
        left = sum(job in self._books.room.holdings for job in standing.claim.after)
        where = _where(self._books.room.topology, standing.claim.assignment)
        self._wait(standing.ask, "resources", f"{where} are kept for it; {left} jobs are giving room back")

    def never(self, gang: GangDemand, misfit: Misfit) -> None:
        """It would not fit if every live job had left; is that for want of nodes that take no work now?"""
        room = self._books.room
        self._never.add(gang)
        if room.open_N.all() or gang in self._away:
            return
        empty = Room(room.topology)
        if isinstance(find_place(empty, gang, limits=FEASIBLE), Misfit):
            return
        empty.open_N = room.open_N
        if isinstance(find_place(empty, gang, limits=FEASIBLE), Misfit):
            self._away[gang] = f"nodes that are away or held back would be needed: {misfit.sentence}"

    def blocked(self, ask: Ask, found: Misfit | Delays) -> None:
        """It does not fit now."""
        if self._away and ask.gang in self._away:
            self._wait(ask, "nodes_away", self._away[ask.gang])
        elif isinstance(found, Delays):
            self._wait(ask, "reservation", self._delay(found))
        else:
            in_pieces = self._books.enough_in_sum(ask.gang) and ask.gang not in self._never
            cause = "fragmentation" if in_pieces else "resources"
            if not self._explain:
                self._wait(ask, cause, "")
                return
            mine = self._books.reserved.get(ask.job)
            promise = f"; {self._promise(mine)}" if mine is not None else ""
            self._wait(ask, cause, f"{self._sentence(found)}{promise}")

    def _wait(self, ask: Ask, cause: str, sentence: str) -> None:
        self.waits[ask.job] = Wait(ask.job, cause, sentence if self._explain else "")  # pyright: ignore[reportArgumentType]

    def _sentence(self, misfit: Misfit) -> str:
        known = self._sentences.get(id(misfit))
        if known is None:
            known = self._sentences[id(misfit)] = (misfit, misfit.sentence)
        return known[1]

    def _delay(self, found: Delays) -> str:
        if not self._explain:
            return ""
        first = found.first
        return f"it would fit, but delay {first.job}: {self._promise(first)}"

    def _promise(self, standing: Standing) -> str:
        where = _where(self._books.room.topology, standing.claim.assignment)
        seconds = standing.claim.due_at - self._books.now
        when = f" within {seconds:.0f} s" if math.isfinite(seconds) else " at a time that nobody knows"
        return f"{where} are reserved and come free{when}"


def _where(topology: Topology, assignment: Assignment) -> str:
    domain = topology.domains_by_level[topology.tightness(assignment.level)][assignment.domain]
    return f"{len(assignment.used_nodes())} nodes of {domain.level} {domain.label}"
