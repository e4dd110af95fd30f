"""Migration plans are executed here by plain loops, proofs are recounted and compared with brute force."""

import random
from collections.abc import Iterator
from itertools import combinations_with_replacement

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reflux_placement.gang import Assignment, GangDemand, RoleDemand
from reflux_placement.place.search import find_place
from reflux_placement.policy.defrag import Plan, Undecided, plan
from reflux_placement.policy.defrag_bound import Proof, best_weights, prove
from reflux_placement.policy.view import Ask, Live
from reflux_placement.room import Room
from reflux_placement.topology import CLUSTER, NOTHING, Node, Resources, Topology, build_topology

GPUS = 2


def _cluster(blocks: int = 1, racks: int = 2, nodes: int = 3, gpus: int = GPUS) -> Topology:
    return build_topology(
        "c",
        [
            Node(f"b{b}r{r}n{n}", Resources(gpus), {"block": f"b{b}", "rack": f"r{r}"})
            for b in range(blocks)
            for r in range(racks)
            for n in range(nodes)
        ],
    )


def _gang(count: int, gpus: int = GPUS, **rules: object) -> GangDemand:
    return GangDemand(roles=(RoleDemand(role="w", count=count, each=Resources(gpus), **rules),))  # type: ignore[arg-type]


def _book(room: Room, job: str, gang: GangDemand, nodes: list[int]) -> None:
    room.take(job, gang, Assignment(CLUSTER, 0, {gang.roles[0].role: np.array(nodes, dtype=np.int64)}))


def _live(room: Room, fixed: tuple[str, ...] = ()) -> dict[str, Live]:
    return {
        job: Live(
            ask=Ask(job=job, number=number, gang=holding.demand, submitted_at=0.0),
            started_at=0.0,
            saved_at=0.0,
            movable=job not in fixed,
        )
        for number, (job, holding) in enumerate(room.holdings.items())
    }


def _keeps_rules(topology: Topology, gang: GangDemand, nodes: dict[str, list[int]]) -> bool:
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
        step = demand.segment_size or len(members)
        if demand.segment_size and not all(
            inside(demand.segment_level, members[at : at + step]) for at in range(0, len(members), step)
        ):
            return False
    return True


def _execute(room: Room, live: dict[str, Live], gang: GangDemand, found: Plan) -> None:
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
        assert _keeps_rules(topology, live[job].ask.gang, after)
        assert min(_free(topology, where, live)) >= 0
    free = _free(topology, where, live)
    members = {role: ranks.tolist() for role, ranks in found.assignment.nodes.items()}
    assert _keeps_rules(topology, gang, members)
    for demand in gang.roles:
        assert demand.least <= len(members[demand.role]) <= demand.most
        for node in members[demand.role]:
            assert room.open_N[node]
            free[node] -= demand.each.gpus
    assert min(free) >= 0


def _free(topology: Topology, where: dict[str, dict[str, list[int]]], live: dict[str, Live]) -> list[int]:
    free = topology.capacity_NR[:, 0].tolist()
    for job, roles in where.items():
        for demand in live[job].ask.gang.roles:
            for node in roles[demand.role]:
                free[node] -= demand.each.gpus
    return free


def _packings(
    topology: Topology, gang: GangDemand, free: tuple[int, ...], nodes: list[int]
) -> Iterator[tuple[int, ...]]:
    """What every valid place of a one-role gang leaves free."""
    demand = gang.roles[0]
    for spots in combinations_with_replacement(nodes, demand.count):
        left = list(free)
        for node in spots:
            left[node] -= demand.each.gpus
        if min(left) >= 0 and _keeps_rules(topology, gang, {demand.role: list(spots)}):
            yield tuple(left)


def _some_packing(room: Room, live: dict[str, Live], gang: GangDemand) -> bool:
    """Whether all movable jobs and the gang fit at once, tried completely: no plan exists without that."""
    topology = room.topology
    nodes = [node for node in range(topology.num_nodes) if room.open_N[node]]
    bare = room.copy()
    movable = [job for job in room.holdings if live[job].movable]
    bare.release_all(movable)
    states = {tuple(bare.free_NR[:, 0].tolist())}
    for demand in [*(live[job].ask.gang for job in movable), gang]:
        states = {left for free in states for left in _packings(topology, demand, free, nodes)}
    return bool(states)


_RULES = [{}, {"required_level": "rack"}, {"required_level": "node"}, {"segment_size": 2}]


