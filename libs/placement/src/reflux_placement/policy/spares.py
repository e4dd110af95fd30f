"""Owns hot spares and the replacement of members whose node is lost or draining.

Order of a cycle: `refresh` (who is a spare now), `health.open_nodes` (closes spares and sick nodes for new work), then
`replace_lost` before anything else is placed, because a broken gang holds room and does nothing.

A replacement is looked for in this order: free room in the racks of the lost members, then spares of these racks, then
free room that the constraints allow elsewhere, then any spare, then room elsewhere for the whole segments that lost a
member (their other members move along, all other segments stay). A spare that took over work is no spare any more; the
rack's count is filled again from idle nodes, first from the failed node that comes back.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from reflux_placement.gang import Assignment, GangDemand
from reflux_placement.place.extend import extend
from reflux_placement.place.misfit import Misfit
from reflux_placement.policy.members import Kept, current_counts, kept_members
from reflux_placement.policy.view import Live, NodeState, Replace, Requeue
from reflux_placement.room import Holding, Room
from reflux_placement.topology import NO_DOMAIN, NODE, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class SpareRule:
    """How many nodes are held back. Raises ValueError for a count below zero."""

    per_domain: int = 0
    """Spares in every domain of `level`; a common advice is 2 of 18 (segments of 16)."""

    level: str = "rack"
    nodes: tuple[str, ...] = ()
    """Explicit spares by name, used instead of `per_domain`: their number per domain is kept up, these nodes first."""

    def __post_init__(self) -> None:
        if self.per_domain < 0:
            raise ValueError(f"spares.per_domain = {self.per_domain}: write zero or more")


NO_SPARES = SpareRule()


def refresh(
    room: Room,
    rule: SpareRule,
    states: Mapping[int, NodeState],
    current: Collection[int] = (),
    returned: Collection[int] = (),
) -> frozenset[int]:
    """The nodes to hold back (`View.spares`): only idle nodes that are up, per domain as many as the rule says.

    Deterministic. Preferred in this order: named by the rule, spares of the last cycle (`current`), nodes that have
    just come back (`returned`), then the highest index. A named node that lies in no domain of the level stands for
    itself only.

    Raises:
        UnknownLevel: the rule's level is not in the topology (unless the rule asks for nothing).
        LookupError: a named node does not exist.
    """
    topology = room.topology
    named = {topology.index_of(name) for name in rule.nodes}
    if not named and not rule.per_domain:
        return frozenset()
    busy_N = np.zeros(topology.num_nodes, dtype=bool)
    for holding in room.holdings.values():
        busy_N[holding.node_M] = True
    domain_N = topology.domain_LN[topology.tightness(rule.level)]
    idle = [int(node) for node in np.flatnonzero(~busy_N) if int(node) not in states]
    wanted = _wanted(domain_N.tolist(), named, rule)
    chosen = {node for node in idle if node in named and domain_N[node] == NO_DOMAIN}
    for node in sorted(idle, key=lambda n: (n not in named, n not in current, n not in returned, -n)):
        domain = int(domain_N[node])
        if wanted.get(domain, 0) > 0:
            wanted[domain] -= 1
            chosen.add(node)
    return frozenset(chosen)


def _wanted(domain_N: list[int], named: set[int], rule: SpareRule) -> dict[int, int]:
    """Spares per domain of the rule's level."""
    wanted: dict[int, int] = {}
    for node in named if named else range(len(domain_N)):
        wanted[domain_N[node]] = wanted.get(domain_N[node], 0) + 1 if named else rule.per_domain
    wanted.pop(NO_DOMAIN, None)
    return wanted


