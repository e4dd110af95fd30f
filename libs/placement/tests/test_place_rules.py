import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "scheduler"))

import golden
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from place_worlds import cluster, gang, random_world, role

from reflux_placement.gang import Assignment, Relation
from reflux_placement.place.check import broken
from reflux_placement.place.misfit import Misfit
from reflux_placement.place.rules.balanced import kueue_balanced
from reflux_placement.place.rules.base import Rule
from reflux_placement.place.rules.first_fit import first_fit
from reflux_placement.place.rules.kai import kai
from reflux_placement.place.rules.kueue import kueue_best_fit, kueue_layers, kueue_least_free
from reflux_placement.place.rules.slurm import slurm_block
from reflux_placement.place.search import find_place
from reflux_placement.room import Room

RULES: list[Rule] = [first_fit, kueue_best_fit, kueue_least_free, kueue_balanced, kai, slurm_block]


def test_every_golden_vector_holds() -> None:
    assert golden.failures() == []
    assert len(golden.VECTORS) >= 17


def layered(
    free: list[list[list[int]]], pods: int, outer: tuple[int, str], *inner: tuple[int, str]
) -> list[int] | None:
    """Pods per host with slices inside slices."""
    size, level = outer
    vector = golden.Vector(name="", rules=(), free=free, pods=pods, expected=[], slice_size=size, slice_level=level)
    return golden.solve(vector, kueue_layers(inner))


def test_slices_inside_slices_leave_room_that_holds_no_whole_one() -> None:
    """Worked out by hand. Racks of 24 pods hold one slice of 16 each, blocks of two such racks one slice of 32: so 64
    pods need both blocks, 16 of each rack, on the fewest hosts. Without the inner layer a block gives 24 + 8."""
    free = [[[6] * 4, [6] * 4], [[6] * 4, [6] * 4]]
    assert layered(free, 64, (32, "block"), (16, "rack")) == [6, 6, 4, 0] * 4
    assert layered(free, 64, (32, "block")) == [6, 6, 6, 6, 6, 2, 0, 0] * 2
    assert layered(free, 96, (32, "block"), (16, "rack")) is None


def test_three_layers_of_slices_are_dealt_out_from_the_largest_to_the_smallest() -> None:
    """Hosts of 7 pods hold 1 slice of 4, so a rack of four holds 16, one of three 12, which is one slice of 8."""
    free = [[[7] * 4, [7] * 3]]
    assert layered(free, 24, (24, "block"), (8, "rack"), (4, "node")) == [4, 4, 4, 4, 4, 4, 0]
    assert layered(free, 32, (32, "block"), (8, "rack"), (4, "node")) is None


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3), min_size=1, max_size=3), min_size=1, max_size=3
    ),
    st.integers(1, 4),
)
def test_every_domain_holds_whole_slices_of_its_layer_or_there_is_no_room_for_them(free, outer_slices) -> None:
    """A reference by plain loops: what blocks hold in slices of 8 made of slices of 4 per rack and of 2 per host."""
    pods = 8 * outer_slices
    held = sum(sum(sum(host // 2 for host in rack) // 2 for rack in block) // 2 for block in free)
    found = layered(free, pods, (8, "block"), (4, "rack"), (2, "node"))
    assert (found is not None) == (held >= outer_slices)
    if found is None:
        return
    given = iter(found)
    counts = [[[next(given) for _ in rack] for rack in block] for block in free]
    assert sum(found) == pods
    for block, room in zip(counts, free, strict=True):
        assert sum(sum(rack) for rack in block) % 8 == 0
        for rack, hosts in zip(block, room, strict=True):
            assert sum(rack) % 4 == 0
            assert all(got % 2 == 0 and got <= most for got, most in zip(rack, hosts, strict=True))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_rules_keep_every_demand_and_place_nothing_that_has_no_place(seed: int) -> None:
    room, demand = random_world(seed)
    counts = {each.role: each.count for each in demand.roles}
    possible = isinstance(find_place(room, demand), Assignment)
    for rule in RULES:
        answer = rule(room, demand)
        if not isinstance(answer, Misfit):
            assert possible, rule
            assert broken(room.topology, room.usable_NR(), demand, answer, counts) is None


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_places_segments_and_peers_in_their_domains(rule: Rule) -> None:
    room = Room(cluster([[9, 9], [9, 9]]))
    demand = gang(
        role("learner", 8, segment_size=4),
        role("prefill", 2),
        role("decode", 4),
        relations=(Relation(role="decode", near="prefill", level="block"),),
    )
    answer = rule(room, demand)
    assert isinstance(answer, Assignment)
    assert broken(room.topology, room.usable_NR(), demand, answer) is None


def test_first_fit_takes_nodes_in_order_whatever_racks_they_are_in() -> None:
    room = Room(cluster([[2, 4]]))
    answer = first_fit(room, gang(role("learner", 4)))
    assert isinstance(answer, Assignment)
    assert answer.nodes["learner"].tolist() == [0, 1, 2, 3]
