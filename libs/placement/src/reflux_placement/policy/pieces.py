"""Owns the cut of running gangs into pieces: members that must move together if they leave their domain.

At a level, say the rack, a segment is one piece, so is a role or a gang that must lie in one rack, and every other
member is a piece of its own. Roles that must share a rack are one piece with their peers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from reflux_placement.gang import GangDemand
from reflux_placement.place.tree import tree_of
from reflux_placement.room import Holding
from reflux_placement.topology import CLUSTER, NO_DOMAIN, Ints, Topology

Member = tuple[str, int]
"""Role and rank."""


@dataclass(frozen=True, eq=False)
class Piece:
    """K members of one job in one part of the tree."""

    job: str
    part: int
    """Part of the tree at the level of the cut (`tree.Layer`): a domain, or nodes without one."""

    members: tuple[Member, ...]
    node_K: Ints
    need_KR: Ints

    @cached_property
    def gpus(self) -> int:
        """GPUs of all members."""
        return int(self.need_KR[:, 0].sum())

    @cached_property
    def rows(self) -> list[tuple[int, list[int]]]:
        """Node and need of every member."""
        return list(zip(self.node_K.tolist(), self.need_KR.tolist(), strict=True))

    @cached_property
    def largest_kind(self) -> tuple[tuple[int, int, int], int]:
        """The size of member that takes most GPUs in all, and how many of it there are."""
        kinds: dict[tuple[int, int, int], int] = {}
        for _, (gpus, millicpus, memory) in self.rows:
            kinds[gpus, millicpus, memory] = kinds.get((gpus, millicpus, memory), 0) + 1
        return max(kinds.items(), key=lambda kind: (kind[0][0] * kind[1], kind))


def bound_tighter(topology: Topology, named: str, level: int) -> bool:
    """Whether a constraint at level `named` keeps members inside one domain at position `level` (or tighter)."""
    return bool(named) and named != CLUSTER and topology.tightness(named) <= level


def groups_of(topology: Topology, gang: GangDemand, sizes: Mapping[str, int], level: int) -> list[list[Member]]:
    """Members that must share a domain at a level (position in `topology.levels`), for a gang with these role sizes."""
    group: dict[Member, int] = {}
    whole = bound_tighter(topology, gang.required_level, level)
    for index, demand in enumerate(gang.roles):
        together = bound_tighter(topology, demand.required_level, level)
        segment = (
            demand.segment_size if demand.segment_size and topology.tightness(demand.segment_level) <= level else 1
        )
        for rank in range(sizes.get(demand.role, 0)):
            group[demand.role, rank] = _key(0, 0) if whole else _key(index + 1, 0 if together else rank // segment + 1)
    if not whole:
        _join_peers(topology, gang, sizes, level, group)
    members: dict[int, list[Member]] = {}
    for member, key in group.items():
        members.setdefault(key, []).append(member)
    return list(members.values())


def _key(role: int, part: int) -> int:
    return role << 32 | part


def _join_peers(
    topology: Topology, gang: GangDemand, sizes: Mapping[str, int], level: int, group: dict[Member, int]
) -> None:
    """Joins the groups of members that a required relation keeps in one domain of the level."""
    parent: dict[int, int] = {}

    def root(key: int) -> int:
        while parent.get(key, key) != key:
            key = parent[key]
        return key

    for relation in gang.relations:
        here, near = sizes.get(relation.role, 0), sizes.get(relation.near, 0)
        if not (relation.required and near and bound_tighter(topology, relation.level, level)):
            continue
        for rank in range(here):
            parent[root(group[relation.role, rank])] = root(group[relation.near, rank * near // here])
    for member in group:
        group[member] = root(group[member])


def pieces_of(topology: Topology, job: str, holding: Holding, level: int) -> list[Piece]:
    """The pieces of a running job at a level (position)."""
    nodes = holding.assignment.nodes
    needs = {demand.role: demand.each.row for demand in holding.demand.roles}
    sizes = {role: len(ranks) for role, ranks in nodes.items()}
    part_N = tree_of(topology).layers[level].part_N
    parts = {role: part_N[ranks].tolist() for role, ranks in nodes.items()}
    alone = {role: np.array([row], dtype=np.int64) for role, row in needs.items()}
    pieces = []
    for members in groups_of(topology, holding.demand, sizes, level):
        role, rank = members[0]
        if len(members) == 1:
            node_K, need_KR = nodes[role][rank : rank + 1], alone[role]
        else:
            node_K = np.array([nodes[role][rank] for role, rank in members], dtype=np.int64)
            need_KR = np.array([needs[role] for role, _ in members], dtype=np.int64)
        pieces.append(Piece(job, parts[role][rank], tuple(members), node_K, need_KR))
    return pieces


def allowed_nodes(topology: Topology, holding: Holding, piece: Piece, level: int) -> tuple[int, int]:
    """Range of node indices inside which the piece may move while the rest of its job stays: the domains wider than
    `level` that the job's constraints name. Relations count as if they named the present domain."""
    gang = holding.demand
    roles = {role for role, _ in piece.members}
    named = [
        relation.level for relation in gang.relations if relation.required and {relation.role, relation.near} & roles
    ]
    if len(piece.members) < holding.assignment.num_members:
        named.append(gang.required_level)
    for demand in gang.roles:
        moving = sum(role == demand.role for role, _ in piece.members)
        if 0 < moving < len(holding.assignment.nodes[demand.role]):
            named.append(demand.required_level)
            named += [demand.segment_level] if demand.segment_size else []
    first, last = 0, topology.num_nodes
    for each in named:
        if each and each != CLUSTER and topology.tightness(each) > level:
            domain = topology.domain_LN[topology.tightness(each), piece.node_K[0]]
            if domain != NO_DOMAIN:
                found = topology.domains(each)[int(domain)]
                first, last = max(first, found.start), min(last, found.stop)
    return first, last
