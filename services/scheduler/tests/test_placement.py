"""Placement against brute force on small trees, and against the figures of a GB200 cluster."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reflux_scheduler.errors import InvalidJob
from reflux_scheduler.explain import impossible, shortage, waiting, waiting_sentence
from reflux_scheduler.gang import GangDemand, RoleDemand
from reflux_scheduler.inventory import Inventory
from reflux_scheduler.placement import find_place
from reflux_scheduler.topology import LEVELS, UNAVAILABLE, Domain, Node, Resources, Topology, TopologyBuilder, tightness
from reflux_scheduler.topology_file import load_topology

GB200 = load_topology(Path(__file__).parents[3] / "configs" / "topologies" / "gb200-8-racks.toml")
TRAY = Resources(gpus=4, millicpus=144_000, memory_bytes=960 << 30)


def inventory_of(topology: Topology) -> Inventory:
    inventory = Inventory(topology)
    inventory.set_available(node.name for node in topology.nodes)
    return inventory


def gang(*roles: tuple[str, int, Resources], level="cluster") -> GangDemand:
    return GangDemand(tuple(RoleDemand(*role) for role in roles), level)


def racks_of(placement) -> set[str]:
    topology = GB200
    return {
        rack.label
        for rack in topology.domains("rack")
        for member in placement.members
        if topology.index_of(member.node) in rack.indices
    }


amounts = st.builds(Resources, st.integers(0, 4), st.integers(0, 3).map(lambda n: n * 500), st.integers(0, 3))


@st.composite
def topologies(draw) -> Topology:
    builder = TopologyBuilder("c")
    names = itertools.count()
    for block in range(draw(st.integers(1, 2))):
        for rack in range(draw(st.integers(1, 2))):
            nodes = [Node(f"n{next(names)}", draw(amounts)) for _ in range(draw(st.integers(1, 2)))]
            builder.add_rack(f"b{block}", f"r{rack}", nodes)
    return builder.build()


@st.composite
def gangs(draw) -> GangDemand:
    roles = tuple(
        RoleDemand(f"role{n}", draw(st.integers(1, 3)), draw(amounts), draw(st.sampled_from(LEVELS)))
        for n in range(draw(st.integers(1, 3)))
    )
    return GangDemand(roles, draw(st.sampled_from(LEVELS)))


def brute_force(topology: Topology, free: list[Resources], wanted: GangDemand, domain: Domain) -> bool:
    """Whether any assignment of members to nodes of the domain exists, tried one member at a time."""
    members = [demand for demand in wanted.roles for _ in range(demand.count)]

    def inside(demand: RoleDemand, first: int, index: int) -> bool:
        return any(first in d.indices and index in d.indices for d in topology.domains(demand.required_level))

    def assign(position: int, room: list[Resources], first_of_role: dict[str, int]) -> bool:
        if position == len(members):
            return True
        demand = members[position]
        for index in domain.indices:
            if not demand.each.fits_in(room[index]):
                continue
            first = first_of_role.get(demand.role, index)
            if not inside(demand, first, index):
                continue
            left = [*room[:index], room[index] - demand.each, *room[index + 1 :]]
            if assign(position + 1, left, {**first_of_role, demand.role: first}):
                return True
        return False

    return assign(0, free, {})


@settings(max_examples=300, deadline=None)
@given(topologies(), gangs(), st.data())
def test_the_tightest_domain_agrees_with_brute_force(topology, wanted, data):
    free = [UNAVAILABLE if data.draw(st.integers(0, 9)) == 0 else room for room in topology.totals]
    found = find_place(topology, free, wanted)
    levels = [
        level
        for level in LEVELS[: tightness(wanted.required_level) + 1]
        if any(brute_force(topology, free, wanted, domain) for domain in topology.domains(level))
    ]
    assert (found is None) == (not levels)
    if found is not None:
        assert found[0].level == levels[0]


@settings(max_examples=200, deadline=None)
@given(topologies(), st.lists(st.tuples(gangs(), st.booleans()), min_size=1, max_size=8))
def test_no_over_commit_and_all_or_nothing(topology, requests):
    inventory = inventory_of(topology)
    for number, (wanted, leave) in enumerate(requests):
        before = inventory.free()
        placement = inventory.place(f"job{number}", wanted)
        if placement is None:
            assert inventory.free() == before
            short = waiting(topology, before, wanted, inventory.placements)
            assert short.missing > 0
            assert waiting_sentence(short)
            continue
        assert [(m.role, m.rank) for m in placement.members] == [
            (demand.role, rank) for demand in wanted.roles for rank in range(demand.count)
        ]
        check_within_domain(topology, placement, wanted)
        check_nothing_twice(topology, inventory)
        if leave:
            inventory.release(f"job{number}")
            assert inventory.free() == before


def check_within_domain(topology, placement, wanted) -> None:
    (domain,) = [d for d in topology.domains(placement.level) if d.path == placement.domain]
    assert tightness(domain.level) <= tightness(wanted.required_level)
    for demand in wanted.roles:
        indices = [topology.index_of(m.node) for m in placement.members if m.role == demand.role]
        assert indices == sorted(indices), "ranks follow the topology"
        assert set(indices) <= set(domain.indices)
        assert any(set(indices) <= set(d.indices) for d in topology.domains(demand.required_level))


def check_nothing_twice(topology, inventory) -> None:
    for node in topology.nodes:
        members = [m for p in inventory.placements.values() for m in p.members if m.node == node.name]
        gpus = [gpu for member in members for gpu in member.gpu_indices]
        assert len(gpus) == len(set(gpus))
        assert len(gpus) == sum(member.share.gpus for member in members)
        used = Resources()
        for member in members:
            used = used + member.share
        left = node.resources - used
        assert min(left.gpus, left.millicpus, left.memory_bytes) >= 0
        assert inventory.unallocated(node.name) == left


@settings(max_examples=150, deadline=None)
@given(topologies(), gangs())
def test_impossible_means_that_it_does_not_fit_on_the_empty_cluster(topology, wanted):
    fits = find_place(topology, list(topology.totals), wanted) is not None
    reason = impossible(topology, wanted)
    assert (reason is None) == fits
    if not fits:
        assert shortage(topology, topology.totals, wanted).missing > 0


def test_one_gpu_job_goes_to_the_fullest_node_that_fits():
    inventory = inventory_of(GB200)
    first = inventory.place("a", gang(("learner", 1, Resources(gpus=3))))
    second = inventory.place("b", gang(("decode", 1, Resources(gpus=1))))
    assert first.level == second.level == "node"
    assert first.members[0].node == second.members[0].node
    assert second.members[0].gpu_indices == (3,)


def test_whole_racks_stay_free():
    inventory = inventory_of(GB200)
    placements = [inventory.place(f"job{n}", gang(("learner", 9, TRAY))) for n in range(4)]
    assert [placement.level for placement in placements] == ["rack"] * 4
    assert len(set().union(*(racks_of(placement) for placement in placements))) == 2


def test_a_gang_over_racks_fills_racks_and_fits_the_last_piece_best():
    inventory = inventory_of(GB200)
    inventory.place("small", gang(("learner", 14, TRAY)))
    placement = inventory.place("big", gang(("learner", 22, TRAY)))
    assert placement.level == "block"
    by_rack = [
        sum(1 for m in placement.members if GB200.index_of(m.node) in rack.indices) for rack in GB200.domains("rack")
    ]
    assert by_rack == [4, 18, 0, 0, 0, 0, 0, 0]


def test_one_role_may_be_bound_to_a_rack_while_the_others_go_anywhere():
    inventory = inventory_of(GB200)
    wanted = GangDemand((RoleDemand("rollout", 36, TRAY), RoleDemand("learner", 18, TRAY, "rack")))
    placement = inventory.place("a", wanted)
    learner = [m for m in placement.members if m.role == "learner"]
    assert len({(GB200.index_of(m.node)) // 18 for m in learner}) == 1
    assert placement.level == "block"


def test_impossible_job_names_the_largest_rack_and_the_largest_gang():
    reason = impossible(GB200, gang(("learner", 20, TRAY), level="rack"))
    assert reason == (
        "the job needs 80 GPUs in one rack, largest rack has 72 GPUs; with 18 instead of 20 learner it would fit"
    )
    assert impossible(GB200, gang(("learner", 145, TRAY))).endswith("with 144 instead of 145 learner it would fit")
    assert impossible(GB200, gang(("learner", 1, Resources(gpus=5)))).startswith("one learner needs 5 GPUs on one node")


def test_waiting_names_resource_amount_and_holders():
    inventory = inventory_of(GB200)
    wanted = gang(("learner", 18, TRAY), level="rack")
    for number in range(8):
        inventory.place(f"jobs/{number}", gang(("decode", 10 + number, TRAY), level="rack"))
    short = waiting(GB200, inventory.free(), wanted, inventory.placements)
    assert (short.resource, short.level, short.missing) == ("gpus", "rack", 40)
    assert [holder.job for holder in short.holders] == ["jobs/0"]
    assert waiting_sentence(short) == (
        "waits for 40 GPUs: the job needs 72 GPUs in one rack, gb200/block-1/rack-1 has 32 GPUs free; "
        "held by jobs/0 (40 GPUs)"
    )


def test_fragments_are_told_apart_from_a_missing_sum():
    builder = TopologyBuilder("c")
    builder.add_rack("b", "r", [Node("n1", Resources(4)), Node("n2", Resources(4))])
    topology = builder.build()
    inventory = inventory_of(topology)
    inventory.place("jobs/a", gang(("x", 1, Resources(2))))
    free = inventory.free()
    free[1] = Resources(2)
    short = waiting(topology, free, gang(("y", 1, Resources(4))), inventory.placements)
    assert (short.level, short.missing) == ("node", 2)
    wanted = gang(("y", 2, Resources(3)), ("z", 2, Resources(1)), ("w", 1, Resources(2)))
    assert "would fit" in impossible(topology, wanted)


def test_nodes_without_an_agent_take_nothing_not_even_a_role_of_no_size():
    inventory = Inventory(GB200)
    wanted = gang(("rollout", 1, Resources()))
    assert inventory.place("a", wanted) is None
    short = waiting(GB200, inventory.free(), wanted, {})
    assert (short.resource, short.missing) == ("nodes", 1)
    inventory.set_available(["gb144", "unknown"])
    assert inventory.place("a", wanted).members[0].node == "gb144"


def test_a_decided_placement_is_taken_again_or_refused_whole():
    inventory = inventory_of(GB200)
    placement = inventory.place("a", gang(("learner", 2, TRAY)))
    again = inventory_of(GB200)
    again.take("a", placement)
    assert again.free() == inventory.free()
    with pytest.raises(ValueError, match="does not fit"):
        again.take("b", placement)
    assert again.free() == inventory.free()
    again.release("a")
    again.release("a")
    assert again.free() == list(GB200.totals)


@pytest.mark.parametrize(
    "roles",
    [
        (),
        (RoleDemand("a", 0, Resources(1)),),
        (RoleDemand("a", 1, Resources(-1)),),
        (RoleDemand("a", 1, Resources(1)), RoleDemand("a", 1, Resources(1))),
        (RoleDemand("a", 10**9, Resources(1)),),
    ],
)
def test_contradictory_gangs_are_refused(roles):
    with pytest.raises(InvalidJob):
        GangDemand(roles)