def _crowded(seed: int) -> tuple[Room, dict[str, Live], GangDemand]:
    """A tiny cluster with a few gangs at random valid places, and a gang that may or may not fit."""
    rng = random.Random(seed)
    topology = _cluster(blocks=rng.randint(1, 2), racks=2, nodes=rng.randint(2, 3))
    room = Room(topology)
    for index in range(rng.randint(1, 5)):
        rules = rng.choice(_RULES)
        gang = _gang(2 if "segment_size" in rules else rng.randint(1, 2), rng.randint(1, 2), **rules)
        count, gpus = gang.roles[0].count, gang.roles[0].each.gpus
        spots = [
            spots
            for spots in combinations_with_replacement(range(topology.num_nodes), count)
            if _keeps_rules(topology, gang, {"w": list(spots)})
            and all(room.free_NR[node, 0] >= gpus * spots.count(node) for node in spots)
        ]
        if spots:
            _book(room, f"j{index}", gang, list(rng.choice(spots)))
    fixed = [job for job in room.holdings if rng.random() < 0.25]
    for node in range(topology.num_nodes):
        room.open_N[node] = rng.random() > 0.05
    rules = rng.choice([*_RULES, {"required_level": "block"}])
    count = rng.choice([2, 4] if "segment_size" in rules else [1, 2, 3])
    return room, _live(room, tuple(fixed)), _gang(count, rng.randint(1, 2), **rules)


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 1 << 20))
def test_every_plan_can_be_executed_and_no_proof_is_contradicted_by_brute_force(seed: int) -> None:
    _check_answer(seed)


@pytest.mark.slow
def test_no_answer_is_wrong_in_five_thousand_crowded_clusters() -> None:
    for seed in range(5000):
        _check_answer(seed)


def _check_answer(seed: int) -> None:
    room, live, gang = _crowded(seed)
    before = room.free_NR.copy()
    found = plan(room, live, gang)
    assert (room.free_NR == before).all()
    if isinstance(found, Plan):
        _execute(room, live, gang, found)
        assert bool(found.moves) != isinstance(find_place(room, gang), Assignment)
    elif isinstance(found, Proof):
        _check_proof(room, live, found)
        assert not _some_packing(room, live, gang)


def test_a_plan_is_found_whenever_moving_one_job_is_enough() -> None:
    cases = 0
    for seed in range(250):
        room, live, gang = _crowded(seed)
        if isinstance(find_place(room, gang), Assignment):
            continue
        if any(_fits_without(room, job, gang) for job in room.holdings if live[job].movable):
            cases += 1
            assert isinstance(plan(room, live, gang), Plan)
    assert cases > 10


def _fits_without(room: Room, job: str, gang: GangDemand) -> bool:
    """Whether the gang fits once one job went elsewhere: the gang is placed first and the job after it."""
    trial = room.copy()
    demand = trial.holdings[job].demand
    held = set(trial.holdings[job].node_M.tolist())
    trial.release(job)
    nodes = [node for node in range(trial.topology.num_nodes) if trial.open_N[node]]
    free = tuple(room.free_NR[:, 0].tolist())
    for left in _packings(trial.topology, demand, free, [node for node in nodes if node not in held]):
        moved = trial.copy()
        moved.free_NR[:, 0] -= [a - b for a, b in zip(free, left, strict=True)]
        if isinstance(find_place(moved, gang), Assignment):
            return True
    return False


def _check_proof(room: Room, live: dict[str, Live], proof: Proof) -> None:
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
        assert each.most >= _heaviest(each.capacity, weight)
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


def _heaviest(capacity: int, weight: dict[int, int]) -> int:
    """The best multiset of sizes within a capacity, by trying all."""
    return max((weight[size] + _heaviest(capacity - size, weight) for size in weight if size <= capacity), default=0)


@settings(max_examples=60, deadline=None)
@given(
    pairs=st.dictionaries(st.integers(1, 9), st.integers(0, 20), min_size=1, max_size=4), capacity=st.integers(0, 18)
)
def test_the_knapsack_of_the_bound_is_exact(pairs: dict[int, int], capacity: int) -> None:
    sizes = sorted(pairs)
    assert best_weights(sizes, [pairs[size] for size in sizes], [capacity])[capacity] == _heaviest(capacity, pairs)


def test_a_huge_knapsack_is_bounded_from_above() -> None:
    sizes, weights = [7, 1_000_003], [3, 500_000]
    assert best_weights(sizes, weights, [10_000_000])[10_000_000] >= 9 * 500_000


def _half_full_racks() -> Room:
    """Four racks of four nodes, each with one rack-bound gang of two nodes."""
    room = Room(_cluster(racks=4, nodes=4))
    for rack in range(4):
        _book(room, f"j{rack}", _gang(2, required_level="rack"), [4 * rack, 4 * rack + 1])
    return room


