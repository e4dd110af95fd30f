"""Owns one scheduling cycle: replace what was lost, start what fits in order, make room, grow, defragment.

The order of a cycle, and of the actions in its decision:
1. Members on lost nodes are replaced, or their jobs go back to the queue.
2. Claims of the cycle before: room that was freed for a job is withheld until that job starts there.
3. Asks in order (`fairshare`). One inside its quota that fits starts. One that does not fit makes elastic jobs shrink,
   or others stop (`preempt`); or else the first of them gets a reservation (`backfill`) that later asks must not delay.
   An ask that waits for quota blocks nobody.
4. Elastic jobs grow into room that nobody waits for; fragmentation is mended for the first ask that waits for that.
"""

from dataclasses import replace

from reflux_placement.gang import Assignment, GangDemand
from reflux_placement.place.misfit import Misfit
from reflux_placement.policy.books import Books, Delays
from reflux_placement.policy.claims import fits_on
from reflux_placement.policy.config import PolicyConfig
from reflux_placement.policy.elastic import grow
from reflux_placement.policy.fairshare import in_order
from reflux_placement.policy.health import open_nodes
from reflux_placement.policy.locality import held_together
from reflux_placement.policy.makeroom import RoomMaker, at_least
from reflux_placement.policy.quota import NOTHING_PROMISED, Excess, Promised, Row
from reflux_placement.policy.reasons import Reasons
from reflux_placement.policy.reservations import Reserver
from reflux_placement.policy.spares import replace_lost
from reflux_placement.policy.view import Ask, Claim, Decision, Replace, Requeue, View
from reflux_placement.topology import Resources

DEFAULT_CONFIG = PolicyConfig()


def decide(view: View, config: PolicyConfig = DEFAULT_CONFIG) -> Decision:
    """What to do now. Pure and deterministic, apart from `view.room`, a copy of the caller that it may change.

    Room of jobs that are told to stop, shrink or move is not given to anybody in this cycle: it is claimed for whom it
    was freed (`Decision.claims`), who starts in the first cycle that finds it free.

    Raises:
        UnknownLevel: an ask names a level that the topology does not have.
        InvalidQueue: the tree of queues loops.
    """
    return _Cycle(view, config).run()


