import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from place_worlds import Draw, cluster, gang, random_world, role, room_with

from reflux_placement.gang import Assignment, GangDemand, Relation
from reflux_placement.place.check import constraint_broken
from reflux_placement.place.extend import extend
from reflux_placement.place.misfit import Misfit
from reflux_placement.place.search import find_place
from reflux_placement.place.tree import tree_of
from reflux_placement.room import Room

Lost = set[tuple[str, int]]


def lose(answer: Assignment, draw: Draw) -> Lost:
    pairs = [(name, rank) for name, ranks in answer.nodes.items() for rank in range(len(ranks))]
    return {pairs[draw.between(0, len(pairs) - 1)] for _ in range(draw.between(1, 2))}


def kept_of(nodes: dict[str, np.ndarray], lost: Lost) -> dict[str, dict[int, int]]:
    return {
        name: {rank: int(node) for rank, node in enumerate(ranks) if (name, rank) not in lost}
        for name, ranks in nodes.items()
    }


def complaint(room: Room, demand: GangDemand, nodes: dict[str, np.ndarray], lost: Lost) -> str | None:
    need_NR = np.zeros_like(room.free_NR)
    for each in demand.roles:
        np.add.at(need_NR, nodes[each.role], np.array(each.each.row))
    if (need_NR > room.free_NR).any():
        return "over-committed"
    if not all(room.open_N[nodes[name][rank]] for name, rank in lost):
        return "a new member on a closed node"
    return constraint_broken(room.topology, tree_of(room.topology), demand, nodes)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_kept_members_stay_and_lost_ones_go_exactly_where_demands_allow(seed: int) -> None:
    room, demand = random_world(seed)
    answer = find_place(room, demand)
    if isinstance(answer, Misfit):
        return
    lost = lose(answer, Draw(seed))
    for name, rank in lost:
        room.open_N[answer.nodes[name][rank]] = False
    kept = kept_of(answer.nodes, lost)
    if not any(kept.values()):
        return
    again = extend(room, demand, kept, {name: len(ranks) for name, ranks in answer.nodes.items()})
    if not isinstance(again, Misfit):
        assert complaint(room, demand, again.nodes, lost) is None
        assert all(again.nodes[name][rank] == node for name, ranks in kept.items() for rank, node in ranks.items())
        return
    places = sorted(lost)
    for nodes in itertools.product(range(room.topology.num_nodes), repeat=len(places)):
        trial = {name: ranks.copy() for name, ranks in answer.nodes.items()}
        for (name, rank), node in zip(places, nodes, strict=True):
            trial[name][rank] = node
        assert complaint(room, demand, trial, lost) is not None, again.sentence


def start(room: Room, demand: GangDemand) -> Assignment:
    answer = find_place(room, demand)
    assert isinstance(answer, Assignment)
    return answer


def test_a_lost_node_of_a_segment_is_replaced_inside_its_rack_or_not_at_all() -> None:
    # koordinator#3181, kueue#6913: a recreated member landed outside the domain; an empty assignment came back.
    topology = cluster([[5, 5]])
    demand = gang(role("learner", 8, segment_size=4))
    room = Room(topology)
    answer = start(room, demand)
    room.open_N[6] = False
    lost = {("learner", int(np.flatnonzero(answer.nodes["learner"] == 6)[0]))}
    again = extend(room, demand, kept_of(answer.nodes, lost), {"learner": 8})
    assert isinstance(again, Assignment)
    assert again.nodes["learner"][5] == 9
    room.open_N[9] = False
    stuck = extend(room, demand, kept_of(answer.nodes, lost), {"learner": 8})
    assert isinstance(stuck, Misfit)
    assert (stuck.constraint, stuck.level, stuck.domain, stuck.missing) == ("stay", "rack", "gb/b0/r1", 4)
    assert "must not leave" in stuck.sentence


