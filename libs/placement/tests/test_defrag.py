"""Migration plans are executed here by plain loops, proofs are recounted and compared with brute force."""

import pytest
from defrag_worlds import (
    GPUS,
    assert_counted,
    assert_executable,
    book,
    churned,
    cluster,
    crowded,
    gang_of,
    heaviest,
    live_of,
    packings,
    some_packing,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from reflux_placement.gang import Assignment, GangDemand, RoleDemand
from reflux_placement.place.search import find_place
from reflux_placement.policy.defrag import Plan, Undecided, plan
from reflux_placement.policy.defrag_bound import Proof, best_weights, prove
from reflux_placement.room import Room
from reflux_placement.topology import NOTHING, Node, Resources, build_topology


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 20))
def test_every_plan_can_be_executed_and_no_proof_is_contradicted_by_brute_force(seed: int) -> None:
    _check_answer(seed)


@pytest.mark.slow
def test_no_answer_is_wrong_in_two_thousand_crowded_clusters() -> None:
    for seed in range(2000):
        _check_answer(seed)


def _check_answer(seed: int) -> None:
    room, live, gang = crowded(seed)
    before = room.free_NR.copy()
    found = plan(room, live, gang)
    assert (room.free_NR == before).all()
    if isinstance(found, Plan):
        assert_executable(room, live, gang, found)
        assert bool(found.moves) != isinstance(find_place(room, gang), Assignment)
    elif isinstance(found, Proof):
        assert_counted(room, live, found)
        assert not some_packing(room, live, gang)


def test_a_plan_is_found_whenever_moving_one_job_is_enough() -> None:
    cases = 0
    for seed in range(200):
        room, live, gang = crowded(seed)
        if isinstance(find_place(room, gang), Assignment):
            continue
        if any(_fits_without(room, job, gang) for job in room.holdings if live[job].movable):
            cases += 1
            assert isinstance(plan(room, live, gang), Plan)
    assert cases >= 5


def _fits_without(room: Room, job: str, gang: GangDemand) -> bool:
    """Whether the gang fits once one job went elsewhere: the gang is placed first and the job after it."""
    trial = room.copy()
    demand = trial.holdings[job].demand
    held = set(trial.holdings[job].node_M.tolist())
    trial.release(job)
    nodes = [node for node in range(trial.topology.num_nodes) if trial.open_N[node]]
    free = tuple(room.free_NR[:, 0].tolist())
    for left in packings(trial.topology, demand, free, [node for node in nodes if node not in held]):
        moved = trial.copy()
        moved.free_NR[:, 0] -= [a - b for a, b in zip(free, left, strict=True)]
        if isinstance(find_place(moved, gang), Assignment):
            return True
    return False


@settings(max_examples=60, deadline=None)
@given(
    pairs=st.dictionaries(st.integers(1, 9), st.integers(0, 20), min_size=1, max_size=4), capacity=st.integers(0, 18)
)
def test_the_knapsack_of_the_bound_is_exact(pairs: dict[int, int], capacity: int) -> None:
    sizes = sorted(pairs)
    assert best_weights(sizes, [pairs[size] for size in sizes], [capacity])[capacity] == heaviest(capacity, pairs)


def test_a_huge_knapsack_is_bounded_from_above() -> None:
    sizes, weights = [7, 1_000_003], [3, 500_000]
    assert best_weights(sizes, weights, [10_000_000])[10_000_000] >= 9 * 500_000


def _half_full_racks() -> Room:
    """Four racks of four nodes, each with one rack-bound gang of two nodes."""
    room = Room(cluster(racks=4, nodes=4))
    for rack in range(4):
        book(room, f"j{rack}", gang_of(2, required_level="rack"), [4 * rack, 4 * rack + 1])
    return room


def test_two_half_full_racks_are_merged_with_one_move() -> None:
    room = _half_full_racks()
    live = live_of(room)
    found = plan(room, live, gang_of(4, required_level="rack"))
    assert isinstance(found, Plan)
    assert len(found.moves) == 1
    assert found.moved_gpus == 2 * GPUS
    assert_executable(room, live, gang_of(4, required_level="rack"), found)


def test_four_half_full_racks_give_two_whole_ones_and_no_third() -> None:
    room = _half_full_racks()
    live = live_of(room)
    two, three = gang_of(8, segment_size=4), gang_of(12, segment_size=4)
    found = plan(room, live, two)
    assert isinstance(found, Plan)
    assert len(found.moves) == 2
    proof = plan(room, live, three)
    assert isinstance(proof, Proof)
    assert proof.at_most == 2
    assert "at most 2" in proof.sentence
    assert_counted(room, live, proof)