class _Cycle:
    def __init__(self, view: View, config: PolicyConfig) -> None:
        pending = held_together(view.pending, view.room.topology, view.now, config)
        view = replace(view, pending=pending)
        self._view, self._config = view, config
        self._books = Books(view, explain=config.explain)
        self._maker = RoomMaker(self._books, config)
        self._reasons = Reasons(self._books, explain=config.explain)
        self._reserver = Reserver(self._books, config, self._reasons)
        self._blocked: dict[str, int] = {}
        self._waiting: list[Ask] = []
        """Asks that wait for room, in order."""

        self._starved: list[tuple[Ask, Row]] = []
        """Asks that waited too long for quota: what comes free below the limit is theirs first."""

    def run(self) -> Decision:
        """The whole cycle."""
        books, view = self._books, self._view
        for claim in books.old_claims:
            if claim.evicting:
                self._leaving(claim)
        if view.nodes or view.spares:
            books.room.open_N &= open_nodes(books.room.topology, view.nodes, view.spares)
            self._replace_lost()
        self._keep_claims()
        by_area = self._config.backfill_order == "area"
        pending = [ask for ask in view.pending if not self._settled(ask)]
        for ask in in_order(pending, books.ledger, blocked=self._blocked.__contains__ if by_area else None):
            self._consider(ask)
        self._reserver.reserve_for_oldest(self._waiting)
        if not (self._config.defragmentation and self._defragment()) and self._config.growing:
            self._grow()
        return Decision(tuple(books.actions), self._reasons.waits, books.claims())

    def _settled(self, ask: Ask) -> bool:
        return ask.job in self._books.evicting or ask.job in self._books.room.holdings

    def _replace_lost(self) -> None:
        """Members on lost nodes. A job that goes back to the queue holds its room until it has stopped: replacements
        are looked for again without that room."""
        books, states = self._books, self._view.nodes
        staying = {job: each for job, each in books.live.items() if job not in books.leaving}
        while True:
            room = books.room.copy()
            actions = replace_lost(room, staying, states, self._view.spares)
            stopped = [action for action in actions if isinstance(action, Requeue)]
            if not stopped:
                break
            for action in stopped:
                books.actions.append(action)
                books.recount(action.job, None)
                books.leaving.add(action.job)
                del staying[action.job]
        for action in actions:
            if isinstance(action, Replace):
                books.actions.append(action)
                books.recount(action.job, action.assignment)
                books.busy.add(action.job)
        books.room = room

    # --- claims of the cycle before ---

    def _keep_claims(self) -> None:
        books = self._books
        old = books.old_standing()
        for standing in old:
            if standing.claim.evicting and books.can_hold(standing):
                books.charge(standing.ask, standing.amount)
                books.withhold(standing)
        for standing in list(books.evicting.values()):
            books.give_back(standing.job)
            if fits_on(books.room, standing.nodes_K, standing.need_KR):
                books.charge(standing.ask, standing.amount, -1)
                books.start(standing.ask, standing.claim.assignment, "its room has been freed", backfilled=False)
            else:
                books.withhold(standing)
                self._reasons.being_freed(standing)
        for standing in old:
            if not standing.claim.evicting and not self._excess(standing.ask, at_least(standing.ask.gang)):
                self._reserver.keep(standing)

    def _leaving(self, claim: Claim) -> None:
        """Victims that still hold room were told to go, even if their beneficiary is gone by now."""
        books = self._books
        for job in claim.after:
            if job in claim.keeps:
                books.busy.add(job)
            elif job in books.live and job not in books.leaving:
                books.leaving.add(job)
                books.recount(job, None)

    # --- one ask ---

    def _consider(self, ask: Ask) -> None:
        if self._blocked.get(ask.queue, 0) > self._config.backfill_depth:
            self._reasons.behind(ask)
            return
        gang, excess = ask.gang, self._excess(ask, ask.gang)
        if excess:
            gang = at_least(ask.gang)
            excess = self._excess(ask, gang) if gang is not ask.gang else excess
        if excess:
            self._over_quota(ask, gang, excess)
            return
        found = self._books.find(ask, gang)
        if not isinstance(found, Assignment):
            found = self._reserver.place(ask) or found
        if isinstance(found, Assignment):
            backfilled = bool(self._waiting)
            self._books.start(ask, found, self._reasons.start(found, backfilled), backfilled=backfilled)
            return
        self._block(ask, found)

    def _excess(self, ask: Ask, gang: GangDemand) -> list[Excess]:
        ledger = self._books.ledger
        if not ledger.has_limits and not ledger.has_guarantees:
            return []
        promised = self._promised(ask) if ledger.has_limits else NOTHING_PROMISED
        return ledger.excess(ask.queue, gang.total().row, firm=not ask.preemptible, promised=promised)

    def _promised(self, ask: Ask) -> Promised:
        """What asks will hold that go before this one: with a reservation that binds it, or starved for quota. Of two
        with reservations the older one goes first, and none of them waits for the starved: nobody waits in a circle."""
        books = self._books
        ahead = [(each.ask, each.amount) for each in books.binding(ask)]
        if ask.job in books.reserved:
            rank = (-ask.priority, ask.number)
            ahead = [(other, amount) for other, amount in ahead if (-other.priority, other.number) < rank]
        else:
            ahead += [(other, amount) for other, amount in self._starved if other.priority >= ask.priority]
        sums: dict[str, Row] = {}
        for other, amount in ahead:
            for link in books.ledger.path(other.queue):
                before = sums.get(link.name, (0, 0, 0))
                sums[link.name] = (before[0] + amount[0], before[1] + amount[1], before[2] + amount[2])
        return sums

    def _over_quota(self, ask: Ask, gang: GangDemand, excess: list[Excess]) -> None:
        if self._maker.make_room(ask, excess):
            self._reasons.being_freed(self._books.evicting[ask.job])
            return
        self._reasons.quota(ask, excess)
        ledger, amount = self._books.ledger, gang.total().row
        in_use = any(any(each.over) for each in excess)
        if in_use and self._reserver.overdue(ask) and ledger.could_ever(ask.queue, amount):
            self._starved.append((ask, amount))

    def _block(self, ask: Ask, found: Misfit | Delays) -> None:
        if self._maker.make_room(ask, ()):
            self._reasons.being_freed(self._books.evicting[ask.job])
            return
        self._blocked[ask.queue] = self._blocked.get(ask.queue, 0) + 1
        self._waiting.append(ask)
        self._reserver.reserve(ask)
        self._reasons.blocked(ask, found)

    # --- what is left ---

    def _defragment(self) -> bool:
        """Moves jobs for the first ask with a reservation that waits for lack of shape only; one migration at a time,
        and one search per `defragmentation_seconds`."""
        books, patience = self._books, self._config.defragmentation_seconds
        if any(each.claim.keeps for each in books.evicting.values()):
            return False
        for ask in self._waiting:
            promised = books.reserved.get(ask.job)
            if promised is None or self._reasons.waits[ask.job].cause != "fragmentation":
                continue
            last = max(ask.submitted_at, promised.claim.tried_at)
            if books.now - last < patience or promised.claim.due_at - books.now < patience:
                return False
            if self._excess(ask, at_least(ask.gang)):
                continue
            if self._maker.defragment(ask):
                self._reasons.being_freed(books.evicting[ask.job])
                return True
            books.reserved[ask.job] = replace(promised, claim=replace(promised.claim, tried_at=books.now))
            return False
        return False

    def _grow(self) -> None:
        books = self._books
        if any(ask.job not in books.reserved for ask in self._waiting):
            return
        elastic = {
            job: books.live[job]
            for job, holding in books.room.holdings.items()
            if holding.is_elastic and job in books.live and job not in books.leaving and job not in books.busy
        }
        if elastic:
            nodes = sorted({node for each in books.reserved.values() for node in each.nodes_K.tolist()})
            books.actions.extend(grow(books.room, elastic, reserved=nodes, may_hold=self._may_hold))

    def _may_hold(self, queue: str, more: Resources) -> bool:
        return not self._books.ledger.excess(queue, more.row, firm=False)
