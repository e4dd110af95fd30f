"""Small and crowded clusters for the tests of defragmentation, and checks of its answers by plain loops."""

import random
from collections.abc import Iterator
from itertools import combinations_with_replacement

import numpy as np

from reflux_placement.gang import Assignment, GangDemand, RoleDemand
from reflux_placement.place.search import find_place
from reflux_placement.policy.defrag import Plan
from reflux_placement.policy.defrag_bound import Proof
from reflux_placement.policy.view import Ask, Live
from reflux_placement.room import Room
from reflux_placement.topology import CLUSTER, Node, Resources, Topology, build_topology

GPUS = 2


def cluster(blocks: int = 1, racks: int = 2, nodes: int = 3, gpus: int = GPUS) -> Topology:
    return build_topology(
        "c",
        [
            Node(f"b{b}r{r}n{n}", Resources(gpus), {"block": f"b{b}", "rack": f"r{r}"})
            for b in range(blocks)
            for r in range(racks)
            for n in range(nodes)
        ],
    )


def gang_of(count: int, gpus: int = GPUS, **rules: object) -> GangDemand:
    return GangDemand(roles=(RoleDemand(role="w", count=count, each=Resources(gpus), **rules),))  # type: ignore[arg-type]


def book(room: Room, job: str, gang: GangDemand, nodes: list[int]) -> None:
    room.take(job, gang, Assignment(CLUSTER, 0, {gang.roles[0].role: np.array(nodes, dtype=np.int64)}))


def live_of(room: Room, fixed: tuple[str, ...] = ()) -> dict[str, Live]:
    return {
        job: Live(
            ask=Ask(job=job, number=number, gang=holding.demand, submitted_at=0.0),
            started_at=0.0,
            saved_at=0.0,
            movable=job not in fixed,
        )
        for number, (job, holding) in enumerate(room.holdings.items())
    }


def keeps_rules(topology: Topology, gang: GangDemand, nodes: dict[str, list[int]]) -> bool:
    """The rules that these tests use, by plain loops over paths."""

    def inside(level: str, members: list[int]) -> bool:
        if level == CLUSTER:
            return True
        domains = {topology.domain_of(level, node) for node in members}
        return None not in domains and len({domain.path for domain in domains if domain}) == 1

    for demand in gang.roles:
        members = nodes[demand.role]
        if not inside(demand.required_level, members) or not inside(gang.required_level, members):
            return False
        if demand.max_per_domain:
            homes = [topology.domain_of(demand.spread_level, node) for node in members]
            if max(homes.count(home) for home in homes) > demand.max_per_domain:
                return False
        step = demand.segment_size or len(members)
        if demand.segment_size and not all(
            inside(demand.segment_level, members[at : at + step]) for at in range(0, len(members), step)
        ):
            return False
    return True


def assert_executable(room: Room, live: dict[str, Live], gang: GangDemand, found: Plan) -> None:
    """Asserts that every step of a plan is valid when its turn comes and that the gang fits at the end."""
    topology = room.topology
    where = {
        job: {role: ranks.tolist() for role, ranks in holding.assignment.nodes.items()}
        for job, holding in room.holdings.items()
    }
    for job, assignment in found.moves:
        assert live[job].movable
        before, after = where[job], {role: ranks.tolist() for role, ranks in assignment.nodes.items()}
        assert {role: len(ranks) for role, ranks in before.items()} == {r: len(n) for r, n in after.items()}
        for role in after:
            for old, new in zip(before[role], after[role], strict=True):
                assert new == old or room.open_N[new]
        where[job] = after
        assert keeps_rules(topology, live[job].ask.gang, after)
        assert min(free_gpus(topology, where, live)) >= 0
    free = free_gpus(topology, where, live)
    members = {role: ranks.tolist() for role, ranks in found.assignment.nodes.items()}
    assert keeps_rules(topology, gang, members)
    for demand in gang.roles:
        assert demand.least <= len(members[demand.role]) <= demand.most
        for node in members[demand.role]:
            assert room.open_N[node]
            free[node] -= demand.each.gpus
    assert min(free) >= 0


def free_gpus(topology: Topology, where: dict[str, dict[str, list[int]]], live: dict[str, Live]) -> list[int]:
    free = topology.capacity_NR[:, 0].tolist()
    for job, roles in where.items():
        for demand in live[job].ask.gang.roles:
            for node in roles[demand.role]:
                free[node] -= demand.each.gpus
    return free


def packings(
    topology: Topology, gang: GangDemand, free: tuple[int, ...], nodes: list[int]
) -> Iterator[tuple[int, ...]]:
    """What every valid place of a one-role gang leaves free."""
    demand = gang.roles[0]
    for spots in combinations_with_replacement(nodes, demand.count):
        left = list(free)
        for node in spots:
            left[node] -= demand.each.gpus
        if min(left) >= 0 and keeps_rules(topology, gang, {demand.role: list(spots)}):
            yield tuple(left)