def replace_lost(
    room: Room, live: Mapping[str, Live], states: Mapping[int, NodeState], spares: frozenset[int]
) -> list[Replace | Requeue]:
    """Moves members off nodes that are down or vacating, and off draining ones where the job may move now. Books on
    `room`.

    - All lost members of a job are replaced together, the others keep rank and node.
    - A job that only sits on draining nodes moves when `Live.movable` and a replacement exists; otherwise it stays as
      it is and is asked again in the next cycle. It is never stopped for a drain; a vacating node counts as lost.
    - An elastic gang for which nothing is left goes on smaller, down to its minimum: its highest ranks make room.
    - Otherwise `Requeue` says what is missing. No action ever carries an empty assignment.

    Jobs go by priority, then by order of submission; only those in `live` (others are stopping). Nodes in `states` are
    closed in `room.open_N`.
    """
    sick = _Sick(
        *(frozenset(node for node in states if states[node] == word) for word in ("down", "vacating", "draining"))
    )
    room.open_N[[*states, *spares]] = False
    spares = frozenset(spares - states.keys())
    sick_N = np.zeros(room.topology.num_nodes, dtype=bool)
    sick_N[[*sick.dead, *sick.draining]] = True
    hurt = [job for job, holding in room.holdings.items() if job in live and sick_N[holding.node_M].any()]
    actions: list[Replace | Requeue] = []
    for job in sorted(hurt, key=lambda name: _order(live, name)):
        action = _replace_job(room, live.get(job), job, sick, spares)
        if action is not None:
            actions.append(action)
    return actions


@dataclass(frozen=True, slots=True)
class _Sick:
    """Nodes that are or may be left."""

    down: frozenset[int]
    vacating: frozenset[int]
    draining: frozenset[int]

    @property
    def dead(self) -> frozenset[int]:
        """Left whatever it costs."""
        return self.down | self.vacating

    def left(self, nodes: frozenset[int]) -> "_Left":
        """Nodes of a job that it leaves."""
        return _Left(nodes, "lost" if nodes & self.down else "has to leave")


@dataclass(frozen=True, slots=True)
class _Left:
    nodes: frozenset[int]
    verb: str


def _departure(room: Room, left: _Left) -> str:
    return f"{left.verb} {_names(room.topology, left.nodes)}"


def _order(live: Mapping[str, Live], job: str) -> tuple[int, int, str]:
    ask = live[job].ask if job in live else None
    return (-ask.priority, ask.number, job) if ask else (0, 0, job)


def _replace_job(
    room: Room, live: Live | None, job: str, sick: _Sick, spares: frozenset[int]
) -> Replace | Requeue | None:
    holding = room.holdings[job]
    held = frozenset(holding.node_M.tolist())
    dead = held & sick.dead
    may_move = bool(dead) or (live is not None and live.movable)
    wishes = [dead | (held & sick.draining)] if may_move else []
    if dead and dead != wishes[0]:
        wishes.append(dead)
    room.release(job)
    misfit: Misfit | None = None
    for lost in wishes:
        found = _somewhere(room, holding, lost, spares)
        if isinstance(found, Assignment):
            return _replaced(room, job, holding, found, sick.left(lost), spares)
        misfit = found
    if not dead:
        room.restore(job, holding)
        return None
    assert misfit is not None
    found = _with_whole_segments(room, holding, dead, spares) or _smaller(room, holding, dead, spares)
    if found is not None:
        return _replaced(room, job, holding, found, sick.left(dead), spares)
    why = _departure(room, sick.left(dead))
    return Requeue(job, f"{why} and there is no replacement that keeps its constraints: {misfit.sentence}")


def _somewhere(room: Room, holding: Holding, lost: frozenset[int], spares: frozenset[int]) -> Assignment | Misfit:
    """A new place for the members on `lost`, from the nearest room outwards; the misfit of the widest search."""
    kept = kept_members(holding, lost)
    counts = current_counts(holding)
    near_N = _near(room.topology, lost)
    near_spares = frozenset(node for node in spares if near_N[node])
    close = room.copy()
    close.open_N &= near_N
    found: Assignment | Misfit = _extend(close, holding.demand, kept, counts, frozenset())
    if isinstance(found, Misfit) and near_spares:
        found = _with_spares(close, holding.demand, kept, counts, near_spares)
    if isinstance(found, Misfit):
        found = _extend(room, holding.demand, kept, counts, frozenset())
    if isinstance(found, Misfit) and spares:
        found = _with_spares(room, holding.demand, kept, counts, spares)
    return found