def test_two_half_full_racks_are_merged_with_one_move() -> None:
    room = _half_full_racks()
    live = _live(room)
    found = plan(room, live, _gang(4, required_level="rack"))
    assert isinstance(found, Plan)
    assert len(found.moves) == 1
    assert found.moved_gpus == 2 * GPUS
    _execute(room, live, _gang(4, required_level="rack"), found)


def test_four_half_full_racks_give_two_whole_ones_and_no_third() -> None:
    room = _half_full_racks()
    live = _live(room)
    two, three = _gang(8, segment_size=4), _gang(12, segment_size=4)
    found = plan(room, live, two)
    assert isinstance(found, Plan)
    assert len(found.moves) == 2
    proof = plan(room, live, three)
    assert isinstance(proof, Proof)
    assert proof.at_most == 2
    assert "at most 2" in proof.sentence
    _check_proof(room, live, proof)


def test_jobs_without_a_checkpoint_stay_and_the_proof_says_so() -> None:
    room = _half_full_racks()
    live = _live(room, fixed=("j0", "j1", "j2", "j3"))
    proof = plan(room, live, _gang(4, required_level="rack"))
    assert isinstance(proof, Proof)
    assert proof.kind == "capacity"
    assert "may not move" in proof.sentence
    three_fixed = _live(room, fixed=("j0", "j1", "j2"))
    found = plan(room, three_fixed, _gang(4, required_level="rack"))
    assert isinstance(found, Plan)
    assert [job for job, _ in found.moves] == ["j3"]


def test_nothing_moves_to_a_closed_node() -> None:
    room = _half_full_racks()
    for rack in (1, 2, 3):
        room.open_N[4 * rack + 2] = False
    live = _live(room)
    proof = plan(room, live, _gang(4, required_level="rack"))
    assert isinstance(proof, Proof | Undecided)
    room.open_N[6] = True
    found = plan(room, live, _gang(4, required_level="rack"))
    assert isinstance(found, Plan)
    _execute(room, live, _gang(4, required_level="rack"), found)


def test_a_member_moves_only_inside_the_block_that_holds_the_rest_of_its_job() -> None:
    room = Room(_cluster(blocks=2, racks=2, nodes=2))
    _book(room, "pair", _gang(2, required_level="block"), [0, 2])
    _book(room, "filler", _gang(1), [4])
    live = _live(room, fixed=("filler",))
    gang = _gang(2, required_level="rack")
    _book(room, "other", _gang(1), [6])
    live = _live(room, fixed=("filler", "other"))
    found = plan(room, live, gang)
    assert isinstance(found, Plan)
    (job, assignment), *more = found.moves
    assert (job, more) == ("pair", [])
    assert set(assignment.nodes["w"].tolist()) in ({0, 1}, {2, 3})


def test_a_large_piece_pushes_small_ones_out_of_its_way() -> None:
    """Racks of four: 3+free, 2+1(movable smalls): the gang needs a whole rack; the 2 must go where a 1 sits."""
    room = Room(_cluster(racks=4, nodes=4))
    _book(room, "fixed", _gang(3, required_level="rack"), [0, 1, 2])
    _book(room, "two", _gang(2, required_level="rack"), [4, 5])
    _book(room, "one", _gang(1), [8])
    _book(room, "fixed2", _gang(2, required_level="rack"), [9, 10])
    _book(room, "fixed3", _gang(4, required_level="rack"), [12, 13, 14, 15])
    live = _live(room, fixed=("fixed", "fixed2", "fixed3"))
    gang = _gang(4, required_level="rack")
    found = plan(room, live, gang)
    assert isinstance(found, Plan)
    assert [job for job, _ in found.moves] == ["one", "two"]
    _execute(room, live, gang, found)


def test_a_rack_bound_pair_on_one_node_leaves_it_whole() -> None:
    room = Room(_cluster(racks=2, nodes=2))
    _book(room, "pair", _gang(2, 1, required_level="rack"), [2, 2])
    _book(room, "other", _gang(2, 1, required_level="rack"), [3, 3])
    _book(room, "fixed", _gang(2, 1), [0, 1])
    live = _live(room, fixed=("fixed",))
    found = plan(room, live, _gang(1))
    assert isinstance(found, Plan)
    assert len(found.moves) == 1
    _execute(room, live, _gang(1), found)


def test_a_gang_of_two_roles_gets_room_for_both() -> None:
    room = Room(_cluster(racks=4, nodes=4))
    for rack in range(4):
        _book(room, f"j{rack}", _gang(1), [4 * rack])
    live = _live(room)
    gang = GangDemand(
        roles=(
            RoleDemand(role="learner", count=8, each=Resources(GPUS), segment_size=4),
            RoleDemand(role="decode", count=2, each=Resources(GPUS), required_level="rack"),
        )
    )
    found = plan(room, live, gang)
    assert isinstance(found, Plan)
    _execute(room, live, gang, found)


