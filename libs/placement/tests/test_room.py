"""Who holds what, counted beside the room: no GPU twice, members that stay keep theirs, a refusal changes nothing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reflux_placement.errors import Occupied
from reflux_placement.gang import Assignment, GangDemand, RoleDemand
from reflux_placement.room import Holding, Room
from reflux_placement.topology import Node, Resources, build_topology

NODES, GPUS = 4, 4
TOPOLOGY = build_topology("tiny", [Node(f"n{i}", Resources(GPUS, 8000, 64), {"rack": "r1"}) for i in range(NODES)])
PLACES = st.lists(st.integers(0, NODES - 1), min_size=1, max_size=4)


def _gang(roles: dict[str, int], counts: dict[str, int]) -> GangDemand:
    return GangDemand(
        roles=tuple(RoleDemand(role=role, count=counts[role], each=Resources(g, 500, 1)) for role, g in roles.items())
    )


def _at(nodes: dict[str, list[int]]) -> Assignment:
    return Assignment("cluster", 0, {role: np.array(ranks, dtype=np.int64) for role, ranks in nodes.items()})


def _masks(holding: Holding) -> dict[tuple[str, int], tuple[int, int]]:
    """Node and GPUs by role and rank."""
    names = [(role.role, rank) for role in holding.demand.roles for rank in range(role.count)]
    return dict(zip(names, zip(holding.node_M.tolist(), holding.gpus_M.tolist(), strict=True), strict=True))


def _state(room: Room) -> tuple[bytes, tuple[str, ...], list[int]]:
    return room.free_NR.tobytes(), tuple(room.holdings), room._gpus_N.tolist()


def _assert_sound(room: Room) -> None:
    """Every GPU has one holder or is free, and the free amounts are what the holders leave."""
    taken = [0] * NODES
    for holding in room.holdings.values():
        for node, mask in _masks(holding).values():
            assert not taken[node] & mask
            taken[node] |= mask
    assert [GPUS - mask.bit_count() for mask in taken] == room.free_NR[:, 0].tolist()
    assert [(1 << GPUS) - 1 & ~mask for mask in taken] == room._gpus_N.tolist()


@settings(max_examples=200, deadline=None)
@given(first=PLACES, second=PLACES, moved=PLACES, gpus=st.tuples(st.integers(0, 2), st.integers(1, 2)))
def test_members_that_stay_keep_their_gpus_and_no_gpu_is_held_twice(
    first: list[int], second: list[int], moved: list[int], gpus: tuple[int, int]
) -> None:
    roles = {"a": gpus[0], "b": gpus[1]}
    room = Room(TOPOLOGY)
    room.take("other", _gang({"o": 1}, {"o": 1}), _at({"o": [0]}))
    try:
        before = room.take("job", _gang(roles, {"a": len(first), "b": len(second)}), _at({"a": first, "b": second}))
    except Occupied:
        _assert_sound(room)
        return
    _assert_sound(room)
    room.release("job")
    gang = _gang(roles, {"a": len(first), "b": len(moved)})
    try:
        after = room.take("job", gang, _at({"a": first, "b": moved}), keep=before)
    except Occupied:
        room.restore("job", before)
        _assert_sound(room)
        return
    _assert_sound(room)
    old, new = _masks(before), _masks(after)
    for member, (node, mask) in new.items():
        assert mask.bit_count() == roles[member[0]]
        if member in old and old[member][0] == node:
            assert mask == old[member][1]


def test_what_somebody_else_holds_by_now_is_not_restored() -> None:
    room = Room(TOPOLOGY)
    holding = room.take("job", _gang({"a": 0}, {"a": 1}), _at({"a": [1]}))
    room.release("job")
    room.take("thief", _gang({"a": 0}, {"a": 16}), _at({"a": [1] * 16}))  # all CPUs
    before = _state(room)
    with pytest.raises(Occupied, match="not free any more"):
        room.restore("job", holding)
    assert _state(room) == before


def test_the_same_gpus_are_not_restored_beside_others_though_the_sum_would_do() -> None:
    room = Room(TOPOLOGY)
    holding = room.take("job", _gang({"a": 1}, {"a": 1}), _at({"a": [2]}))
    room.release("job")
    room.take("thief", _gang({"a": 1}, {"a": 1}), _at({"a": [2]}))
    with pytest.raises(Occupied):
        room.restore("job", holding)


def test_a_full_node_is_named_and_nothing_is_taken() -> None:
    room = Room(TOPOLOGY)
    before = _state(room)
    with pytest.raises(Occupied, match="node n3 has too little free"):
        room.take("job", _gang({"a": 2}, {"a": 4}), _at({"a": [0, 3, 3, 3]}))
    assert _state(room) == before


@settings(max_examples=100, deadline=None)
@given(st.permutations(range(NODES)), st.integers(1, NODES), st.sampled_from([(4, 0), (2, 0), (1, 0), (2, 1), (1, 2)]))
def test_on_whole_nodes_members_of_equal_place_have_equal_gpus_in_rank_order(order, num_nodes, sizes) -> None:
    """GPU i uses rail i * len(rails) // gpus: so they have equal rails, too. `sizes`: GPUs of a learner and of two
    members of a second role beside it; learners fill what those leave."""
    gpus, other_gpus = sizes
    per_node = (GPUS - 2 * other_gpus) // gpus
    nodes = [node for node in order[:num_nodes] for _ in range(per_node)]
    others = [node for node in order[:num_nodes] for _ in range(2)] if other_gpus else []
    gang = _gang({"a": gpus, "b": other_gpus}, {"a": len(nodes), "b": len(others)})
    masks = _masks(Room(TOPOLOGY).take("job", gang, _at({"a": nodes, "b": others})))
    for (role, rank), (node, mask) in masks.items():
        assert mask == masks[role, rank % (per_node if role == "a" else 2)][1]
        place = rank % per_node * gpus if role == "a" else per_node * gpus + rank % 2 * other_gpus
        assert mask == (1 << (gpus if role == "a" else other_gpus)) - 1 << place
        assert node == (nodes if role == "a" else others)[rank]