def _with_spares(
    room: Room, gang: GangDemand, kept: Kept, counts: dict[str, int], spares: frozenset[int]
) -> Assignment | Misfit:
    """A place with as few spares as single steps find: those that free room can stand in for are left alone."""
    best = _extend(room, gang, kept, counts, spares)
    if isinstance(best, Misfit):
        return best
    allowed = spares & frozenset(best.used_nodes().tolist())
    for node in sorted(allowed):
        found = _extend(room, gang, kept, counts, allowed - {node})
        if isinstance(found, Assignment):
            best, allowed = found, allowed - {node}
    return best


def _with_whole_segments(
    room: Room, holding: Holding, dead: frozenset[int], spares: frozenset[int]
) -> Assignment | None:
    """A place where the segments that lost a member start anew, together; None for gangs without segments."""
    kept = _whole_segments(holding, dead)
    if kept == kept_members(holding, dead):
        return None
    found = _with_spares(room, holding.demand, kept, current_counts(holding), spares)
    return found if isinstance(found, Assignment) else None


def _whole_segments(holding: Holding, dead: frozenset[int]) -> Kept:
    """Members of the segments that lost nobody (of roles without segments: members that are not lost)."""
    kept = kept_members(holding, dead)
    for demand in holding.demand.roles:
        if size := demand.segment_size:
            alive = kept[demand.role]
            whole = {rank // size for rank in alive if all(rank // size * size + at in alive for at in range(size))}
            kept[demand.role] = {rank: node for rank, node in alive.items() if rank // size in whole}
    return kept


def _smaller(room: Room, holding: Holding, dead: frozenset[int], spares: frozenset[int]) -> Assignment | None:
    """The largest gang between its minimum and its size, a unit of every hurt role at a time. Members of the highest
    ranks leave; the lost ranks below them start again where those were."""
    units: dict[str, list[int]] = {}
    for demand in holding.demand.roles:
        ranks = holding.assignment.nodes.get(demand.role, np.zeros(0, dtype=np.int64))
        unit = demand.segment_size or 1
        hurt = any(int(node) in dead for node in ranks)
        units[demand.role] = list(range(len(ranks), demand.least - 1, -unit)) if hurt else [len(ranks)]
    for step in range(1, max(len(sizes) for sizes in units.values())):
        counts = {role: sizes[min(step, len(sizes) - 1)] for role, sizes in units.items()}
        if not any(counts.values()):
            break
        for kept in (kept_members(holding, dead), _whole_segments(holding, dead)):
            found = _with_spares(room, holding.demand, kept, counts, spares)
            if isinstance(found, Assignment):
                return found
    return None


def _near(topology: Topology, lost: frozenset[int]) -> np.ndarray:
    """Mask of the nodes that share the tightest labelled domain above the node with a lost one."""
    near_N = np.zeros(topology.num_nodes, dtype=bool)
    for node in lost:
        for level in topology.levels:
            domain = topology.domain_of(level, node) if level != NODE else None
            if domain is not None:
                near_N[domain.start : domain.stop] = True
                break
    return near_N


def _extend(
    room: Room, gang: GangDemand, kept: Kept, counts: dict[str, int], spares: frozenset[int]
) -> Assignment | Misfit:
    return extend(room, gang, kept, counts, extra_nodes=spares)


def _replaced(room: Room, job: str, before: Holding, after: Assignment, left: _Left, spares: frozenset[int]) -> Replace:
    room.take(job, before.demand, after, keep=before)
    used = tuple(sorted(spares & frozenset(after.used_nodes().tolist())))
    fewer = before.assignment.num_members - after.num_members
    why = _departure(room, left)
    why += f"; took over: {_names(room.topology, frozenset(_new_nodes(before.assignment, after)))}"
    why += f", of them spares: {_names(room.topology, frozenset(used))}" if used else ""
    why += f"; goes on with {fewer} members fewer" if fewer else ""
    return Replace(job, after, tuple(sorted(left.nodes)), used, why)


def _new_nodes(before: Assignment, after: Assignment) -> set[int]:
    return set(after.used_nodes().tolist()) - set(before.used_nodes().tolist())


def _names(topology: Topology, nodes: frozenset[int], most: int = 4) -> str:
    """Names with their rack for people, the first few."""
    shown = ", ".join(topology.path(node) for node in sorted(nodes)[:most])
    return shown + (f" and {len(nodes) - most} more" if len(nodes) > most else "") if nodes else "no other node"