def test_jobs_without_a_checkpoint_stay_and_the_proof_says_so() -> None:
    room = _half_full_racks()
    live = live_of(room, fixed=("j0", "j1", "j2", "j3"))
    proof = plan(room, live, gang_of(4, required_level="rack"))
    assert isinstance(proof, Proof)
    assert proof.kind == "capacity"
    assert "may not move" in proof.sentence
    three_fixed = live_of(room, fixed=("j0", "j1", "j2"))
    found = plan(room, three_fixed, gang_of(4, required_level="rack"))
    assert isinstance(found, Plan)
    assert [job for job, _ in found.moves] == ["j3"]


def test_nothing_moves_to_a_closed_node() -> None:
    room = _half_full_racks()
    for rack in (1, 2, 3):
        room.open_N[4 * rack + 2] = False
    live = live_of(room)
    proof = plan(room, live, gang_of(4, required_level="rack"))
    assert isinstance(proof, Proof | Undecided)
    room.open_N[6] = True
    found = plan(room, live, gang_of(4, required_level="rack"))
    assert isinstance(found, Plan)
    assert_executable(room, live, gang_of(4, required_level="rack"), found)


def test_a_member_moves_only_inside_the_block_that_holds_the_rest_of_its_job() -> None:
    room = Room(cluster(blocks=2, racks=2, nodes=2))
    book(room, "pair", gang_of(2, required_level="block"), [0, 2])
    book(room, "filler", gang_of(1), [4])
    live = live_of(room, fixed=("filler",))
    gang = gang_of(2, required_level="rack")
    book(room, "other", gang_of(1), [6])
    live = live_of(room, fixed=("filler", "other"))
    found = plan(room, live, gang)
    assert isinstance(found, Plan)
    (job, assignment), *more = found.moves
    assert (job, more) == ("pair", [])
    assert set(assignment.nodes["w"].tolist()) in ({0, 1}, {2, 3})


