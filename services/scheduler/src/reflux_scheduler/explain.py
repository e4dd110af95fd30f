"""Why a gang cannot be placed: what is missing where, and who holds it. Pure; figures come from the same packing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from reflux_scheduler.gang import GangDemand, Placement, RoleDemand
from reflux_scheduler.packing import Budget, capacity
from reflux_scheduler.placement import find_place
from reflux_scheduler.topology import UNAVAILABLE, Domain, Level, Resources, Topology, total

RESOURCES = ("gpus", "millicpus", "memory_bytes")
"""In the order in which a shortage is looked for."""

_MAX_SHRUNK_ROLES = 4  # A hint, not worth more than a few milliseconds.
_TITLES = {"gpus": "GPUs", "millicpus": "CPUs", "memory_bytes": "GiB of memory", "nodes": "nodes"}


@dataclass(frozen=True, slots=True)
class Holder:
    """A job that holds some of a missing resource."""

    job: str
    amount: int


@dataclass(frozen=True, slots=True)
class Shortage:
    """What is missing, in the domain that comes closest. Amounts in GPUs, thousandths of a CPU or bytes."""

    who: str
    resource: str
    level: Level
    needed: int
    available: int
    domain: str
    capacity: int = 0
    """What that domain has when nobody holds any of it."""

    holders: tuple[Holder, ...] = ()
    fragmented: bool = False
    """The sum would do, but it lies in pieces that are too small."""

    @property
    def missing(self) -> int:
        """Amount that would have to become free."""
        return self.needed - self.available


def impossible(topology: Topology, gang: GangDemand) -> str | None:
    """Why a gang can never run on this topology, as one sentence; None when it fits on the empty cluster."""
    if find_place(topology, topology.totals, gang) is not None:
        return None
    short = shortage(topology, topology.totals, gang)
    sentence = (
        f"{short.who} needs {amount(short.resource, short.needed)} {_where(short.level)}, "
        f"largest {short.level} has {amount(short.resource, short.available)}"
    )
    if short.fragmented:
        sentence = (
            f"{short.who} needs {amount(short.resource, short.needed)} in pieces that fit its members, "
            f"{short.domain} has {amount(short.resource, short.available)} in such pieces"
        )
    return sentence + _largest(topology, gang)


def waiting(
    topology: Topology, free: Sequence[Resources], gang: GangDemand, placements: Mapping[str, Placement]
) -> Shortage:
    """What a gang waits for that does not fit into `free`, with the jobs that hold it, largest first."""
    if all(room == UNAVAILABLE for room in free):
        return Shortage("the job", "nodes", "cluster", 1, 0, topology.cluster.label, len(topology.nodes))
    short = shortage(topology, free, gang)
    nodes = {
        topology.nodes[index].name
        for domain in topology.domains(short.level)
        if domain.label == short.domain
        for index in domain.indices
    }
    capacity_there = sum(getattr(node.resources, short.resource) for node in topology.nodes if node.name in nodes)
    held = {
        job: sum(getattr(member.share, short.resource) for member in placement.members if member.node in nodes)
        for job, placement in placements.items()
    }
    holders = [Holder(job, share) for job, share in held.items() if share]
    holders.sort(key=lambda holder: (-holder.amount, holder.job))
    return replace(short, holders=tuple(holders), capacity=capacity_there)


def waiting_sentence(short: Shortage, absent_nodes: Sequence[str] = ()) -> str:
    """A shortage as one sentence for people."""
    text = (
        f"waits for {amount(short.resource, short.missing)}: {short.who} needs "
        f"{amount(short.resource, short.needed)} {_where(short.level)}, "
        f"{short.domain} has {amount(short.resource, short.available)} free"
    )
    if short.fragmented:
        text += " in pieces that fit"
    if short.holders:
        text += "; held by " + ", ".join(f"{h.job} ({amount(short.resource, h.amount)})" for h in short.holders[:5])
        text += f" and {len(short.holders) - 5} more" if len(short.holders) > 5 else ""
    if absent_nodes:
        named = ", ".join(absent_nodes[:5]) + (", ..." if len(absent_nodes) > 5 else "")
        text += f"; {len(absent_nodes)} node(s) without a live agent: {named}"
    return text


def amount(resource: str, value: int) -> str:
    """An amount with its unit, as people write it."""
    if resource == "millicpus":
        return f"{value / 1000:g} {_TITLES[resource]}"
    if resource == "memory_bytes":
        return f"{value / (1 << 30):.3g} {_TITLES[resource]}"
    title = _TITLES[resource]
    return f"{value} {title.removesuffix('s') if value == 1 else title}"


def shortage(topology: Topology, rooms: Sequence[Resources], gang: GangDemand) -> Shortage:
    """The first thing that is missing: a member's size, then a role's sum, then the gang's sum, then its shape."""
    for demand in gang.roles:
        found = _lacks_sum(topology, rooms, f"one {demand.role}", demand.each, "node")
        if found is not None:
            return found
    for demand in gang.roles:
        asked = demand.each.times(demand.count)
        found = _lacks_sum(topology, rooms, demand.role, asked, demand.required_level)
        if found is not None:
            return found
    found = _lacks_sum(topology, rooms, "the job", gang.total(), gang.required_level)
    return found if found is not None else _lacks_shape(topology, rooms, gang)


