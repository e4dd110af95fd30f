"""Owns the proof that no migration helps: a bound on how many slots of a gang can be free at once, and its certificate.

A slot is what a gang needs whole inside one domain: a segment, or a role (its minimum) that must lie in one domain.
Two bounds, each a plain counting argument:

- `capacity`: with every movable job gone, a domain holds sum over nodes of floor(free / member) // slot size slots.
  What is left over is held by jobs that may not move, or by closed nodes.
- `packing`: every movable piece (see `pieces`) and every slot must lie in some domain. Give each size s a weight w(s)
  >= 0. Pieces in a domain of capacity c weigh at most W(c), the best of an unbounded knapsack over the sizes that
  occur. If the pieces and the slots together weigh more than all domains can hold, there is no packing, no matter in
  which order one migrates. With w(s) = s this counts GPUs; the other weights are the dual feasible functions u(k) of
  bin packing (Martello and Toth, Lower bounds and reduction procedures for the bin packing problem, 1990, bound L2;
  Fekete and Schepers, New classes of fast lower bounds for bin packing problems, 2001) and floor(s / k).

Both are relaxations: constraints of moved jobs between domains, of other resources and inside nodes are left out, so
that a proof is right, but there need not be one for every gang without a plan.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import gcd

import numpy as np

from reflux_placement.gang import GangDemand, RoleDemand
from reflux_placement.place.capacity import copies_per_node
from reflux_placement.policy.pieces import groups_of, pieces_of
from reflux_placement.policy.view import Live
from reflux_placement.room import Room
from reflux_placement.topology import CLUSTER, NO_DOMAIN, NODE, Ints, Resources, Topology

RESOURCES = ("GPUs", "millicpus", "bytes of memory")
MAX_KNAPSACK = 4096
"""Capacities above this (in steps of the greatest common divisor) are bounded by the best weight per unit instead."""

MAX_WEIGHTS = 48
"""Thresholds that are tried per resource."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """`needed` times `members` members of `role`, each lot whole inside one domain of `level`; all lots inside one
    domain of `scope`."""

    role: str
    each: Resources
    members: int
    needed: int
    level: str
    scope: str = CLUSTER


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    """Pieces of one size: what one weighs and how many there are (the gang's own slots not included)."""

    size: int
    weight: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """Domains of one capacity (without what may not move): the most that pieces in one can weigh."""

    capacity: int
    count: int
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """At most `at_most` slots can be free at once, `slot.needed` are needed: no migration helps.

    For `packing`: (sum of bins - sum of pieces) // weight of a slot = at_most. `slot_size` is in the unit of
    `resource`. For `capacity`, `bins` counts domains by the slots that they hold at most and the rest is empty.
    """

    kind: str
    slot: Slot
    at_most: int
    resource: str
    slot_size: int
    slot_weight: int
    pieces: tuple[Weighed, ...]
    bins: tuple[Bin, ...]
    sentence: str


def slots_of(topology: Topology, gang: GangDemand) -> list[Slot]:
    """The slots of a gang at its minimum, the largest first. Roles that may have no member ask for nothing."""
    slots = [_slot(topology, gang, demand) for demand in gang.roles if demand.least]
    return sorted(
        slots, key=lambda slot: (-slot.members * slot.each.gpus, -slot.members * slot.each.millicpus, slot.role)
    )


def _slot(topology: Topology, gang: GangDemand, demand: RoleDemand) -> Slot:
    scope = min((demand.required_level, gang.required_level), key=topology.tightness)
    segment = demand.segment_level if demand.segment_size else ""
    if segment and topology.tightness(segment) < topology.tightness(scope):
        lots, level = demand.least // demand.segment_size, segment
    elif scope != CLUSTER:
        lots, level = 1, scope
    else:
        lots, level = demand.least, NODE
    members = demand.least // lots
    return Slot(role=demand.role, each=demand.each, members=members, needed=lots, level=level, scope=scope)


def prove(room: Room, live: Mapping[str, Live], gang: GangDemand) -> Proof | None:
    """A proof that no migration of the movable jobs makes room for the gang, if one of the bounds gives it."""
    for slot in slots_of(room.topology, gang):
        proof = _capacity_bound(room, live, slot) or _packing_bound(room, live, gang, slot)
        if proof is not None:
            return proof
    return None


def emptied_NR(room: Room, live: Mapping[str, Live]) -> Ints:
    """Free amounts per node if every movable job were gone; -1 on closed nodes."""
    bare = room.copy()
    bare.release_all([job for job in room.holdings if job in live and live[job].movable])
    return bare.usable_NR()


def _capacity_bound(room: Room, live: Mapping[str, Live], slot: Slot) -> Proof | None:
    topology = room.topology
    copies_N = copies_per_node(emptied_NR(room, live), slot.each)
    level, scope = topology.tightness(slot.level), topology.tightness(slot.scope)
    lots_D = topology.sums(copies_N, level) // slot.members
    parent_D = topology.domain_LN[scope, topology.starts[level]]
    best = max(int(lots_D[parent_D == each].sum()) for each in set(parent_D.tolist()) - {NO_DOMAIN} or {0})
    if best >= slot.needed:
        return None
    counts = Counter(np.minimum(lots_D, slot.needed).tolist())
    bins = tuple(Bin(capacity=lots, count=count, most=lots) for lots, count in sorted(counts.items()))
    where = "" if slot.scope == CLUSTER or slot.scope == slot.level else f" in any one {slot.scope}"
    sentence = (
        f"{slot.role} needs {slot.needed} {_lots(slot)}; even with every movable job gone there would be at most "
        f"{best}{where}, because the rest is held by jobs that may not move or is out of service"
    )
    return Proof(
        kind="capacity", slot=slot, at_most=best, resource="", slot_size=0, slot_weight=0, pieces=(), bins=bins,
        sentence=sentence,
    )  # fmt: skip


def _lots(slot: Slot) -> str:
    what = f"{slot.members} members" if slot.members > 1 else "one member"
    return f"{slot.level}s with room for {what}" if slot.needed != 1 else f"{slot.level} with room for {what}"


def _packing_bound(room: Room, live: Mapping[str, Live], gang: GangDemand, slot: Slot) -> Proof | None:
    topology = room.topology
    level = topology.tightness(slot.level)
    sizes = _piece_sizes(room, live, level)
    asked = _asked_sizes(topology, gang, slot, level)
    free_NR = emptied_NR(room, live)
    free_NR = np.where(free_NR > 0, free_NR, 0)
    best: Proof | None = None
    for column, resource in enumerate(RESOURCES):
        size = slot.each.row[column] * slot.members
        if size == 0:
            continue
        counts = Counter(int(s[column]) for s in [*sizes, *asked] if s[column])
        room_D = topology.sums(free_NR[:, column], level)
        loose = int(free_NR[topology.domain_LN[level] == NO_DOMAIN, column].sum())
        capacities = Counter([*room_D.tolist(), loose] if loose else room_D.tolist())
        for weight in _weights([*counts, size], max(capacities)):
            proof = _weigh(slot, resource, size, counts, capacities, weight)
            if best is None or proof.at_most < best.at_most:
                best = proof
    return best if best is not None and best.at_most < slot.needed else None


def _piece_sizes(room: Room, live: Mapping[str, Live], level: int) -> list[tuple[int, ...]]:
    """Sizes of the movable pieces. One that touches a closed node may stay there: it is left out, its room is not."""
    return [
        tuple(piece.need_KR.sum(axis=0).tolist())
        for job, holding in room.holdings.items()
        if job in live and live[job].movable
        for piece in pieces_of(room.topology, job, holding, level)
        if room.open_N[piece.node_K].all()
    ]


def _asked_sizes(topology: Topology, gang: GangDemand, slot: Slot, level: int) -> list[tuple[int, ...]]:
    """Sizes of the other roles of the gang, at their minimum: they must lie somewhere as well. Relations are left out,
    because who is whose peer depends on the sizes."""
    least = {demand.role: 0 if demand.role == slot.role else demand.least for demand in gang.roles}
    rows = {demand.role: np.array(demand.each.row) for demand in gang.roles}
    return [
        tuple(np.sum([rows[role] for role, _ in members], axis=0).tolist())
        for members in groups_of(topology, replace(gang, relations=()), least, level)
    ]


def _weights(sizes: Iterable[int], capacity: int) -> list[Callable[[int], int]]:
    """The families of weights: the size itself, u(k), floor(s / k)."""
    thresholds = sorted({size for size in sizes if 0 < size <= capacity})[:MAX_WEIGHTS]
    families: list[Callable[[int], int]] = [lambda size: size]
    for k in thresholds:
        families.append(lambda size, k=k: size // k)
        if k <= capacity // 2:
            families.append(lambda size, k=k: capacity if size > capacity - k else size if size >= k else 0)
    return families


def _weigh(
    slot: Slot, resource: str, size: int, counts: Counter[int], capacities: Counter[int], weight: Callable[[int], int]
) -> Proof:
    sizes = sorted({*counts, size})
    most = best_weights(sizes, [weight(each) for each in sizes], list(capacities))
    bins = tuple(Bin(capacity=c, count=capacities[c], most=most[c]) for c in sorted(capacities))
    pieces = tuple(Weighed(size=each, weight=weight(each), count=counts[each]) for each in sorted(counts))
    hold = sum(each.count * each.most for each in bins)
    load = sum(each.count * each.weight for each in pieces)
    at_most = max(0, hold - load) // weight(size) if weight(size) else slot.needed
    sentence = (
        f"{slot.role} needs {slot.needed} {_lots(slot)}; even a perfect repacking of everything movable frees at most "
        f"{at_most}: in {resource}, weighed by size, the {slot.level}s hold at most {hold}, what runs weighs {load} "
        f"and each of the {slot.needed} weighs {weight(size)}"
    )
    return Proof(
        kind="packing", slot=slot, at_most=at_most, resource=resource, slot_size=size, slot_weight=weight(size),
        pieces=pieces, bins=bins, sentence=sentence,
    )  # fmt: skip


def best_weights(sizes: list[int], weights: list[int], capacities: list[int]) -> dict[int, int]:
    """The largest weight of any multiset of sizes that fits in each capacity (unbounded knapsack, or above
    MAX_KNAPSACK steps its fractional bound, rounded down)."""
    step = gcd(*sizes) if sizes else 1
    largest = max(capacities) // step
    if largest > MAX_KNAPSACK:
        return {c: max((c * w // s for s, w in zip(sizes, weights, strict=True)), default=0) for c in capacities}
    best = [0] * (largest + 1)
    pairs = [(size // step, weight) for size, weight in zip(sizes, weights, strict=True) if weight]
    for filled in range(1, largest + 1):
        fitting = (best[filled - size] + weight for size, weight in pairs if size <= filled)
        best[filled] = max(best[filled - 1], max(fitting, default=0))
    return {c: best[c // step] for c in capacities}
