"""Owns how far apart the members of a placed gang are: racks, blocks, and the share of traffic between racks."""

import numpy as np

from reflux_placement.gang import Assignment, GangDemand
from reflux_placement.topology import NO_DOMAIN, Ints, Topology

RACK = 1
"""Position of the tightest named level; a topology without one counts nodes."""


def rack_position(topology: Topology) -> int:
    """Position of the level that counts as a rack: the tightest named one, or the node where none is named."""
    return RACK if len(topology.levels) > 2 else 0


def block_position(topology: Topology) -> int | None:
    """Position of the level that counts as a block; None where racks are the only level."""
    return RACK + 1 if len(topology.levels) > 3 else None


def num_domains(topology: Topology, position: int, node_M: Ints) -> int:
    """Domains of a level that the members touch; a node outside every domain counts as one of its own."""
    domain_M = topology.domain_LN[position, node_M]
    lost = np.unique(node_M[domain_M == NO_DOMAIN])
    return len(np.unique(domain_M[domain_M != NO_DOMAIN])) + len(lost)


def fewest_racks(topology: Topology, gang: GangDemand) -> int:
    """The fewest racks that could hold the gang's GPUs (or its members, if it has none) in an empty cluster: racks by
    falling size until the need is met. A lower bound: other constraints may need more."""
    need = gang.total()
    column = 0 if need.gpus else 1
    sizes = np.sort(topology.sums(topology.capacity_NR[:, column], rack_position(topology)))[::-1]
    return int(np.searchsorted(np.cumsum(sizes), need.row[column])) + 1


def cross_share(topology: Topology, gang: GangDemand, assignment: Assignment) -> float:
    """Share of the gang's traffic that leaves a rack, 0 to 1.

    Inside a role all pairs talk evenly (all-to-all); between two related roles every pair does. Flows are weighted by
    their bytes; a gang that states none counts each role's pairs by its GPUs.
    """
    domain_N = _rack_of(topology)
    stated = any(role.traffic for role in gang.roles) or any(each.traffic for each in gang.relations)
    total = crossing = 0.0
    for role in gang.roles:
        ranks = assignment.nodes.get(role.role)
        if ranks is None or len(ranks) < 2:
            continue
        weight = role.traffic if stated else float(len(ranks) * max(1, role.each.gpus))
        _, counts = np.unique(domain_N[ranks], return_counts=True)
        pairs = len(ranks) * (len(ranks) - 1)
        total += weight
        crossing += weight * (1.0 - float((counts * (counts - 1)).sum()) / pairs)
    for relation in gang.relations if stated else ():
        left, right = assignment.nodes.get(relation.role), assignment.nodes.get(relation.near)
        if left is None or right is None or not len(left) or not len(right):
            continue
        domains, counts = np.unique(domain_N[left], return_counts=True)
        met = np.array([(domain_N[right] == domain).sum() for domain in domains])
        total += relation.traffic
        crossing += relation.traffic * (1.0 - float((counts * met).sum()) / (len(left) * len(right)))
    return crossing / total if total else 0.0


def _rack_of(topology: Topology) -> Ints:
    """Rack of every node; nodes outside every rack get numbers of their own."""
    domain_N = topology.domain_LN[rack_position(topology)]
    return np.where(domain_N == NO_DOMAIN, -1 - np.arange(topology.num_nodes), domain_N)
