"""Owns the check of an assignment against everything that its gang demands, independent of how it was found."""

import numpy as np

from reflux_placement.gang import Assignment, GangDemand, RoleDemand
from reflux_placement.place.cost import peers
from reflux_placement.place.tree import Layer, Tree, tree_of
from reflux_placement.topology import CLUSTER, Ints, Topology


def broken(
    topology: Topology, free_NR: Ints, gang: GangDemand, assignment: Assignment, counts: dict[str, int] | None = None
) -> str | None:
    """The first demand that an assignment breaks, as a sentence; None when it keeps all of them.

    Args:
        topology: the tree.
        free_NR: room before the gang is booked.
        gang: what was asked.
        assignment: the answer.
        counts: members per role that it must have; None takes any count between least and most.
    """
    need_NR = np.zeros_like(free_NR)
    for demand in gang.roles:
        ranks = assignment.nodes.get(demand.role, np.zeros(0, dtype=np.int64))
        wanted = (counts[demand.role], counts[demand.role]) if counts else (demand.least, demand.most)
        if not wanted[0] <= len(ranks) <= wanted[1]:
            return f"{demand.role} has {len(ranks)} members"
        np.add.at(need_NR, ranks, np.array(demand.each.row, dtype=np.int64))
    used = assignment.used_nodes()
    if (need_NR[used] > free_NR[used]).any() or (free_NR[used] < 0).any():
        return "a node has too little free"
    tree = tree_of(topology)
    return constraint_broken(topology, tree, gang, assignment.nodes)


def constraint_broken(topology: Topology, tree: Tree, gang: GangDemand, nodes: dict[str, Ints]) -> str | None:
    """The first constraint on domains that ranks on nodes break; None when they keep all of them."""
    every = [ranks for ranks in nodes.values() if len(ranks)]
    if every and not _one_domain(_layer(topology, tree, gang.required_level), np.concatenate(every)):
        return f"the gang is not inside one {gang.required_level}"
    for demand in gang.roles:
        ranks = nodes.get(demand.role)
        if ranks is not None and len(ranks):
            found = _role_broken(topology, tree, demand, ranks)
            if found:
                return found
    for relation in gang.relations:
        role_M, near_M = nodes.get(relation.role, ()), nodes.get(relation.near, ())
        if not relation.level or not relation.required or not len(role_M) or not len(near_M):
            continue
        layer = _layer(topology, tree, relation.level)
        mine_M, theirs_M = layer.part_N[role_M], layer.part_N[near_M[peers(len(role_M), len(near_M))]]
        if (mine_M != theirs_M).any() or not layer.real_P[mine_M].all():
            return f"a {relation.role} is not in the {relation.level} of its {relation.near}"
    return None


def _role_broken(topology: Topology, tree: Tree, demand: RoleDemand, ranks: Ints) -> str | None:
    if not _one_domain(_layer(topology, tree, demand.required_level), ranks):
        return f"{demand.role} is not inside one {demand.required_level}"
    if demand.segment_size:
        layer = _layer(topology, tree, demand.segment_level)
        part_M = layer.part_N[ranks]
        if len(ranks) % demand.segment_size or not layer.real_P[part_M].all():
            return f"{demand.role} has a segment outside every {demand.segment_level}"
        part_SM = part_M.reshape(-1, demand.segment_size)
        if (part_SM != part_SM[:, :1]).any():
            return f"a segment of {demand.role} is not inside one {demand.segment_level}"
    if demand.max_per_domain:
        layer = _layer(topology, tree, demand.spread_level)
        part_M = layer.part_N[ranks]
        if not layer.real_P[part_M].all() or int(np.bincount(part_M).max()) > demand.max_per_domain:
            return f"{demand.role} has more than {demand.max_per_domain} members in one {demand.spread_level}"
    return None


def _layer(topology: Topology, tree: Tree, level: str) -> Layer:
    return tree.layers[topology.tightness(level or CLUSTER)]


def _one_domain(layer: Layer, ranks: Ints) -> bool:
    part_M = layer.part_N[ranks]
    return bool((part_M == part_M[0]).all()) and bool(layer.real_P[part_M[0]])
