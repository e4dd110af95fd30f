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
from reflux_placement.place.rules.kueue import kueue_best_fit, kueue_least_free
from reflux_placement.place.rules.slurm import slurm_block
from reflux_placement.place.search import find_place
from reflux_placement.room import Room

RULES: list[Rule] = [first_fit, kueue_best_fit, kueue_least_free, kueue_balanced, kai, slurm_block]


def test_every_golden_vector_holds() -> None:
    assert golden.failures() == []
    assert len(golden.VECTORS) >= 13


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