def _lacks_sum(
    topology: Topology, rooms: Sequence[Resources], who: str, asked: Resources, level: Level
) -> Shortage | None:
    """A shortage when no single domain of the level holds the sum; told for the domain that lacks least."""
    sums = [(domain, total(rooms, domain)) for domain in topology.domains(level)]
    if any(asked.fits_in(room) for _, room in sums):
        return None
    options = []
    for domain, room in sums:
        lacking = [
            (getattr(asked, resource) - getattr(room, resource)) / getattr(asked, resource)
            if getattr(asked, resource)
            else 0.0
            for resource in RESOURCES
        ]
        options.append((max(lacking), domain.start, domain, room, RESOURCES[lacking.index(max(lacking))]))
    _, _, domain, room, resource = min(options, key=lambda option: option[:2])
    return Shortage(who, resource, level, getattr(asked, resource), max(0, getattr(room, resource)), domain.label)


def _lacks_shape(topology: Topology, rooms: Sequence[Resources], gang: GangDemand) -> Shortage:
    """Sums suffice, pieces do not: the role of which the fewest members fit beside the roles before it."""
    best: Shortage | None = None
    for domain in topology.domains(gang.required_level):
        found = _shape_in(domain, rooms, gang)
        if best is None or found.missing < best.missing:
            best = found
    assert best is not None, "a topology has at least one domain of every level"
    return best


def _shape_in(domain: Domain, rooms: Sequence[Resources], gang: GangDemand) -> Shortage:
    worst = max(gang.roles, key=lambda demand: demand.count - min(demand.count, capacity(domain, demand, rooms)))
    resource = _tightest_resource(domain, rooms, worst)
    each = getattr(worst.each, resource) or 1
    fits = min(worst.count, capacity(domain, worst, rooms))
    if fits == worst.count:
        # Every role fits alone and only the whole gang does not: at least one member stays outside.
        fits = worst.count - 1
    return Shortage(worst.role, resource, domain.level, worst.count * each, fits * each, domain.label, fragmented=True)


def _tightest_resource(domain: Domain, rooms: Sequence[Resources], demand: RoleDemand) -> str:
    asked = [resource for resource in RESOURCES if getattr(demand.each, resource)]
    if not asked:
        return RESOURCES[0]
    room = total(rooms, domain)
    return min(asked, key=lambda resource: getattr(room, resource) / getattr(demand.each, resource))


def _where(level: Level) -> str:
    return f"in one {level}" if level != "node" else "on one node"


def _largest(topology: Topology, gang: GangDemand) -> str:
    """The largest count of one role that fits with the others as asked, as the end of a sentence."""
    for demand in sorted(gang.roles, key=lambda demand: -demand.count * max(1, demand.each.gpus))[:_MAX_SHRUNK_ROLES]:
        low, high = 0, demand.count
        while high - low > 1:
            middle = (low + high) // 2
            smaller = replace(demand, count=middle)
            roles = tuple(smaller if role is demand else role for role in gang.roles)
            if find_place(topology, topology.totals, replace(gang, roles=roles), Budget(0)) is not None:
                low = middle
            else:
                high = middle
        if low:
            return f"; with {low} instead of {demand.count} {demand.role} it would fit"
    return ""