def test_an_18_node_segment_without_a_spare_is_refused_and_with_a_spare_rack_mate_replaced() -> None:
    topology = cluster([[18, 18]])
    demand = gang(role("learner", 18, segment_size=18))
    room = Room(topology)
    answer = start(room, demand)
    room.open_N[3] = False
    assert isinstance(extend(room, demand, kept_of(answer.nodes, {("learner", 3)}), {"learner": 18}), Misfit)


def test_spares_are_used_though_they_are_closed_to_others() -> None:
    topology = cluster([[4], [4]])
    room = Room(topology)
    room.open_N[3] = False
    demand = gang(role("learner", 3, required_level="rack"))
    answer = start(room, gang(role("learner", 3, required_level="rack")))
    room.open_N[answer.nodes["learner"][0]] = False
    kept = kept_of(answer.nodes, {("learner", 0)})
    if answer.nodes["learner"][0] < 4:
        assert isinstance(extend(room, demand, kept, {"learner": 3}), Misfit)
    again = extend(room, demand, kept, {"learner": 3}, extra_nodes=frozenset({3}))
    assert isinstance(again, Assignment)
    assert again.level == "rack"


def test_two_lost_nodes_are_replaced_together_and_the_others_stay() -> None:
    # kueue#14244: a second failed node evicted the whole job.
    room = Room(cluster([[18, 18, 18]]))
    demand = gang(role("learner", 32, segment_size=16))
    answer = start(room, demand)
    lost = {("learner", 1), ("learner", 20)}
    for _, rank in lost:
        room.open_N[answer.nodes["learner"][rank]] = False
    again = extend(room, demand, kept_of(answer.nodes, lost), {"learner": 32})
    assert isinstance(again, Assignment)
    assert int((again.nodes["learner"] != answer.nodes["learner"]).sum()) == 2


def test_growth_adds_whole_segments_and_stays_inside_the_domain_of_the_gang() -> None:
    # grove#648: a parent's constraint holds after scale-up too.
    room = room_with(cluster([[4, 4], [4, 4]]), [4] * 6 + [0, 0] + [4] * 8)
    demand = gang(role("learner", 4, segment_size=2, max_count=8), required_level="block")
    kept = {"learner": {rank: rank for rank in range(4)}}
    grown = extend(room, demand, kept, {"learner": 6})
    assert isinstance(grown, Assignment)
    assert grown.nodes["learner"].tolist() == [0, 1, 2, 3, 4, 5]
    assert isinstance(extend(room, demand, kept, {"learner": 8}), Misfit)


def test_shrinking_gives_the_highest_ranks_back() -> None:
    room = Room(cluster([[4, 4]]))
    demand = gang(role("decode", 6, min_count=2))
    answer = start(room, demand)
    less = extend(room, demand, kept_of(answer.nodes, set()), {"decode": 3})
    assert isinstance(less, Assignment)
    assert less.nodes["decode"].tolist() == answer.nodes["decode"][:3].tolist()


def test_a_replaced_decode_stays_in_the_block_of_its_prefill() -> None:
    room = Room(cluster([[3], [3]]))
    demand = gang(
        role("prefill", 2), role("decode", 2), relations=(Relation(role="decode", near="prefill", level="block"),)
    )
    answer = start(room, demand)
    room.open_N[answer.nodes["decode"][1]] = False
    again = extend(room, demand, kept_of(answer.nodes, {("decode", 1)}), {"prefill": 2, "decode": 2})
    if isinstance(again, Assignment):
        blocks = room.topology.domain_LN[room.topology.tightness("block")]
        assert blocks[again.nodes["decode"][1]] == blocks[again.nodes["prefill"][1]]


def test_a_gang_that_lost_everybody_is_placed_anew() -> None:
    # ray#62483: a group was infeasible for ever after its rack died.
    room = Room(cluster([[2, 2]]))
    room.open_N[:2] = False
    again = extend(room, gang(role("learner", 2, required_level="rack")), {}, {"learner": 2})
    assert isinstance(again, Assignment)
    assert again.nodes["learner"].tolist() == [2, 3]
