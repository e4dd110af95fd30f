"""Owns making room for an ask that does not fit: elastic jobs shrink first (no work is lost), then others stop.

Migration is the last resort, for an ask that only fragmentation keeps waiting and that nobody may be stopped for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from reflux_placement.gang import Assignment, GangDemand
from reflux_placement.policy.books import Books
from reflux_placement.policy.claims import stand
from reflux_placement.policy.config import PolicyConfig
from reflux_placement.policy.defrag import Limits, Plan, plan
from reflux_placement.policy.elastic import shrink_for
from reflux_placement.policy.preempt import Eviction, VictimSearch, victims_for
from reflux_placement.policy.quota import Excess
from reflux_placement.policy.view import Ask, Claim, Live, Migrate, Preempt
from reflux_placement.topology import CLUSTER

FEWEST_MOVES, NODES_PER_MOVE = 200, 12
"""A gang of a given share of the cluster needs moves in proportion to the nodes. Plans for 4,608 of 100,800 GPUs took
300 to 600 attempts (`benchmarks/scheduler/defrag_bench.py`); in the worst case found one takes 2 ms of CPU time."""


def search_limits(config: PolicyConfig, num_nodes: int) -> Limits:
    """How far the search for a migration goes on a cluster of that many nodes. Counts bound its CPU time: it comes at
    most once per `defragmentation_seconds`."""
    budget = min(config.defragmentation_moves, max(FEWEST_MOVES, num_nodes // NODES_PER_MOVE))
    return Limits(moves=budget, attempts=budget)


def at_least(gang: GangDemand) -> GangDemand:
    """The gang at the smallest size that it can start with; the same object for a rigid one."""
    if all(role.least == role.most for role in gang.roles) or not any(role.least for role in gang.roles):
        return gang
    roles = tuple(replace(role, count=role.least, min_count=None, max_count=None) for role in gang.roles)
    return replace(gang, roles=roles)


class RoomMaker:
    """Tries asks one by one, a bounded number per cycle, each kind of ask once."""

    def __init__(self, books: Books, config: PolicyConfig) -> None:
        self._books, self._config = books, config
        self._attempts_left = config.preemption_attempts
        self._hopeless: set[tuple[GangDemand, int, str]] = set()
        self._any_elastic: bool | None = None

    def make_room(self, ask: Ask, excess: Sequence[Excess]) -> bool:
        """Whether room was claimed for the ask; then the actions are decided and the room is withheld."""
        if not self._attempts_left or not all(any(each.over) for each in excess):
            return False
        shrinking = self._config.shrinking and not excess and self._elastic()
        stopping = self._config.preemption and self._may_stop_any(ask)
        key = (ask.gang, ask.priority, ask.queue)
        if not (shrinking or stopping) or key in self._hopeless:
            return False
        self._attempts_left -= 1
        smallest = replace(ask, gang=at_least(ask.gang))
        if (shrinking and self._shrink(ask, smallest)) or (stopping and self._stop(ask, smallest, excess)):
            return True
        self._hopeless.add(key)
        return False

    def defragment(self, ask: Ask) -> bool:
        """Whether a migration was decided after which the ask fits."""
        books = self._books
        others = self._others()
        if not any(each.movable for each in others.values()):
            return False
        limits = search_limits(self._config, books.room.topology.num_nodes)
        found = plan(books.off_limits(ask), others, at_least(ask.gang), limits)
        if not isinstance(found, Plan) or not found.moves:
            return False
        keeps = dict(found.moves)
        books.actions.append(Migrate(tuple(keeps.items()), ask.job, found.sentence))
        books.busy.update(keeps)
        self._claim(ask, found.assignment, tuple(keeps), keeps)
        return True

    def _may_stop_any(self, ask: Ask) -> bool:
        lowest = self._books.lowest_priority
        return lowest is not None and (lowest < ask.priority or self._books.ledger.has_guarantees)

    def _elastic(self) -> bool:
        if self._any_elastic is None:
            self._any_elastic = any(each.is_elastic for each in self._books.room.holdings.values())
        return self._any_elastic

    def _others(self) -> Mapping[str, Live]:
        """Live jobs that nothing was decided about yet."""
        books = self._books
        return {job: each for job, each in books.live.items() if job not in books.leaving and job not in books.busy}

    def _shrink(self, ask: Ask, smallest: Ask) -> bool:
        books = self._books
        found = shrink_for(books.off_limits(ask), self._others(), smallest)
        if found is None:
            return False
        books.actions.extend(found.resizes)
        keeps = {resize.job: resize.assignment for resize in found.resizes}
        for job, kept in keeps.items():
            books.recount(job, kept)
        books.busy.update(keeps)
        self._claim(ask, found.assignment, tuple(keeps), keeps)
        return True

    def _stop(self, ask: Ask, smallest: Ask, excess: Sequence[Excess]) -> bool:
        books = self._books
        victims = victims_for(smallest, books.room, self._others(), books.ledger, books.now)
        if not victims:
            return False
        search = VictimSearch(books.off_limits(ask), smallest, victims, books.ledger, excess)
        eviction = search.best(self._config.preemption_domains)
        if eviction is None:
            return False
        names = tuple(victim.job for victim in eviction.victims)
        books.actions.append(Preempt(names, ask.job, eviction.lost_seconds, _why(ask, eviction)))
        for victim in eviction.victims:
            books.recount(victim.job, None)
        books.leaving.update(names)
        self._claim(ask, eviction.assignment, names, {})
        return True

    def _claim(self, ask: Ask, assignment: Assignment, after: tuple[str, ...], keeps: Mapping[str, Assignment]) -> None:
        books = self._books
        claim = Claim(job=ask.job, assignment=assignment, after=after, evicting=True, due_at=books.now, keeps=keeps)
        standing = stand(claim, ask)
        books.charge(ask, standing.amount)
        books.withhold(standing)


def _why(ask: Ask, eviction: Eviction) -> str:
    """One sentence for people."""
    borrowed = any(victim.live.ask.priority >= ask.priority for victim in eviction.victims)
    right = f"queue {ask.queue} takes its guarantee back" if borrowed else f"priority {ask.priority} goes first"
    level = eviction.assignment.level
    inside = "" if level == CLUSTER else f" inside one {level}"
    return f"{right}: {ask.job} fits{inside} when {len(eviction.victims)} jobs stop, at the least lost work"
