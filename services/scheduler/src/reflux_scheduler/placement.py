"""Where a gang goes: all members or none, in the tightest domain that fits. Pure: no I/O, no protos, no clock."""

from collections.abc import Mapping, Sequence

from reflux_scheduler.gang import GangDemand, Member, Placement
from reflux_scheduler.packing import Budget, Counts, could_hold, domain_order, pack
from reflux_scheduler.topology import LEVELS, Domain, Resources, Topology, tightness


def find_place(
    topology: Topology, free: Sequence[Resources], gang: GangDemand, budget: Budget | None = None
) -> tuple[Domain, Mapping[str, Counts]] | None:
    """The tightest domain that holds the whole gang now, best fit among equals, and the members per node index.

    Args:
        topology: the tree.
        free: room per node index; an unavailable node has none.
        gang: what to place.
        budget: steps of the exact search behind the greedy one; None takes the default.

    Returns:
        None when no domain up to the gang's required level holds it.
    """
    budget = Budget() if budget is None else budget
    for level in LEVELS[: tightness(gang.required_level) + 1]:
        candidates = [domain for domain in topology.domains(level) if could_hold(domain, gang, free)]
        for domain in sorted(candidates, key=lambda domain: domain_order(domain, free)):
            packed = pack(topology, domain, gang, free, budget)
            if packed is not None:
                return domain, packed
    return None


def place(
    topology: Topology, free: Sequence[Resources], free_gpus: Sequence[Sequence[int]], gang: GangDemand
) -> Placement | None:
    """Like `find_place`, with ranks in topology order and the GPU indices that each member gets.

    `free_gpus` holds the indices of the free GPUs per node index; lowest indices go first.
    """
    found = find_place(topology, free, gang)
    if found is None:
        return None
    domain, packed = found
    taken = [0] * len(topology.nodes)
    members: list[Member] = []
    for demand in gang.roles:
        rank = 0
        for index, count in sorted(packed[demand.role].items()):
            for _ in range(count):
                first = taken[index]
                taken[index] += demand.each.gpus
                gpus = tuple(free_gpus[index][first : taken[index]])
                members.append(Member(demand.role, rank, topology.nodes[index].name, demand.each, gpus))
                rank += 1
    return Placement(domain.level, domain.path, tuple(members))
