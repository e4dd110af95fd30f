import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from place_worlds import (
    cluster,
    combinations,
    counts_of,
    exists,
    gang,
    gpus_per_node,
    random_world,
    role,
    room_with,
    tray,
)

from reflux_placement.errors import UnknownLevel
from reflux_placement.gang import GangDemand, Relation, RoleDemand
from reflux_placement.place.check import broken
from reflux_placement.place.misfit import Misfit
from reflux_placement.place.search import find_place, fits_ever
from reflux_placement.room import Room
from reflux_placement.topology import Resources, build_topology

MAX_COMBINATIONS = 3_000


def placed(room: Room, demand: GangDemand):
    answer = find_place(room, demand)
    assert not isinstance(answer, Misfit), answer.sentence
    assert broken(room.topology, room.usable_NR(), demand, answer) is None
    return answer


def refused(room: Room, demand: GangDemand) -> Misfit:
    answer = find_place(room, demand, holders=True)
    assert isinstance(answer, Misfit)
    return answer


def domains(room: Room, level: str, ranks: np.ndarray) -> list[int]:
    return room.topology.domain_LN[room.topology.tightness(level)][ranks].tolist()


@settings(max_examples=250, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_a_place_is_found_exactly_when_one_exists_and_keeps_every_demand(seed: int) -> None:
    room, demand = random_world(seed)
    answer = find_place(room, demand)
    if not isinstance(answer, Misfit):
        counts = {each.role: each.count for each in demand.roles}
        assert broken(room.topology, room.usable_NR(), demand, answer, counts) is None
        room.take("new", demand, answer)
    elif combinations(room, demand) <= MAX_COMBINATIONS:
        assert not exists(room, demand), answer.sentence
        assert len(answer.sentence) > 10


def test_the_tightest_single_rack_that_holds_the_gang_is_taken() -> None:
    topology = cluster([[4, 4], [4]])
    room = room_with(topology, [4, 4, 4, 4, 4, 4, 0, 0, 4, 4, 4, 0])
    answer = placed(room, gang(role("learner", 2)))
    assert (answer.level, topology.domains("rack")[answer.domain].label) == ("rack", "gb/b0/r1")


def test_packing_prefers_full_domains_only_among_those_that_hold_the_whole_gang() -> None:
    # nvcf#598: the first pod went to the fullest clique, which could not hold the rest of the gang.
    room = room_with(cluster([[4, 4]]), [4, 4, 4, 0, 4, 4, 4, 4])
    answer = placed(room, gang(role("learner", 4), required_level="rack"))
    assert answer.nodes["learner"].tolist() == [4, 5, 6, 7]


def test_a_gang_over_several_blocks_uses_the_fewest_and_the_tightest_last() -> None:
    topology = cluster([[3], [4], [2], [1]])
    answer = placed(Room(topology), gang(role("learner", 6)))
    assert sorted(set(domains(Room(topology), "block", answer.nodes["learner"]))) == [1, 2]


def test_segments_stay_whole_and_consecutive_ranks_share_a_rack() -> None:
    topology = cluster([[5, 3], [4, 5]])
    answer = placed(Room(topology), gang(role("learner", 12, segment_size=2)))
    racks = np.array(domains(Room(topology), "rack", answer.nodes["learner"])).reshape(-1, 2)
    assert (racks[:, 0] == racks[:, 1]).all()
    assert (np.diff(answer.nodes["learner"]) >= 0).all()


def test_inference_gets_the_rest_of_the_racks_that_segments_leave() -> None:
    # NeMo-RL#2612: whole segments domain by domain, the rest to inference.
    topology = cluster([[18, 18, 18, 18]])
    demand = gang(
        role("learner", 64, segment_size=16),
        role("rollout", 8),
        relations=(Relation(role="rollout", near="learner", traffic=1e10),),
    )
    answer = placed(Room(topology), demand)
    assert sorted(domains(Room(topology), "rack", answer.nodes["rollout"])) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_several_members_share_a_node_and_have_consecutive_ranks() -> None:
    answer = placed(Room(cluster([[2, 2]])), gang(role("engine", 8, gpus=1)))
    assert answer.nodes["engine"].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


def test_required_and_preferred_levels_may_be_the_same_and_hold_for_gang_and_role() -> None:
    # KAI changelog: required == preferred was not found.
    topology = cluster([[2, 2], [4]])
    demand = gang(
        role("learner", 4, required_level="rack", preferred_level="rack"),
        required_level="block",
        preferred_level="block",
    )
    answer = placed(Room(topology), demand)
    assert (answer.level, topology.domains("rack")[answer.domain].label) == ("rack", "gb/b1/r0")


def test_a_preferred_level_climbs_until_the_gang_fits_and_stops_at_the_required_one() -> None:
    topology = cluster([[2, 2], [3]])
    assert placed(Room(topology), gang(role("learner", 4), preferred_level="rack")).level == "block"
    assert placed(Room(topology), gang(role("learner", 6), preferred_level="rack")).level == "cluster"
    stopped = refused(Room(topology), gang(role("learner", 6), preferred_level="rack", required_level="block"))
    assert (stopped.level, stopped.needed, stopped.available) == ("block", 24, 16)


def test_a_role_stays_in_its_domain_while_the_gang_spans_more() -> None:
    room = Room(cluster([[2, 4], [4, 2]]))
    demand = gang(role("learner", 4, required_level="rack"), role("decode", 6, required_level="cluster"))
    answer = placed(room, demand)
    assert len(set(domains(room, "rack", answer.nodes["learner"]))) == 1


def test_each_decode_lies_in_the_block_of_its_prefill() -> None:
    room = room_with(cluster([[4], [4], [4]]), [4, 4, 4, 0, 4, 4, 4, 0, 4, 4, 0, 0])
    demand = gang(
        role("prefill", 2), role("decode", 4), relations=(Relation(role="decode", near="prefill", level="block"),)
    )
    answer = placed(room, demand)
    decode, prefill = domains(room, "block", answer.nodes["decode"]), domains(room, "block", answer.nodes["prefill"])
    assert [prefill[i * 2 // 4] for i in range(4)] == decode


def test_anti_affinity_bounds_the_members_of_a_rack_and_spread_uses_as_many_as_it_can() -> None:
    room = Room(cluster([[4, 4], [4, 4]]))
    bounded = placed(room, gang(role("decode", 6, max_per_domain=2, spread_level="rack")))
    assert np.bincount(domains(room, "rack", bounded.nodes["decode"])).max() == 2
    spread = placed(room, gang(role("decode", 6, spread_level="rack")))
    assert sorted(np.bincount(domains(room, "rack", spread.nodes["decode"])).tolist()) == [1, 1, 2, 2]
    assert refused(room, gang(role("decode", 9, max_per_domain=2, spread_level="rack"))).constraint == "spread"


def test_nodes_of_unknown_domain_never_satisfy_a_constraint_but_serve_roles_without_one() -> None:
    # NeMo-RL#2924: nodes without a domain sorted first and were taken for a rack.
    nodes = [tray(f"u{i}", gpus=4) for i in range(4)] + [tray(f"n{i}", "r0", "b0") for i in range(2)]
    topology = build_topology("gb", nodes)
    assert refused(Room(topology), gang(role("learner", 4), required_level="rack")).available == 8
    assert refused(Room(topology), gang(role("learner", 4, segment_size=4))).constraint == "segments"
    cpu_only = RoleDemand(role="verifier", count=6, each=Resources(millicpus=16000))
    answer = placed(Room(topology), gang(role("learner", 2, required_level="rack"), cpu_only))
    assert {topology.nodes[i].name for i in answer.nodes["learner"].tolist()} == {"n0", "n1"}
    assert {topology.nodes[i].name for i in answer.nodes["verifier"].tolist()} >= {f"u{i}" for i in range(4)}


def test_members_without_gpus_go_to_nodes_without_free_gpus_first() -> None:
    nodes = [tray("gpu0", "r0"), tray("cpu0", "r0", gpus=0), tray("gpu1", "r0"), tray("cpu1", "r1", gpus=0)]
    topology = build_topology("gb", nodes)
    verifiers = RoleDemand(role="verifier", count=2, each=Resources(millicpus=16000))
    answer = placed(Room(topology), gang(verifiers))
    assert {topology.nodes[i].name for i in answer.nodes["verifier"].tolist()} == {"cpu0", "cpu1"}


def test_a_level_that_does_not_exist_is_an_error() -> None:
    # volcano#5189: an unknown tier name was ignored.
    room = Room(cluster([[2]]))
    for demand in (
        gang(role("a", 1), required_level="rak"),
        gang(role("a", 1), preferred_level="zone"),
        gang(role("a", 2, segment_size=2, segment_level="clique")),
        gang(role("a", 1, spread_level="leaf")),
        gang(role("a", 1), role("b", 1), relations=(Relation(role="a", near="b", level="tier-1"),)),
    ):
        with pytest.raises(UnknownLevel):
            find_place(room, demand)
        with pytest.raises(UnknownLevel):
            fits_ever(room.topology, demand)


def test_a_role_of_count_zero_is_placed_nowhere_and_does_not_matter() -> None:
    # kueue#10478: a pod set of count 0 looped for ever.
    demand = gang(
        role("learner", 2), role("decode", 0), relations=(Relation(role="decode", near="learner", level="rack"),)
    )
    answer = placed(Room(cluster([[2]])), demand)
    assert counts_of(answer) == {"learner": 2, "decode": 0}


def test_two_halves_free_do_not_hold_one_large_member_and_a_small_job_still_starts() -> None:
    # kueue#4329: quota sums ignore shape.
    room = room_with(cluster([[2]], gpus=8), [4, 4])
    stuck = refused(room, gang(role("big", 1, gpus=8)))
    assert (stuck.constraint, stuck.level, stuck.needed, stuck.available) == ("size", "node", 8, 4)
    assert "one big needs 8 GPUs on one node" in stuck.sentence
    placed(room, gang(role("small", 1, gpus=1)))


def test_a_misfit_names_what_is_missing_where_and_who_holds_it() -> None:
    room = room_with(cluster([[2, 2]]), [4, 0, 0, 0])
    stuck = refused(room, gang(role("learner", 2), required_level="rack"))
    assert (stuck.role, stuck.level, stuck.domain, stuck.missing) == ("learner", "rack", "gb/b0/r0", 4)
    assert stuck.sentence == ("learner needs 8 GPUs in one rack, gb/b0/r0 has 4 GPUs free; held by other (4 GPUs)")


def test_a_gang_larger_than_the_cluster_is_told_what_would_fit() -> None:
    topology = cluster([[4, 4], [4, 3]])
    answer = fits_ever(topology, gang(role("learner", 20, segment_size=4)))
    assert answer is not None
    assert (answer.ever, answer.fitting_role, answer.fitting_count) == (True, "learner", 12)
    assert answer.sentence.endswith("with 12 instead of 20 learner it would fit")
    assert fits_ever(topology, gang(role("learner", 12, segment_size=4))) is None
    assert fits_ever(topology, gang(role("learner", 20, segment_size=4, min_count=8))) is None


def test_an_elastic_gang_falls_back_to_the_most_that_fits_in_whole_segments() -> None:
    room = Room(cluster([[4, 4, 3]]))
    answer = placed(room, gang(role("learner", 12, segment_size=2, min_count=4), role("decode", 2, min_count=1)))
    assert counts_of(answer) == {"learner": 10, "decode": 1}
    assert isinstance(find_place(room, gang(role("learner", 14, segment_size=2, min_count=12))), Misfit)


def test_a_closed_node_takes_no_new_member() -> None:
    room = Room(cluster([[2]]))
    room.open_N[0] = False
    assert placed(room, gang(role("a", 1))).nodes["a"].tolist() == [1]
    room.open_N[:] = False
    assert refused(room, gang(role("a", 1))).sentence == "no node takes new work"


def test_racks_that_miss_one_node_of_a_segment_are_refused_by_sums_alone() -> None:
    # Slurm changelog 25.11: slow when blocks have fewer free nodes than the segment. The bar in ms is in the benchmark.
    topology = cluster([[16] * 8 for _ in range(125)])
    room = room_with(topology, ([4] * 15 + [0]) * 1000)
    stuck = refused(room, gang(role("learner", 1152, segment_size=16)))
    assert (stuck.constraint, stuck.available, stuck.fragmented) == ("segments", 0, True)


def test_expert_groups_of_one_rack_span_one_domain_each() -> None:
    # NeMo-RL#2986: an expert group over two racks stalls.
    room = Room(cluster([[18] * 3]))
    for gpus in (4, 72):
        answer = placed(room, gang(role("expert", gpus // 4, required_level="rack")))
        assert len(set(domains(room, "rack", answer.nodes["expert"]))) == 1
    assert refused(room, gang(role("expert", 19, required_level="rack"))).level == "rack"
    assert set(gpus_per_node(room.topology, gang(role("e", 18)), placed(room, gang(role("e", 18))))) == {0, 4}