def some_packing(room: Room, live: dict[str, Live], gang: GangDemand) -> bool:
    """Whether all movable jobs and the gang fit at once, tried completely: no plan exists without that."""
    topology = room.topology
    nodes = [node for node in range(topology.num_nodes) if room.open_N[node]]
    bare = room.copy()
    movable = [job for job in room.holdings if live[job].movable]
    bare.release_all(movable)
    states = {tuple(bare.free_NR[:, 0].tolist())}
    for demand in [*(live[job].ask.gang for job in movable), gang]:
        states = {left for free in states for left in packings(topology, demand, free, nodes)}
    return bool(states)


RULES = [
    {},
    {"required_level": "rack"},
    {"required_level": "node"},
    {"segment_size": 2},
    {"max_per_domain": 1, "spread_level": "rack"},
]


def crowded(seed: int) -> tuple[Room, dict[str, Live], GangDemand]:
    """A tiny cluster with a few gangs at random valid places, and a gang that may or may not fit."""
    rng = random.Random(seed)
    topology = cluster(blocks=rng.randint(1, 2), racks=2, nodes=rng.randint(2, 3))
    room = Room(topology)
    for index in range(rng.randint(1, 5)):
        rules = rng.choice(RULES)
        gang = gang_of(2 if "segment_size" in rules else rng.randint(1, 2), rng.randint(1, 2), **rules)
        count, gpus = gang.roles[0].count, gang.roles[0].each.gpus
        spots = [
            spots
            for spots in combinations_with_replacement(range(topology.num_nodes), count)
            if keeps_rules(topology, gang, {"w": list(spots)})
            and all(room.free_NR[node, 0] >= gpus * spots.count(node) for node in spots)
        ]
        if spots:
            book(room, f"j{index}", gang, list(rng.choice(spots)))
    fixed = [job for job in room.holdings if rng.random() < 0.25]
    for node in range(topology.num_nodes):
        room.open_N[node] = rng.random() > 0.05
    rules = rng.choice([*RULES[:4], {"required_level": "block"}])
    count = rng.choice([2, 4] if "segment_size" in rules else [1, 2, 3])
    return room, live_of(room, tuple(fixed)), gang_of(count, rng.randint(1, 2), **rules)


def assert_counted(room: Room, live: dict[str, Live], proof: Proof) -> None:
    """The arithmetic of a certificate, recounted from the room by plain loops."""
    assert proof.at_most < proof.slot.needed
    assert str(proof.at_most) in proof.sentence
    if proof.kind == "capacity":
        return
    topology = room.topology
    column = ("GPUs", "millicpus", "bytes of memory").index(proof.resource)
    fixed_use = [0] * topology.num_nodes
    for job, holding in room.holdings.items():
        if not live[job].movable:
            for demand in holding.demand.roles:
                for node in holding.assignment.nodes[demand.role]:
                    fixed_use[node] += demand.each.row[column]
    capacity: dict[object, int] = {}
    for node in range(topology.num_nodes):
        domain = topology.domain_of(proof.slot.level, node)
        free = int(topology.capacity_NR[node, column]) - fixed_use[node] if room.open_N[node] else 0
        capacity[domain.path if domain else None] = capacity.get(domain.path if domain else None, 0) + free
    assert sorted(capacity.values()) == sorted(c for b in proof.bins for c in [b.capacity] * b.count)
    weight = {each.size: each.weight for each in proof.pieces} | {proof.slot_size: proof.slot_weight}
    for each in proof.bins:
        assert each.most >= heaviest(each.capacity, weight)
    load = sum(each.weight * each.count for each in proof.pieces)
    hold = sum(each.most * each.count for each in proof.bins)
    assert load + proof.slot_weight * (proof.at_most + 1) > hold
    moving = sum(
        demand.each.row[column] * len(holding.assignment.nodes[demand.role])
        for job, holding in room.holdings.items()
        if live[job].movable and room.open_N[holding.node_M].all()
        for demand in holding.demand.roles
    )
    assert sum(each.size * each.count for each in proof.pieces) >= moving


def heaviest(capacity: int, weight: dict[int, int]) -> int:
    """The best multiset of sizes within a capacity, by trying all."""
    return max((weight[size] + heaviest(capacity - size, weight) for size in weight if size <= capacity), default=0)


def churned(seed: int, load: float, racks: int = 40) -> Room:
    """Racks of 18 nodes under gangs that came and went through the policy itself."""
    rng = random.Random(seed)
    room = Room(cluster(blocks=racks // 8, racks=8, nodes=18, gpus=4))
    total, held, jobs = racks * 18, 0, []
    for number in range(500):
        size = rng.choices([1, 2, 4, 8, 16, 18, 32], [25, 20, 15, 12, 10, 6, 5])[0]
        gang = gang_of(size, 4, **({"required_level": "rack"} if size <= 18 else {"segment_size": 16}))
        found = find_place(room, gang) if held + size <= load * total else None
        if isinstance(found, Assignment):
            room.take(f"j{number}", gang, found)
            jobs.append(f"j{number}")
            held += size
        elif jobs:
            job = jobs.pop(rng.randrange(len(jobs)))
            held -= room.holdings[job].assignment.num_members
            room.release(job)
    return room