def test_a_moved_member_does_not_join_its_like_in_a_rack_that_takes_only_one() -> None:
    room = Room(cluster(racks=3, nodes=2))
    apart = gang_of(2, max_per_domain=1, spread_level="rack")
    book(room, "apart", apart, [0, 2])
    book(room, "fixed", gang_of(1), [4])
    live = live_of(room, fixed=("fixed",))
    found = plan(room, live, gang_of(2, required_level="rack"))
    assert isinstance(found, Plan)
    ((job, assignment),) = found.moves
    assert job == "apart"
    assert len({int(node) // 2 for node in assignment.nodes["w"]}) == 2
    room.release("fixed")
    book(room, "fixed", gang_of(2), [4, 5])
    assert not isinstance(plan(room, live_of(room, fixed=("fixed",)), gang_of(2, required_level="rack")), Plan)


def test_a_large_piece_pushes_small_ones_out_of_its_way() -> None:
    """Racks of four: 3+free, 2+1(movable smalls): the gang needs a whole rack; the 2 must go where a 1 sits."""
    room = Room(cluster(racks=4, nodes=4))
    book(room, "fixed", gang_of(3, required_level="rack"), [0, 1, 2])
    book(room, "two", gang_of(2, required_level="rack"), [4, 5])
    book(room, "one", gang_of(1), [8])
    book(room, "fixed2", gang_of(2, required_level="rack"), [9, 10])
    book(room, "fixed3", gang_of(4, required_level="rack"), [12, 13, 14, 15])
    live = live_of(room, fixed=("fixed", "fixed2", "fixed3"))
    gang = gang_of(4, required_level="rack")
    found = plan(room, live, gang)
    assert isinstance(found, Plan)
    assert [job for job, _ in found.moves] == ["one", "two"]
    assert_executable(room, live, gang, found)


def test_a_rack_bound_pair_on_one_node_leaves_it_whole() -> None:
    room = Room(cluster(racks=2, nodes=2))
    book(room, "pair", gang_of(2, 1, required_level="rack"), [2, 2])
    book(room, "other", gang_of(2, 1, required_level="rack"), [3, 3])
    book(room, "fixed", gang_of(2, 1), [0, 1])
    live = live_of(room, fixed=("fixed",))
    found = plan(room, live, gang_of(1))
    assert isinstance(found, Plan)
    assert len(found.moves) == 1
    assert_executable(room, live, gang_of(1), found)


def test_a_gang_of_two_roles_gets_room_for_both() -> None:
    room = Room(cluster(racks=4, nodes=4))
    for rack in range(4):
        book(room, f"j{rack}", gang_of(1), [4 * rack])
    live = live_of(room)
    gang = GangDemand(
        roles=(
            RoleDemand(role="learner", count=8, each=Resources(GPUS), segment_size=4),
            RoleDemand(role="decode", count=2, each=Resources(GPUS), required_level="rack"),
        )
    )
    found = plan(room, live, gang)
    assert isinstance(found, Plan)
    assert_executable(room, live, gang, found)


def test_a_gang_inside_one_block_is_given_room_in_one_block() -> None:
    room = Room(cluster(blocks=2, racks=2, nodes=4))
    for rack in range(4):
        book(room, f"j{rack}", gang_of(2, required_level="rack"), [4 * rack, 4 * rack + 1])
    live = live_of(room)
    gang = GangDemand(
        roles=(RoleDemand(role="w", count=8, each=Resources(GPUS), segment_size=4),), required_level="block"
    )
    found = plan(room, live, gang)
    assert isinstance(found, Plan)
    assert len({int(node) // 8 for node in found.assignment.nodes["w"]}) == 1
    assert_executable(room, live, gang, found)


def test_single_gpus_in_the_way_of_whole_nodes_move_together() -> None:
    room = Room(cluster(racks=1, nodes=4, gpus=4))
    for node in range(4):
        book(room, f"j{node}", gang_of(1, 1), [node])
    live = live_of(room)
    gang = gang_of(3, 4)
    found = plan(room, live, gang)
    assert isinstance(found, Plan)
    assert found.moved_gpus == 3
    assert_executable(room, live, gang, found)
    proof = plan(room, live, gang_of(4, 4))
    assert isinstance(proof, Proof)


def test_cpus_can_be_what_is_fragmented() -> None:
    nodes = [Node(f"n{n}", Resources(0, 8000, 0), {"rack": "r"}) for n in range(2)]
    room = Room(build_topology("c", nodes))
    small = GangDemand(roles=(RoleDemand(role="w", count=1, each=Resources(0, 4000, 0)),))
    book(room, "a", small, [0])
    book(room, "b", small, [1])
    live = live_of(room)
    whole = GangDemand(roles=(RoleDemand(role="w", count=1, each=Resources(0, 8000, 0)),))
    found = plan(room, live, whole)
    assert isinstance(found, Plan)
    assert len(found.moves) == 1
    both = GangDemand(roles=(RoleDemand(role="w", count=2, each=Resources(0, 8000, 0)),))
    assert isinstance(plan(room, live, both), Proof)


def test_an_elastic_gang_is_given_room_for_its_minimum() -> None:
    room = _half_full_racks()
    gang = gang_of(16, segment_size=4, min_count=8)
    found = plan(room, live_of(room), gang)
    assert isinstance(found, Plan)
    assert len(found.assignment.nodes["w"]) == 8


@pytest.mark.parametrize("level", ["rack", "block"])
def test_unlabelled_nodes_are_no_place_for_slots(level: str) -> None:
    nodes = [Node(f"n{n}", Resources(GPUS), {level: "r"} if n < 2 else {}) for n in range(6)]
    room = Room(build_topology("c", nodes))
    book(room, "a", gang_of(1), [0])
    live = live_of(room)
    gang = gang_of(2, required_level=level)
    found = plan(room, live, gang)
    assert isinstance(found, Plan)
    assert found.moves[0][1].nodes["w"].tolist()[0] > 1
    assert prove(room, live, gang_of(3, required_level=level)) is not None


def test_what_already_fits_needs_no_move() -> None:
    room = _half_full_racks()
    found = plan(room, live_of(room), gang_of(2, required_level="rack"))
    assert isinstance(found, Plan)
    assert found.moves == ()
    assert room.topology.capacity_NR.sum() > sum(NOTHING.row)


@pytest.mark.parametrize("load", [0.86, 0.9])
def test_a_crowded_cluster_is_always_decided(load: float) -> None:
    """In the manner of the benchmark: racks that a plan frees, or a count that shows that they cannot be."""
    outcomes = []
    for seed in range(2):
        room = churned(seed, load)
        live = live_of(room)
        for segments in (3, 7):
            gang = gang_of(16 * segments, 4, segment_size=16)
            found = plan(room, live, gang)
            outcomes.append(type(found).__name__)
            if isinstance(found, Plan):
                assert_executable(room, live, gang, found)
            else:
                assert isinstance(found, Proof)
                assert found.kind == "packing"
    assert {"Plan", "Proof"} <= set(outcomes)
