"""Owns the choice of victims: a set whose departure lets the whole gang in where its constraints want it, or nobody.

Counting freed GPUs is not enough (kueue#5243: eight GPUs over four nodes do not help a pod of eight), so every
candidate set is judged by the placement itself. The search goes domain by domain, from single nodes up to the level
that the gang must stay inside; in each it takes the cheapest prefix of the victims there that is enough, drops those
whose room the gang does not use, then those that it can do without, dearest first. The result cannot be made smaller.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from reflux_placement.gang import Assignment, GangDemand
from reflux_placement.place.search import DEFAULT, Limits, find_place
from reflux_placement.policy.backfill import FEASIBLE
from reflux_placement.policy.claims import held_on, needs_by_node
from reflux_placement.policy.quota import Excess, Ledger, principal
from reflux_placement.policy.view import Ask, Live
from reflux_placement.room import Room
from reflux_placement.topology import Domain, Ints

MAX_DROPS = 24
"""Victims that the search tries to do without, one by one."""


@dataclass(frozen=True, slots=True)
class Victim:
    """A job that may be stopped. `lost_seconds` = GPUs x time since its last checkpoint."""

    job: str
    live: Live
    lost_seconds: float


@dataclass(frozen=True, eq=False, slots=True)
class Eviction:
    """Victims as one set, where the beneficiary goes then, and the work that is lost in GPU-seconds."""

    victims: tuple[Victim, ...]
    assignment: Assignment

    @property
    def lost_seconds(self) -> float:
        """Work of all victims since their last checkpoints."""
        return sum(victim.lost_seconds for victim in self.victims)

    @property
    def rank(self) -> tuple[float, int, int, tuple[str, ...]]:
        """Less lost work first, then fewer victims, then lower priorities."""
        priorities = sum(victim.live.ask.priority for victim in self.victims)
        return (self.lost_seconds, len(self.victims), priorities, tuple(sorted(v.job for v in self.victims)))


def may_stop(ask: Ask, live: Live, ledger: Ledger, now: float) -> bool:
    """Whether `live` may make way for `ask`: it has run for its minimum and is preemptible; and it has a lower priority
    or its queue borrows what the queue of `ask` is guaranteed. A queue inside its guarantee loses nothing to others."""
    other = live.ask
    if not other.preemptible or now - live.started_at < other.min_run_seconds:
        return False
    if other.queue == ask.queue:
        return other.priority < ask.priority
    mine, theirs = ledger.below_common(ask.queue, other.queue)
    amount = ask.gang.least_total().row
    if not all(ledger.borrows(queue, principal(amount)) for queue in theirs):
        return False
    entitled = bool(mine and theirs) and ledger.within_guarantee(mine[-1], amount)
    return entitled or other.priority < ask.priority


def victims_for(ask: Ask, room: Room, live: Mapping[str, Live], ledger: Ledger, now: float) -> list[Victim]:
    """All jobs that may make way for an ask, cheapest first."""
    found = []
    for job, each in live.items():
        holding = room.holdings.get(job)
        if holding is not None and may_stop(ask, each, ledger, now):
            lost = max(0.0, now - each.saved_at) * holding.amount.gpus
            found.append(Victim(job, each, lost))
    found.sort(key=_cheapest)
    return found


def _cheapest(victim: Victim) -> tuple[float, int, float, int]:
    ask = victim.live.ask
    return (victim.lost_seconds, ask.priority, -victim.live.started_at, -ask.number)


class VictimSearch:
    """One search over `room`, where nodes of other jobs' claims are closed. `excess` are the bounds of queues that the
    victims have to make up for."""

    def __init__(
        self, room: Room, ask: Ask, victims: Sequence[Victim], ledger: Ledger, excess: Sequence[Excess]
    ) -> None:
        self._room, self._ask, self._gang, self._ledger, self._excess = room, ask, ask.gang, ledger, excess
        self._kind = principal(ask.gang.least_total().row)
        self._victims = victims

    def best(self, num_domains: int) -> Eviction | None:
        """The cheapest set found, trying `num_domains` domains per level; None if no set helps."""
        everywhere = self._in_domain(self._victims)
        if not self._enough_in_sum(everywhere) or not self._fits(everywhere, None):
            return None
        found: Eviction | None = None
        for domain, here in self._domains(everywhere, num_domains):
            eviction = self._cheapest_in(domain, here)
            if eviction is not None and (found is None or eviction.rank < found.rank):
                found = eviction
        if found is None:
            return None
        return Eviction(found.victims, self._fits(found.victims, None, limits=DEFAULT) or found.assignment)

    def _enough_in_sum(self, victims: Sequence[Victim]) -> bool:
        """A quick bound: the amounts that are free or would be."""
        sums = self._room.usable_NR().clip(min=0).sum(axis=0)
        for victim in victims:
            sums += self._room.holdings[victim.job].amount.row
        return bool((sums >= self._gang.least_total().row).all())

    def _fits(
        self, victims: Sequence[Victim], domain: Domain | None, *, limits: Limits = FEASIBLE
    ) -> Assignment | None:
        """Where the gang goes when these have left, inside the domain; None if nowhere or over a bound."""
        if not self._bounds_kept(victims):
            return None
        room = self._room.copy()
        if domain is not None:
            room.open_N[: domain.start] = room.open_N[domain.stop :] = False
        for victim in victims:
            holding = room.holdings[victim.job]
            np.add.at(room.free_NR, holding.node_M, holding.need_MR)
        found = find_place(room, self._gang, limits=limits)
        return found if isinstance(found, Assignment) else None

    def _bounds_kept(self, victims: Sequence[Victim]) -> bool:
        """Whether what the victims hold below each exceeded queue makes up for the excess."""
        for excess in self._excess:
            freed = [0, 0, 0]
            for victim in victims:
                if any(link.name == excess.queue for link in self._ledger.path(victim.live.ask.queue)):
                    amount = self._room.holdings[victim.job].amount.row
                    freed = [have + more for have, more in zip(freed, amount, strict=True)]
            if any(have < over for have, over in zip(freed, excess.over, strict=True)):
                return False
        return True

    def _domains(self, victims: Sequence[Victim], count: int) -> Iterator[tuple[Domain, list[Victim]]]:
        """Domains that could hold the gang if all victims left, with the victims there: per level the most promising
        `count` by a bound on the lost work. A bound of a queue may need victims from anywhere."""
        topology, kind = self._room.topology, self._kind
        need = self._gang.least_total().row[kind]
        free_N = np.where(self._room.open_N, self._room.free_NR[:, kind], 0).clip(min=0)
        members = _Members(self._room, victims, kind)
        for level in range(topology.tightness(self._gang.required_level) + 1):
            free_D = topology.sums(free_N, level)
            rated: list[tuple[float, int, list[Victim]]] = []
            for index, held in members.shares(topology.domain_LN[level], free_D, need, 4 * count).items():
                held.sort(key=lambda each: (each[0].lost_seconds / max(each[1], 1), _cheapest(each[0])))
                rated.append((_bound(held, need - int(free_D[index])), index, [victim for victim, _ in held]))
            rated.sort(key=lambda each: each[:2])
            for _, index, here in rated[:count]:
                yield topology.domains_by_level[level][index], here
        if self._excess:
            yield topology.domains_by_level[-1][0], list(victims)

    def _in_domain(self, victims: Sequence[Victim]) -> list[Victim]:
        """Those that may leave one after the other: a queue inside its guarantee stops giving."""
        freed: dict[str, int] = {}
        allowed: list[Victim] = []
        for victim in victims:
            _, theirs = self._ledger.below_common(self._ask.queue, victim.live.ask.queue)
            if all(self._ledger.borrows(queue, self._kind, freed.get(queue.name, 0)) for queue in theirs):
                allowed.append(victim)
                amount = self._room.holdings[victim.job].amount.row[self._kind]
                for queue in theirs:
                    freed[queue.name] = freed.get(queue.name, 0) + amount
        return allowed

    def _cheapest_in(self, domain: Domain, here: list[Victim]) -> Eviction | None:
        """The smallest sufficient prefix of the victims of a domain, thinned out."""
        here = self._in_domain(here)
        place = self._fits(here, domain)
        if place is None:
            return None
        low, high = 1, len(here)
        while low < high:
            middle = (low + high) // 2
            found = self._fits(here[:middle], domain)
            low, high, place = (low, middle, found) if found is not None else (middle + 1, high, place)
        chosen = self._needed(here[:high], place)
        for victim in sorted(chosen, key=_cheapest, reverse=True)[:MAX_DROPS]:
            fewer = [each for each in chosen if each is not victim]
            found = self._fits(fewer, domain)
            if found is not None:
                chosen, place = fewer, found
        return Eviction(tuple(chosen), place) if chosen else None

    def _needed(self, victims: Sequence[Victim], place: Assignment) -> list[Victim]:
        """Those whose room the gang would use, and those that a bound asks for."""
        return needed(self._room, self._gang, victims, place, self._bounds_kept)


class _Members:
    """X members of the victims as arrays: their victim, node, amount, and their share of the victim's lost work."""

    def __init__(self, room: Room, victims: Sequence[Victim], kind: int) -> None:
        self._victims = victims
        holdings = [room.holdings[victim.job] for victim in victims]
        sizes = [len(holding.node_M) for holding in holdings]
        self._victim_X = np.repeat(np.arange(len(victims)), sizes)
        self._node_X = np.concatenate([holding.node_M for holding in holdings])
        self._amount_X = np.concatenate([holding.need_MR[:, kind] for holding in holdings])
        totals = np.bincount(self._victim_X, self._amount_X, minlength=len(victims)).clip(min=1)
        lost = np.array([victim.lost_seconds for victim in victims])
        self._lost_X = (lost / totals)[self._victim_X] * self._amount_X

    def shares(self, domain_N: Ints, free_D: Ints, need: int, count: int) -> dict[int, list[tuple[Victim, int]]]:
        """Victims and what each would free, for the `count` domains that seem cheapest of those where `need` could come
        free (by the mean loss of a freed unit)."""
        domain_X = domain_N[self._node_X]
        inside_X = domain_X >= 0
        held_D = np.bincount(domain_X[inside_X], self._amount_X[inside_X], minlength=len(free_D))
        lost_D = np.bincount(domain_X[inside_X], self._lost_X[inside_X], minlength=len(free_D))
        touched_D = np.bincount(domain_X[inside_X], minlength=len(free_D)) > 0
        possible = np.flatnonzero(touched_D & (free_D + held_D >= need))
        price = (need - free_D[possible]).clip(min=0) * lost_D[possible] / held_D[possible].clip(min=1)
        best = np.sort(possible[np.argsort(price, kind="stable")[:count]])
        shares: dict[int, dict[int, int]] = {int(index): {} for index in best}
        for x in np.flatnonzero(inside_X & np.isin(domain_X, best)).tolist():
            held = shares[int(domain_X[x])]
            victim = int(self._victim_X[x])
            held[victim] = held.get(victim, 0) + int(self._amount_X[x])
        return {
            index: [(self._victims[victim], amount) for victim, amount in held.items()]
            for index, held in shares.items()
        }


def needed(
    room: Room,
    gang: GangDemand,
    victims: Sequence[Victim],
    place: Assignment,
    enough: Callable[[Sequence[Victim]], bool],
) -> list[Victim]:
    """Leaves out, from the last to the first, every victim without whom the assignment still fits."""
    nodes_K, need_KR = needs_by_node(gang, place)
    short_KR: Ints = need_KR - room.free_NR[nodes_K] - held_on(room, [v.job for v in victims], nodes_K)
    chosen = list(victims)
    for victim in reversed(victims):
        without_KR = short_KR + held_on(room, [victim.job], nodes_K)
        fewer = [each for each in chosen if each is not victim]
        if (without_KR <= 0).all() and enough(fewer):
            chosen, short_KR = fewer, without_KR
    return chosen


def _bound(held: Sequence[tuple[Victim, int]], missing: int) -> float:
    """Lost work of freeing `missing` units at the best price per unit (the fractional knapsack)."""
    lost = 0.0
    for victim, amount in held:
        if missing <= 0:
            break
        lost += victim.lost_seconds * min(1.0, missing / max(amount, 1))
        missing -= amount
    return lost
