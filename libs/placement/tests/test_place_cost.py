import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "scheduler"))

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from place_worlds import cluster, gang, random_world, role, room_with, tray
from small_instances import instance

from reflux_placement.gang import Assignment, GangDemand, Relation
from reflux_placement.place.check import broken
from reflux_placement.place.cost import DEFAULT_WEIGHTS, Weights, cost
from reflux_placement.place.search import Limits, find_place
from reflux_placement.room import Room
from reflux_placement.topology import NO_DOMAIN, build_topology

NO_FLOOR = Weights(floor_bytes=0.0)
BILLION = 1e9


def seconds_between(room: Room, one: int, other: int, weights: Weights) -> float:
    """Seconds per byte of two nodes, tier by tier: the tightest level, from the NVLink domain up, that holds both."""
    levels = room.topology.levels
    fast = levels.index(weights.fast_level) if weights.fast_level in levels else 0
    nic = 1 / weights.nic_bytes_per_second
    prices = [1 / weights.fast_bytes_per_second, nic, nic * weights.spine_factor]
    prices += [nic * weights.spine_factor * weights.far_factor**power for power in range(1, len(levels))]
    for tier, position in enumerate(range(fast, len(levels))):
        domains = room.topology.domain_LN[position]
        if one == other or domains[one] == domains[other] != NO_DOMAIN:
            return prices[tier]
    raise AssertionError("all nodes are in the cluster")


def slow_traffic(room: Room, demand: GangDemand, answer: Assignment, weights: Weights) -> float:
    """The formula pair by pair, floor and wishes left out."""
    flows = [(each.role, each.role, each.traffic) for each in demand.roles]
    flows += [(each.role, each.near, each.traffic) for each in demand.relations]
    total = 0.0
    for one, other, num_bytes in flows:
        pairs = [(a, b) for a in answer.nodes[one] for b in answer.nodes[other]]
        if pairs and num_bytes:
            total += num_bytes * float(np.mean([seconds_between(room, a, b, weights) for a, b in pairs]))
    return total


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_traffic_is_the_mean_over_all_pairs_of_members(seed: int) -> None:
    room, demand = random_world(seed)
    roles = tuple(
        role(each.role, each.count, each.each.gpus, traffic=float(seed % 7) * BILLION) for each in demand.roles
    )
    relations = tuple(Relation(role=each.role, near=each.near, traffic=2 * BILLION) for each in demand.relations)
    plain = GangDemand(roles=roles, relations=relations)
    rng = np.random.default_rng(seed)
    nodes = {each.role: np.sort(rng.integers(0, room.topology.num_nodes, each.count)) for each in roles}
    answer = Assignment("cluster", 0, nodes)
    assert cost(room, plain, answer, NO_FLOOR).traffic == pytest.approx(slow_traffic(room, plain, answer, NO_FLOOR))


def test_a_byte_costs_nvlink_in_a_rack_a_nic_across_racks_and_more_across_blocks() -> None:
    room = Room(cluster([[2, 2], [2]]))
    demand = gang(role("a", 1, traffic=0.0), role("b", 1), relations=(Relation(role="b", near="a", traffic=900e9),))

    def seconds(a: int, b: int) -> float:
        nodes = {"a": np.array([a]), "b": np.array([b])}
        return cost(room, demand, Assignment("cluster", 0, nodes), NO_FLOOR).traffic

    assert [seconds(0, 1), seconds(0, 2), seconds(0, 4)] == pytest.approx([1.0, 18.0, 30.6])


def test_nodes_without_a_label_are_domains_of_their_own() -> None:
    room = Room(build_topology("gb", [tray("u0"), tray("u1"), tray("n0", "r0", "b0")]))
    demand = gang(role("a", 2, gpus=1, traffic=50e9))

    def seconds(*ranks: int) -> float:
        return cost(room, demand, Assignment("cluster", 0, {"a": np.array(ranks)}), NO_FLOOR).traffic

    unlabelled = [room.topology.index_of("u0"), room.topology.index_of("u1")]
    assert seconds(unlabelled[0], unlabelled[0]) == pytest.approx(50 / 900)
    assert seconds(*unlabelled) > 0.8


def test_fragmentation_counts_what_stays_free_in_touched_domains() -> None:
    room = room_with(cluster([[3, 3], [3]]), [4, 3, 0, 4, 4, 4, 4, 4, 4])
    demand = gang(role("a", 5, gpus=1))
    answer = Assignment("rack", 0, {"a": np.array([0, 0, 0, 1, 1])})
    weights = DEFAULT_WEIGHTS
    expected = weights.node_fragment_seconds * 2 + weights.fast_fragment_seconds * 2
    expected += weights.block_fragment_seconds * 14
    assert cost(room, demand, answer).fragmentation == pytest.approx(expected)


def test_the_local_search_never_makes_a_placement_dearer_and_often_cheaper() -> None:
    gains = []
    for seed in range(40):
        room, demand = instance(seed)
        plain = find_place(room, demand, limits=Limits(improve_steps=0))
        better = find_place(room, demand, limits=Limits(improve_steps=40))
        assert isinstance(plain, Assignment) == isinstance(better, Assignment)
        if isinstance(plain, Assignment) and isinstance(better, Assignment):
            assert broken(room.topology, room.usable_NR(), demand, better) is None
            gains.append(cost(room, demand, plain).total - cost(room, demand, better).total)
    assert min(gains) > -1e-12
    assert sum(gain > 1e-6 for gain in gains) >= 3


def test_answers_repeat() -> None:
    room, demand = instance(15)
    first, second = find_place(room, demand), find_place(room, demand)
    assert isinstance(first, Assignment)
    assert isinstance(second, Assignment)
    assert all((first.nodes[name] == second.nodes[name]).all() for name in first.nodes)


def test_a_role_that_talks_more_is_kept_together_first() -> None:
    room = Room(cluster([[4, 4]]))
    demand = gang(role("quiet", 3, traffic=0.0), role("loud", 4, traffic=100 * BILLION))
    answer = find_place(room, demand)
    assert isinstance(answer, Assignment)
    racks = room.topology.domain_LN[1][answer.nodes["loud"]]
    assert len(set(racks.tolist())) == 1
