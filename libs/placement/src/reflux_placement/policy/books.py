"""Owns what one cycle changes: room, use per queue, claims, the actions so far, and which shapes are known not to fit.

Until elastic jobs grow at the end, room only shrinks within a cycle. So a shape that did not fit is not searched again;
the key is the whole gang with all its constraints (KAI's cache once left the topology out), and the claims that bind
the ask.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from reflux_placement.gang import Assignment, GangDemand
from reflux_placement.place.misfit import Misfit
from reflux_placement.place.search import find_place
from reflux_placement.policy.backfill import Drain, Kept, ends_before
from reflux_placement.policy.claims import Standing, blocked, fits_on, stand
from reflux_placement.policy.prescreen import Prescreen
from reflux_placement.policy.quota import Ledger, Row
from reflux_placement.policy.view import Action, Ask, Claim, Live, Start, View
from reflux_placement.room import Holding, Room, member_needs
from reflux_placement.topology import Resources

_FEW = 2


@dataclass(frozen=True, slots=True)
class Delays:
    """It would fit, but in room that is reserved for these jobs."""

    first: Standing


Found = Assignment | Misfit | Delays


class Books:
    """The state of a cycle; `room` is the one of the view."""

    def __init__(self, view: View, *, explain: bool = True) -> None:
        self.view, self.now, self._explain = view, view.now, explain
        self.room: Room = view.room
        self.ledger = Ledger(view.queues, Resources(*self.room.topology.capacity_NR.sum(axis=0).tolist()))
        self.live: dict[str, Live] = dict(view.live)
        self.leaving: set[str] = set()
        """Live jobs that were told to end."""

        self.busy: set[str] = set()
        """Live jobs that an action changes already; nothing else is asked of them."""

        self.old_claims = [self._without_gone(claim) for claim in view.claims]
        self.actions: list[Action] = []
        self.evicting: dict[str, Standing] = {}
        self.reserved: dict[str, Standing] = {}
        self._withheld: dict[str, Kept] = {}
        self._misfits: dict[GangDemand, Misfit] = {}
        self._delays: dict[tuple[GangDemand, tuple[str, ...]], Delays] = {}
        self._blocked: dict[tuple[Standing, ...], Kept] = {}
        """Amounts that reservations block; who they wait for does not change what it holds within a cycle."""

        self._drain: Drain | None = None
        self._prescreen: Prescreen | None = None
        self._prescreen_is_stale = False
        self._sums: Resources | None = None
        self._counted = self._must_count()
        if self._counted:
            self._charge_live()

    def _without_gone(self, claim: Claim) -> Claim:
        """A job that has left is forgotten: when it starts again, it is not the one that was waited for."""
        after = tuple(job for job in claim.after if job in self.room.holdings)
        return claim if after == claim.after else replace(claim, after=after)

    def _must_count(self) -> bool:
        """Whether the use of queues matters in this cycle: several wait, or one has a bound."""
        queues, pending = self.view.queues, self.view.pending
        bounded = any(queue.limit is not None or any(queue.guaranteed.row) for queue in queues.values())
        return bounded or any(ask.queue != pending[0].queue for ask in pending)

    def _charge_live(self) -> None:
        sums: dict[tuple[str, bool], list[int]] = {}
        for job, each in self.live.items():
            holding = self.room.holdings.get(job)
            if holding is not None:
                total = sums.setdefault((each.ask.queue, each.ask.preemptible), [0, 0, 0])
                amount = holding.amount
                total[0] += amount.gpus
                total[1] += amount.millicpus
                total[2] += amount.memory_bytes
        for (queue, preemptible), (gpus, millicpus, memory_bytes) in sums.items():
            self.ledger.charge(queue, (gpus, millicpus, memory_bytes), firm=not preemptible)

    @cached_property
    def lowest_priority(self) -> int | None:
        """Of the live jobs that may be preempted at all."""
        return min((each.ask.priority for each in self.view.live.values() if each.ask.preemptible), default=None)

    def charge(self, ask: Ask, amount: Row, sign: int = 1) -> None:
        """Counts room that a job got or gives back."""
        if self._counted:
            self.ledger.charge(ask.queue, amount, firm=not ask.preemptible, sign=sign)

    def recount(self, job: str, kept: Assignment | None, before: Holding | None = None) -> None:
        """Counts a live job as holding `kept` from now on, None for nothing, instead of what it holds (or held)."""
        live, holding = self.live.get(job), before or self.room.holdings.get(job)
        if self._counted and live is not None and holding is not None:
            self.charge(live.ask, holding.amount.row, -1)
            if kept is not None:
                gpus, millicpus, memory_bytes = member_needs(holding.demand, kept)[1].sum(axis=0).tolist()
                self.charge(live.ask, (gpus, millicpus, memory_bytes))

    # --- claims ---

    def binding(self, ask: Ask) -> list[Standing]:
        """Reservations that an ask must not delay: of its priority or higher, unless it ends before."""
        return [
            each
            for each in self.reserved.values()
            if each.ask is not ask
            and each.ask.priority >= ask.priority
            and not ends_before(ask, self.now, each.claim.due_at)
        ]

    def old_standing(self) -> list[Standing]:
        """The claims of the cycle before whose jobs still wait, those of preemptions first."""
        pending = {ask.job: ask for ask in self.view.pending} if self.old_claims else {}
        alive = [stand(claim, pending[claim.job]) for claim in self.old_claims if claim.job in pending]
        return sorted(alive, key=lambda each: (not each.claim.evicting, -each.ask.priority, each.ask.number))

    def withhold(self, standing: Standing) -> None:
        """Keeps the room of a claim whose victims are leaving out of everybody's reach."""
        nodes_K, amounts_KR = blocked(self.room, [standing])
        self.room.free_NR[nodes_K] -= amounts_KR
        self._withheld[standing.job] = (nodes_K, amounts_KR)
        self.evicting[standing.job] = standing
        self.reserved.pop(standing.job, None)
        self._drain = self._sums = None

    def give_back(self, job: str) -> None:
        """Undoes `withhold`."""
        nodes_K, amounts_KR = self._withheld.pop(job)
        self.room.free_NR[nodes_K] += amounts_KR
        del self.evicting[job]

    def can_hold(self, standing: Standing) -> bool:
        """Whether a claim can still be met once its jobs have left, besides those that are withheld already."""
        nodes_K, amounts_KR = blocked(self.room, [standing])
        return fits_on(self.room, nodes_K, amounts_KR)

    def kept(self, reserved: Iterable[Standing]) -> list[Kept]:
        """Room that claims and these reservations will need beyond what is withheld now."""
        rest: list[Kept] = []
        for each in self.evicting.values():
            nodes_K, amounts_KR = self._withheld[each.job]
            rest.append((nodes_K, each.need_KR - amounts_KR))
        return rest + [(each.nodes_K, each.need_KR) for each in reserved]

    def drain(self) -> Drain:
        """The departures of the live jobs, and of those that this cycle started."""
        if self._drain is None:
            self._drain = Drain(self.room, self.live, self.now, self.leaving)
        return self._drain

    def claims(self) -> tuple[Claim, ...]:
        """What the next cycle takes in."""
        return tuple(each.claim for each in [*self.evicting.values(), *self.reserved.values()])

    # --- places ---

    def find(self, ask: Ask, gang: GangDemand) -> Found:
        """A place that delays no reservation that binds the ask. `gang` is the ask's, or a smaller one."""
        known = self._misfits.get(gang)
        if known is not None:
            return known
        if self._delays:
            delays = self._delays.get((gang, tuple(each.job for each in self.binding(ask))))
            if delays is not None:
                return delays
        found = self._search(gang)
        if isinstance(found, Misfit):
            self._misfits[gang] = found
            return found
        binding = self.binding(ask) if self.reserved else []
        if not any(each.touches(found.used_nodes()) for each in binding):
            return found
        outside = find_place(self.outside(binding), gang)
        if isinstance(outside, Assignment):
            return outside
        delays = self._delays[gang, tuple(each.job for each in binding)] = Delays(binding[0])
        return delays

    def _search(self, gang: GangDemand) -> Assignment | Misfit:
        """`find_place` behind the quick proof, whose bounds are renewed once they have let a misfit through. For a few
        asks the bounds cost more than they save."""
        if len(self.view.pending) <= _FEW:
            return find_place(self.room, gang)
        if self._prescreen is None:
            self._prescreen, self._prescreen_is_stale = Prescreen(self.room, explain=self._explain), False
        found = self._prescreen.hopeless(gang) or find_place(self.room, gang)
        if isinstance(found, Misfit) and self._prescreen_is_stale:
            self._prescreen = None
        return found

    def enough_in_sum(self, gang: GangDemand) -> bool:
        """Whether the open nodes together have what the gang needs at least."""
        if self._sums is None:
            gpus, millicpus, memory_bytes = self.room.usable_NR().clip(min=0).sum(axis=0).tolist()
            self._sums = Resources(gpus, millicpus, memory_bytes)
        return gang.least_total().fits_in(self._sums)

    def outside(self, binding: Sequence[Standing]) -> Room:
        """The room less what these reservations need."""
        room = self.room.copy()
        key = tuple(binding)
        if key not in self._blocked:
            self._blocked[key] = blocked(room, binding)
        nodes_K, amounts_KR = self._blocked[key]
        room.free_NR[nodes_K] = np.maximum(room.free_NR[nodes_K] - amounts_KR, 0)
        return room

    def off_limits(self, ask: Ask) -> Room:
        """The room with every node of a binding reservation closed: preemption must not reshuffle them."""
        room = self.room.copy()
        for each in self.binding(ask):
            room.open_N[each.nodes_K] = False
        return room

    def start(self, ask: Ask, assignment: Assignment, why: str, *, backfilled: bool) -> None:
        """Books a start; reservations of lower priority that it cuts into are looked for again."""
        holding = self.room.take(ask.job, ask.gang, assignment)
        self._prescreen_is_stale, self._sums = True, None
        self.charge(ask, holding.amount.row)
        self.live[ask.job] = Live(ask=ask, started_at=self.now, saved_at=self.now)
        self.busy.add(ask.job)
        self.reserved.pop(ask.job, None)
        self.actions.append(Start(ask.job, assignment, why, backfilled))
        self._amend_reservations(ask, assignment)

    def _amend_reservations(self, ask: Ask, assignment: Assignment) -> None:
        """Reservations whose room was cut into: they wait for a job that ends in time, too; otherwise they are void
        when what they need does not come free any more."""
        if not self.reserved:
            return
        used = assignment.used_nodes()
        for each in [each for each in self.reserved.values() if each.touches(used)]:
            if ends_before(ask, self.now, each.claim.due_at):
                longer = replace(each.claim, after=(*each.claim.after, ask.job))
                self.reserved[each.job] = replace(each, claim=longer)
            elif not self.can_hold(each):
                del self.reserved[each.job]
