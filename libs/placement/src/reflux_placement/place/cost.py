"""Owns what a placement costs: seconds of communication per step, and the room that it leaves in pieces.

    total         = traffic + fragmentation                                        (seconds per step)

    traffic       = sum over flows f of  B_f * sum over tiers t of  s_t * P_f(t)
                    + spread_seconds * sum over spread roles r of  sum_d (n_r,d / n_r)^2
                    + apart_seconds  * sum over preferred relations of  (members without their peer) / (members)

    fragmentation = sum over levels L of  phi_L * sum over touched domains d of L of  (GPUs left free in d)

A flow is a role with itself (`RoleDemand.traffic`), a pair of roles (`Relation.traffic`), and the gang as a whole:
every gang exchanges `floor_bytes` per GPU evenly among its GPUs (gradients, control), so that one without stated
traffic is compact too. Roles that ask to be spread (`spread_level` without a bound) take no part in the last one.

B bytes are spread evenly over all pairs of members, so a pair lies in one domain of level L with probability

    Q_f(L) = sum_d n_a,d * n_b,d / (n_a * n_b)         and meets at tier t with    P_f(t) = Q_f(t) - Q_f(t - 1)

Tiers: the fast domain (level `fast_level`, one NVLink domain), then every named level above it, then the cluster.
A node without a label at a level counts as a domain of its own there: two members on one node never cross it.

Seconds per byte s_t: 1 / 900 GB/s inside the NVLink domain (GB200: 1.8 TB/s per GPU, both directions), 1 / 50 GB/s
through one NIC in a block (ConnectX-7, 400 Gb/s), 1.7 times as much across spines of blocks (P2P is up to 70 % slower:
Arnold, arXiv 2509.15940), and 10 times as much for each level above (no public figure: an assumption for lines between
buildings). phi is small: what is left open in touched domains decides between places of equal traffic.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reflux_placement.gang import Assignment, GangDemand, Relation, RoleDemand
from reflux_placement.place.tree import Layer, Tree, tree_of
from reflux_placement.room import Room
from reflux_placement.topology import Ints, Topology

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Figures of the formula. Defaults are those of GB200 NVL72 racks."""

    fast_level: str = "rack"
    """Level of one NVLink domain; a topology without it has its fast domain in the node."""

    fast_bytes_per_second: float = 900e9
    nic_bytes_per_second: float = 50e9
    spine_factor: float = 1.7
    """Seconds per byte across blocks, relative to inside one."""

    far_factor: float = 10.0
    """The same for each level above that."""

    floor_bytes: float = 1e8
    """Bytes per step and GPU that any gang exchanges."""

    spread_seconds: float = 1.0
    apart_seconds: float = 1.0
    node_fragment_seconds: float = 1e-5
    """Per GPU left free on a touched node."""

    fast_fragment_seconds: float = 1e-5
    """Per GPU left free in a touched NVLink domain."""

    block_fragment_seconds: float = 1e-6
    """Per GPU left free in a touched domain of the level above it, when that is below the cluster."""


