"""Owns the relayed route: the stages in which trainers serve every byte once and peers pass it on."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from reflux_weightplan.classes import Joined
from reflux_weightplan.demand import Accumulator, Demand
from reflux_weightplan.links import SAME_DOMAIN, LinkModel, Ports, tiers
from reflux_weightplan.mesh import Place
from reflux_weightplan.peers import Division, Peers, divide, exchange
from reflux_weightplan.schedule import Schedule, schedule
from reflux_weightplan.sides import Ints, Side

SLABS = 2


@dataclass(frozen=True)
class RelayPlan:
    """Stages run one after the other. In a stage's schedule rows are the source ranks, then the target ranks as peers.

    `choice` int64 [groups, ranks] are the sources of every group. `lower_bound_seconds` is the time of the busiest port
    when trainers send every byte once and each target rank receives its bytes once.
    """

    peers: Peers
    division: Division
    choice: Ints
    stages: tuple[Schedule, ...]
    lower_bound_seconds: float

    @property
    def makespan_seconds(self) -> float:
        """Seconds until the last target rank has everything."""
        return sum(stage.makespan_seconds for stage in self.stages)

    def servers(self, target_rank: int) -> dict[int, int]:
        """Which peer a target rank reads each share from; its own share comes from the sources."""
        members = self.peers.members[self.peers.group_D[target_rank]]
        owners = {share: int(members[share]) for share in range(self.division.shares)}
        return {share: owner for share, owner in owners.items() if owner != target_rank}


@dataclass(frozen=True)
class Network:
    """The places of both sides and the link model, with the ports that follow from them."""

    source_places: tuple[Place, ...]
    target_places: tuple[Place, ...]
    link: LinkModel
    sources: Ports
    targets: Ports


def plan_relay(
    sums: Accumulator,
    joined: Joined,
    target: Side,
    peers: Peers,
    network: Network,
    choose_sources: Callable[[Demand], Ints],
) -> RelayPlan:
    """Stages of the relayed route; needs at least two peers of every content."""
    division = divide(joined, target, peers, SLABS)
    demands = [sums.demand(division.label_T, division.wants(slab, peers)) for slab in range(SLABS)]
    first, *rest = demands
    for demand in rest:
        first = Demand(first.nbytes + demand.nbytes, first.messages + demand.messages)
    choice = choose_sources(first)
    sources = len(network.source_places)
    places = network.source_places + network.target_places
    stages, total = [], np.zeros((len(places), target.ranks), np.int64)
    for stage in range(SLABS + 1):
        nbytes, messages = np.zeros_like(total), np.zeros_like(total)
        if stage < SLABS:
            nbytes[:sources] = by_source(demands[stage].nbytes, choice, sources)
            messages[:sources] = by_source(demands[stage].messages, choice, sources)
        if stage:
            passed = exchange(joined.classes, target, peers, division, stage - 1)
            nbytes[sources:], messages[sources:] = passed.nbytes, passed.messages
        total += nbytes
        stages.append(schedule(nbytes, messages, places, network.target_places, network.link))
    local = tiers(places, network.target_places) <= SAME_DOMAIN
    ported = np.where(local, 0, total)
    local_seconds = np.where(local, total, 0).sum(axis=0) / network.link.local_bytes_per_second
    bound = max(port_bound_of(ported[:sources], ported, network), float(local_seconds.max()))
    return RelayPlan(peers, division, choice, tuple(stages), bound)


def port_bound_of(sent: np.ndarray, received: np.ndarray, network: Network) -> float:
    """Seconds of the busiest port of the sources for `sent`, or of the targets for `received`; pairs that use no port
    are not to be counted in."""
    out = np.bincount(network.sources.port_R, weights=sent.sum(axis=1)) / network.sources.rates
    into = np.bincount(network.targets.port_R, weights=received.sum(axis=0)) / network.targets.rates
    return float(max(out.max(), into.max()))


def by_source(values_GD: Ints, choice: Ints, sources: int) -> Ints:
    """Sums of a value per group and target rank by the source rank that serves it, int64 [S, D]."""
    sums = np.zeros((sources, values_GD.shape[1]), np.int64)
    columns = np.broadcast_to(np.arange(values_GD.shape[1]), values_GD.shape)
    np.add.at(sums, (choice, columns), values_GD)
    return sums