def test_a_gang_inside_one_block_is_given_room_in_one_block() -> None:
    room = Room(_cluster(blocks=2, racks=2, nodes=4))
    for rack in range(4):
        _book(room, f"j{rack}", _gang(2, required_level="rack"), [4 * rack, 4 * rack + 1])
    live = _live(room)
    gang = GangDemand(
        roles=(RoleDemand(role="w", count=8, each=Resources(GPUS), segment_size=4),), required_level="block"
    )
    found = plan(room, live, gang)
    assert isinstance(found, Plan)
    assert len({int(node) // 8 for node in found.assignment.nodes["w"]}) == 1
    _execute(room, live, gang, found)


def test_single_gpus_in_the_way_of_whole_nodes_move_together() -> None:
    room = Room(_cluster(racks=1, nodes=4, gpus=4))
    for node in range(4):
        _book(room, f"j{node}", _gang(1, 1), [node])
    live = _live(room)
    gang = _gang(3, 4)
    found = plan(room, live, gang)
    assert isinstance(found, Plan)
    assert found.moved_gpus == 3
    _execute(room, live, gang, found)
    proof = plan(room, live, _gang(4, 4))
    assert isinstance(proof, Proof)


def test_cpus_can_be_what_is_fragmented() -> None:
    nodes = [Node(f"n{n}", Resources(0, 8000, 0), {"rack": "r"}) for n in range(2)]
    room = Room(build_topology("c", nodes))
    small = GangDemand(roles=(RoleDemand(role="w", count=1, each=Resources(0, 4000, 0)),))
    _book(room, "a", small, [0])
    _book(room, "b", small, [1])
    live = _live(room)
    whole = GangDemand(roles=(RoleDemand(role="w", count=1, each=Resources(0, 8000, 0)),))
    found = plan(room, live, whole)
    assert isinstance(found, Plan)
    assert len(found.moves) == 1
    both = GangDemand(roles=(RoleDemand(role="w", count=2, each=Resources(0, 8000, 0)),))
    assert isinstance(plan(room, live, both), Proof)


def test_an_elastic_gang_is_given_room_for_its_minimum() -> None:
    room = _half_full_racks()
    gang = _gang(16, segment_size=4, min_count=8)
    found = plan(room, _live(room), gang)
    assert isinstance(found, Plan)
    assert len(found.assignment.nodes["w"]) == 8


@pytest.mark.parametrize("level", ["rack", "block"])
def test_unlabelled_nodes_are_no_place_for_slots(level: str) -> None:
    nodes = [Node(f"n{n}", Resources(GPUS), {level: "r"} if n < 2 else {}) for n in range(6)]
    room = Room(build_topology("c", nodes))
    _book(room, "a", _gang(1), [0])
    live = _live(room)
    gang = _gang(2, required_level=level)
    found = plan(room, live, gang)
    assert isinstance(found, Plan)
    assert found.moves[0][1].nodes["w"].tolist()[0] > 1
    assert prove(room, live, _gang(3, required_level=level)) is not None


def test_what_already_fits_needs_no_move() -> None:
    room = _half_full_racks()
    found = plan(room, _live(room), _gang(2, required_level="rack"))
    assert isinstance(found, Plan)
    assert found.moves == ()
    assert room.topology.capacity_NR.sum() > sum(NOTHING.row)


def _churned(seed: int, load: float, racks: int = 40) -> Room:
    """Racks of 18 nodes under gangs that came and went through the policy itself."""
    rng = random.Random(seed)
    room = Room(_cluster(blocks=racks // 8, racks=8, nodes=18, gpus=4))
    total, held, jobs = racks * 18, 0, []
    for number in range(900):
        size = rng.choices([1, 2, 4, 8, 16, 18, 32], [25, 20, 15, 12, 10, 6, 5])[0]
        gang = _gang(size, 4, **({"required_level": "rack"} if size <= 18 else {"segment_size": 16}))
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


@pytest.mark.parametrize("load", [0.86, 0.9])
def test_a_crowded_cluster_is_always_decided(load: float) -> None:
    """In the manner of the benchmark: racks that a plan frees, or a count that shows that they cannot be."""
    outcomes = []
    for seed in range(2):
        room = _churned(seed, load)
        live = _live(room)
        for segments in (3, 5, 7):
            gang = _gang(16 * segments, 4, segment_size=16)
            found = plan(room, live, gang)
            outcomes.append(type(found).__name__)
            if isinstance(found, Plan):
                _execute(room, live, gang, found)
            else:
                assert isinstance(found, Proof)
                assert found.kind == "packing"
    assert {"Plan", "Proof"} <= set(outcomes)