DEFAULT_WEIGHTS = Weights()


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds per step. Lower is better."""

    traffic: float
    fragmentation: float

    @property
    def total(self) -> float:
        """Sum of both."""
        return self.traffic + self.fragmentation


@dataclass(frozen=True, slots=True)
class Prices:
    """The weights on the levels of one topology."""

    fast: int
    """Position of the fast level."""

    apart: tuple[float, ...]
    """Extra seconds per byte when a pair is in different domains of each level; zero below `fast`."""

    fragment: tuple[float, ...]
    """Seconds per free GPU in touched domains of each level."""

    fast_seconds: float
    """Seconds per byte inside the fast domain."""


def prices_of(topology: Topology, weights: Weights = DEFAULT_WEIGHTS) -> Prices:
    """The marginal prices of crossing each level: s_t - s_(t-1)."""
    fast = topology.levels.index(weights.fast_level) if weights.fast_level in topology.levels else 0
    nic = 1 / weights.nic_bytes_per_second
    inside = [1 / weights.fast_bytes_per_second, nic, nic * weights.spine_factor]
    num_levels = len(topology.levels)
    while len(inside) < num_levels + 1:
        inside.append(inside[-1] * weights.far_factor)
    apart = [0.0] * num_levels
    for level in range(fast, num_levels - 1):
        apart[level] = inside[level - fast + 1] - inside[level - fast]
    fragment = [0.0] * num_levels
    fragment[0] += weights.node_fragment_seconds
    if fast:
        fragment[fast] += weights.fast_fragment_seconds
    if fast + 1 < num_levels - 1:
        fragment[fast + 1] += weights.block_fragment_seconds
    return Prices(fast, tuple(apart), tuple(fragment), inside[0])


@dataclass(frozen=True, eq=False)
class Flows:
    """The quadratic part of the traffic for R roles: seconds = constant - sum_L sum_ab rate_LRR[L] * Q_ab(L) parts."""

    bytes_RR: Floats
    """Bytes of every ordered pair of roles, stated ones and those of the floor; symmetric."""

    spread_R: Ints
    """Level over which a role wants to be spread; -1 for none."""


def flows_of(
    topology: Topology,
    roles: tuple[RoleDemand, ...],
    relations: tuple[Relation, ...],
    counts: tuple[int, ...],
    weights: Weights,
) -> Flows:
    """Bytes between all pairs of roles at the given counts.

    The floor's bytes B between all GPUs fall to roles a and b in the share g_a g_b / g^2 of their GPUs, so that it is
    one more flow of each pair.
    """
    position = {demand.role: index for index, demand in enumerate(roles)}
    bytes_RR = np.zeros((len(roles), len(roles)))
    for index, demand in enumerate(roles):
        bytes_RR[index, index] += demand.traffic
    for relation in relations:
        one, other = position[relation.role], position[relation.near]
        bytes_RR[one, other] += relation.traffic / 2
        bytes_RR[other, one] += relation.traffic / 2
    spread = [
        topology.tightness(demand.spread_level) if demand.spread_level and not demand.max_per_domain else -1
        for demand in roles
    ]
    gpus = [0 if spread[i] >= 0 else demand.each.gpus * counts[i] for i, demand in enumerate(roles)]
    share_R = np.array(gpus, dtype=np.float64)
    if share_R.sum() > 0:
        bytes_RR += weights.floor_bytes * np.outer(share_R, share_R) / share_R.sum()
    present = np.array(counts) > 0
    bytes_RR *= np.outer(present, present)
    return Flows(bytes_RR, np.array(spread, dtype=np.int64))


def cost(room: Room, gang: GangDemand, assignment: Assignment, weights: Weights = DEFAULT_WEIGHTS) -> Cost:
    """What an assignment costs in a room that the gang is not booked in yet."""
    topology = room.topology
    return cost_of_nodes(
        topology,
        tree_of(topology),
        gang,
        assignment.nodes,
        np.maximum(room.free_NR[:, 0], 0),
        prices_of(topology, weights),
        weights,
    )


def cost_of_nodes(
    topology: Topology,
    tree: Tree,
    gang: GangDemand,
    nodes: dict[str, Ints],
    free_gpus_N: Ints,
    prices: Prices,
    weights: Weights = DEFAULT_WEIGHTS,
    running: Ints | None = None,
) -> Cost:
    """The same for roles placed so far. `free_gpus_N` is before the placement, `running` its `running_sums`, if any."""
    roles = tuple(demand for demand in gang.roles if len(nodes.get(demand.role, ())))
    if not roles:
        return Cost(0.0, 0.0)
    relations = tuple(r for r in gang.relations if len(nodes.get(r.role, ())) and len(nodes.get(r.near, ())))
    ranks = [nodes[demand.role] for demand in roles]
    counts = tuple(len(each) for each in ranks)
    flows = flows_of(topology, roles, relations, counts, weights)
    used_U, count_RU = members_by_node(ranks)
    gpus_RU = count_RU * np.array([[demand.each.gpus] for demand in roles])
    num_R = np.array(counts, dtype=np.float64)
    traffic, fragmentation = float(flows.bytes_RR.sum()) * prices.fast_seconds, 0.0
    taken = int(gpus_RU.sum())
    for level in range(len(tree.layers) - 1):
        if not (prices.apart[level] or prices.fragment[level] or (flows.spread_R == level).any()):
            continue
        layer = tree.layers[level]
        part_U = layer.part_N[used_U]
        first_D = np.concatenate(([0], np.flatnonzero(np.diff(part_U)) + 1))
        share_RD = np.add.reduceat(count_RU, first_D, axis=1) / num_R[:, None]
        same_RR = share_RD @ share_RD.T
        traffic += prices.apart[level] * float((flows.bytes_RR * (1 - same_RR)).sum())
        spread = np.flatnonzero(flows.spread_R == level)
        traffic += weights.spread_seconds * float(same_RR[spread, spread].sum())
        if prices.fragment[level]:
            fragmentation += prices.fragment[level] * (_free_in(free_gpus_N, running, layer, part_U[first_D]) - taken)
    soft = [relation for relation in relations if relation.level and not relation.required]
    traffic += weights.apart_seconds * sum(share_apart(topology, tree, relation, nodes) for relation in soft)
    return Cost(traffic, fragmentation)


def running_sums(values_N: Ints) -> Ints:
    """Sums of the first 0, 1, ..., N values."""
    return np.concatenate(([0], np.cumsum(values_N)))


def _free_in(free_gpus_N: Ints, running: Ints | None, layer: Layer, parts_D: Ints) -> int:
    """Free GPUs of some parts together."""
    if len(layer.first_child_P) == 0:
        return int(free_gpus_N[parts_D].sum())
    running = running_sums(free_gpus_N) if running is None else running
    return int((running[layer.stops_P[parts_D]] - running[layer.starts_P[parts_D]]).sum())


def members_by_node(ranks: list[Ints]) -> tuple[Ints, Ints]:
    """The used nodes, ascending [U], and the members of every role on them [R, U]."""
    every = np.concatenate(ranks)
    used_U, where = np.unique(every, return_inverse=True)
    row = np.repeat(np.arange(len(ranks)), [len(each) for each in ranks])
    flat = np.bincount(row * len(used_U) + where, minlength=len(ranks) * len(used_U))
    return used_U, flat.reshape(len(ranks), len(used_U))


def peers(count: int, near_count: int) -> Ints:
    """Rank of the member of `near` that each of `count` members belongs to: i * |near| // |role|."""
    return np.arange(count, dtype=np.int64) * near_count // count


def share_apart(topology: Topology, tree: Tree, relation: Relation, nodes: dict[str, Ints]) -> float:
    """Share of the members of a relation's role that are not in one domain of its level with their peer."""
    role_M, near_M = nodes[relation.role], nodes[relation.near]
    layer = tree.layers[topology.tightness(relation.level)]
    mine, theirs = layer.part_N[role_M], layer.part_N[near_M[peers(len(role_M), len(near_M))]]
    together = (mine == theirs) & layer.real_P[mine]
    return float(1 - together.mean())
