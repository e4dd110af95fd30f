"""Hot spares and the replacement of members on lost or draining nodes."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reflux_placement.errors import UnknownLevel
from reflux_placement.gang import Assignment, GangDemand, RoleDemand
from reflux_placement.place.check import broken
from reflux_placement.place.search import find_place
from reflux_placement.policy.health import open_nodes
from reflux_placement.policy.spares import SpareRule, refresh, replace_lost
from reflux_placement.policy.view import Ask, Live, NodeState, Replace, Requeue
from reflux_placement.room import Holding, Room
from reflux_placement.topology import CLUSTER, Node, Resources, Topology, build_topology

GPUS = 4


def _cluster(blocks: int = 1, racks: int = 2, nodes: int = 4) -> Topology:
    return build_topology(
        "c",
        [
            Node(f"b{b}r{r}n{n}", Resources(GPUS), {"block": f"b{b}", "rack": f"r{r}"})
            for b in range(blocks)
            for r in range(racks)
            for n in range(nodes)
        ],
    )


def _gang(count: int, gpus: int = GPUS, level: str = CLUSTER, **rules: object) -> GangDemand:
    role = RoleDemand(role="w", count=count, each=Resources(gpus), **rules)  # type: ignore[arg-type]
    return GangDemand(roles=(role,), required_level=level)


def _run(room: Room, job: str, gang: GangDemand, nodes: list[int], *, movable: bool = False, priority: int = 0) -> Live:
    room.take(job, gang, Assignment(CLUSTER, 0, {"w": np.array(nodes, dtype=np.int64)}))
    ask = Ask(job=job, number=len(room.holdings), gang=gang, submitted_at=0.0, priority=priority)
    return Live(ask=ask, started_at=0.0, saved_at=0.0, movable=movable)


def _ranks(room: Room, job: str) -> list[int]:
    return room.holdings[job].assignment.nodes["w"].tolist()


def test_a_lost_member_goes_to_free_room_of_its_rack_before_a_spare() -> None:
    room = Room(_cluster())
    live = {"a": _run(room, "a", _gang(2, level="rack"), [0, 1])}
    (action,) = replace_lost(room, live, {1: "down"}, frozenset({2}))
    assert isinstance(action, Replace)
    assert action.lost_nodes == (1,)
    assert action.used_spares == ()
    assert _ranks(room, "a") == [0, 3]
    assert action.assignment.nodes["w"].tolist() == [0, 3]


def test_a_spare_of_the_same_rack_comes_before_free_room_elsewhere() -> None:
    room = Room(_cluster())
    live = {"a": _run(room, "a", _gang(3), [0, 1, 2])}
    (action,) = replace_lost(room, live, {1: "down"}, frozenset({3}))
    assert isinstance(action, Replace)
    assert action.used_spares == (3,)
    assert _ranks(room, "a") == [0, 3, 2]
    assert "spares" in action.why


def test_free_room_of_another_rack_comes_before_its_spare() -> None:
    room = Room(_cluster(racks=3))
    live = {"a": _run(room, "a", _gang(4), [0, 1, 2, 3])}
    (action,) = replace_lost(room, live, {1: "down"}, frozenset({7, 11}))
    assert isinstance(action, Replace)
    assert action.used_spares == ()
    full = Room(_cluster(racks=3))
    live = {
        "a": _run(full, "a", _gang(4), [0, 1, 2, 3]),
        "b": _run(full, "b", _gang(6), [4, 5, 6, 8, 9, 10]),
    }
    (action,) = replace_lost(full, live, {1: "down"}, frozenset({7, 11}))
    assert isinstance(action, Replace)
    assert len(action.used_spares) == 1


def test_as_few_spares_as_needed_stand_in() -> None:
    room = Room(_cluster(nodes=6))
    live = {"a": _run(room, "a", _gang(3, level="rack"), [0, 1, 2])}
    (action,) = replace_lost(room, live, {1: "down", 2: "down"}, frozenset({3, 4}))
    assert isinstance(action, Replace)
    assert len(action.used_spares) == 1
    assert 5 in _ranks(room, "a")


def test_two_nodes_lost_in_one_window_are_both_replaced_and_the_others_keep_running() -> None:
    """kueue#14244: a second failed node evicted the whole job of 500 nodes."""
    room = Room(_cluster(racks=32, nodes=18))
    nodes = [18 * rack + node for rack in range(31) for node in range(16)]
    live = {"big": _run(room, "big", _gang(496, segment_size=16), nodes)}
    (action,) = replace_lost(room, live, {5: "down", 200: "down"}, frozenset({16, 17, 196, 197}))
    assert isinstance(action, Replace)
    after = _ranks(room, "big")
    changed = [rank for rank, (old, new) in enumerate(zip(nodes, after, strict=True)) if old != new]
    assert [nodes[rank] for rank in changed] == [5, 200]
    assert [after[rank] // 18 for rank in changed] == [0, 11]
    assert set(action.used_spares) <= {16, 17, 196, 197, 214, 215}


def test_without_a_replacement_the_job_is_requeued_with_a_reason_and_gives_its_room_back() -> None:
    """kueue#6913: a segment of a whole rack without a spare got an empty assignment."""
    room = Room(_cluster(nodes=18))
    live = {"a": _run(room, "a", _gang(18, segment_size=18), list(range(18)))}
    for node in range(18, 36):
        _run(room, f"x{node}", _gang(1), [node])
    (action,) = replace_lost(room, live, {4: "down"}, frozenset())
    assert isinstance(action, Requeue)
    assert "b0r0n4" in action.why.replace("/", "")
    assert "needs" in action.why
    assert "a" not in room.holdings


def test_a_member_that_is_started_again_stays_in_the_domain_of_its_gang_or_the_gang_waits() -> None:
    """koordinator#3181: a recreated member landed outside the domain."""
    room = Room(_cluster(blocks=2, racks=1))
    live = {"a": _run(room, "a", _gang(4, level="rack"), [0, 1, 2, 3])}
    (action,) = replace_lost(room, live, {3: "down"}, frozenset({7}))
    assert isinstance(action, Requeue)


def test_when_a_whole_rack_dies_the_gang_moves_to_another_one() -> None:
    """ray#62483: a group stayed infeasible for ever after its rack had died."""
    room = Room(_cluster())
    live = {"a": _run(room, "a", _gang(4, level="rack"), [0, 1, 2, 3])}
    (action,) = replace_lost(room, live, dict.fromkeys(range(4), "down"), frozenset())
    assert isinstance(action, Replace)
    assert sorted(_ranks(room, "a")) == [4, 5, 6, 7]


def test_a_draining_node_is_left_at_the_next_chance_and_never_costs_the_job() -> None:
    room = Room(_cluster(racks=1))
    live = {"a": _run(room, "a", _gang(2), [0, 1])}
    assert replace_lost(room, live, {1: "draining"}, frozenset()) == []
    assert _ranks(room, "a") == [0, 1]
    chance = {"a": Live(ask=live["a"].ask, started_at=0.0, saved_at=9.0, movable=True)}
    (action,) = replace_lost(room, chance, {1: "draining"}, frozenset())
    assert isinstance(action, Replace)
    assert _ranks(room, "a") == [0, 2]
    full = Room(_cluster(racks=1, nodes=2))
    chance = {"a": _run(full, "a", _gang(2), [0, 1], movable=True)}
    assert replace_lost(full, chance, {1: "draining"}, frozenset()) == []
    assert _ranks(full, "a") == [0, 1]


def test_a_vacating_node_is_left_at_once_by_replacement_or_by_way_of_the_queue() -> None:
    room = Room(_cluster(racks=1))
    live = {"a": _run(room, "a", _gang(2), [0, 1])}
    (action,) = replace_lost(room, live, {1: "vacating"}, frozenset())
    assert isinstance(action, Replace)
    assert action.why.startswith("has to leave ")
    assert _ranks(room, "a") == [0, 2]
    full = Room(_cluster(racks=1, nodes=2))
    (action,) = replace_lost(full, {"a": _run(full, "a", _gang(2), [0, 1])}, {1: "vacating"}, frozenset())
    assert isinstance(action, Requeue)
    assert action.why.startswith("has to leave ")


def test_a_lost_node_is_replaced_even_if_a_draining_one_cannot_be() -> None:
    room = Room(_cluster(racks=1))
    live = {"a": _run(room, "a", _gang(3), [0, 1, 2])}
    (action,) = replace_lost(room, live, {1: "down", 2: "draining"}, frozenset())
    assert isinstance(action, Replace)
    assert action.lost_nodes == (1,)
    assert _ranks(room, "a") == [0, 3, 2]


def test_members_on_a_flapping_node_stay() -> None:
    room = Room(_cluster())
    live = {"a": _run(room, "a", _gang(2), [0, 1], movable=True)}
    assert replace_lost(room, live, {1: "flapping"}, frozenset()) == []


def test_an_elastic_gang_goes_on_smaller_when_nothing_is_left() -> None:
    room = Room(_cluster(racks=1))
    live = {"a": _run(room, "a", _gang(4, min_count=2), [0, 1, 2, 3])}
    (action,) = replace_lost(room, live, {1: "down"}, frozenset())
    assert isinstance(action, Replace)
    assert _ranks(room, "a") == [0, 3, 2]
    assert "1 member" in action.why
    lost_too_many: dict[int, NodeState] = {1: "down", 0: "down", 2: "down"}
    (action,) = replace_lost(room, live, lost_too_many, frozenset())
    assert isinstance(action, Requeue)


def test_an_elastic_gang_gives_up_whole_segments() -> None:
    room = Room(_cluster())
    live = {"a": _run(room, "a", _gang(8, min_count=4, segment_size=4), list(range(8)))}
    (action,) = replace_lost(room, live, {1: "down"}, frozenset())
    assert isinstance(action, Replace)
    assert _ranks(room, "a") == [4, 5, 6, 7]


def test_a_segment_that_cannot_be_mended_moves_as_a_whole_and_the_others_stay() -> None:
    room = Room(_cluster(racks=3))
    live = {"a": _run(room, "a", _gang(8, segment_size=4), list(range(8)))}
    (action,) = replace_lost(room, live, {1: "down"}, frozenset())
    assert isinstance(action, Replace)
    assert _ranks(room, "a") == [8, 9, 10, 11, 4, 5, 6, 7]


def test_a_gang_that_may_shrink_to_nothing_is_requeued_instead_of_left_empty() -> None:
    room = Room(_cluster(racks=1, nodes=1))
    live = {"a": _run(room, "a", _gang(1, min_count=0), [0])}
    (action,) = replace_lost(room, live, {0: "down"}, frozenset())
    assert isinstance(action, Requeue)


def test_members_that_stay_keep_their_gpus() -> None:
    room = Room(_cluster(racks=1))
    _run(room, "before", _gang(1, 1), [0])
    live = {"a": _run(room, "a", _gang(2, 1), [0, 1])}
    room.release("before")
    replace_lost(room, live, {1: "down"}, frozenset())
    assert _ranks(room, "a")[0] == 0
    assert room.holdings["a"].gpus_M[0] == 0b10


def test_the_more_important_job_gets_the_last_spare() -> None:
    room = Room(_cluster(racks=1, nodes=5))
    live = {
        "low": _run(room, "low", _gang(2), [0, 1]),
        "high": _run(room, "high", _gang(2), [2, 3], priority=5),
    }
    first, second = replace_lost(room, live, {1: "down", 2: "down"}, frozenset({4}))
    assert isinstance(first, Replace)
    assert first.job == "high"
    assert isinstance(second, Replace | Requeue)
    assert second.job == "low"


def test_every_rack_holds_back_its_count_of_idle_nodes() -> None:
    room = Room(_cluster())
    rule = SpareRule(per_domain=1)
    assert refresh(room, rule, {}) == {3, 7}
    _run(room, "a", _gang(1), [7])
    assert refresh(room, rule, {3: "flapping"}) == {2, 6}
    assert refresh(room, SpareRule(), {}) == frozenset()


def test_spares_stay_the_same_from_cycle_to_cycle() -> None:
    room = Room(_cluster())
    rule = SpareRule(per_domain=1)
    assert refresh(room, rule, {}, current={2, 6}) == {2, 6}


def test_a_failed_node_that_returns_is_a_spare_again() -> None:
    room = Room(_cluster(racks=1, nodes=4))
    rule = SpareRule(per_domain=1)
    live = {"a": _run(room, "a", _gang(3), [0, 1, 2])}
    spares = refresh(room, rule, {})
    assert spares == {3}
    (action,) = replace_lost(room, live, {1: "down"}, spares)
    assert isinstance(action, Replace)
    assert action.used_spares == (3,)
    assert refresh(room, rule, {1: "down"}, spares) == frozenset()
    assert refresh(room, rule, {}, frozenset(), returned={1}) == {1}


def test_named_spares_come_first_and_their_number_is_kept_up() -> None:
    room = Room(_cluster(racks=1, nodes=6))
    rule = SpareRule(nodes=("b0r0n0", "b0r0n2"))
    assert refresh(room, rule, {}) == {0, 2}
    assert refresh(room, rule, {0: "down"}) == {2, 5}
    with pytest.raises(LookupError):
        refresh(room, SpareRule(nodes=("nowhere",)), {})


def test_a_rule_for_a_level_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(UnknownLevel):
        refresh(Room(_cluster()), SpareRule(per_domain=1, level="row"), {})
    with pytest.raises(ValueError, match="per_domain"):
        SpareRule(per_domain=-1)


_RULES = [
    {},
    {"level": "rack"},
    {"level": "block"},
    {"required_level": "rack"},
    {"segment_size": 2},
    {"min_count": 1},
    {"segment_size": 2, "min_count": 2},
    {"max_per_domain": 2, "spread_level": "rack"},
]


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 1 << 20))
def test_whatever_dies_no_gang_is_partial_misplaced_or_moved_without_need(seed: int) -> None:
    _check_replacement(seed)


@pytest.mark.slow
def test_five_thousand_times_no_gang_is_partial_misplaced_or_moved_without_need() -> None:
    for seed in range(5000):
        _check_replacement(seed)


def _check_replacement(seed: int) -> None:
    rng = random.Random(seed)
    topology = _cluster(blocks=2, racks=2, nodes=rng.randint(2, 4))
    room = Room(topology)
    live: dict[str, Live] = {}
    spares = refresh(room, SpareRule(per_domain=rng.randint(0, 1)), {})
    room.open_N = open_nodes(topology, {}, spares)
    for index in range(rng.randint(1, 6)):
        rules = rng.choice(_RULES)
        gang = _gang(rng.choice([2, 4]) if rules else rng.randint(1, 4), rng.choice([1, 2, 4]), **rules)
        found = find_place(room, gang)
        if isinstance(found, Assignment):
            live[f"j{index}"] = _run(room, f"j{index}", gang, found.nodes["w"].tolist(), movable=rng.random() < 0.5)
    states: dict[int, NodeState] = {
        node: rng.choice(["down", "vacating", "draining", "flapping"])
        for node in range(topology.num_nodes)
        if rng.random() < 0.25
    }
    room.open_N = open_nodes(topology, states, spares)
    before = dict(room.holdings)
    actions = {action.job: action for action in replace_lost(room, live, states, spares)}
    for job, old in before.items():
        _check_job(room, topology, job, old, actions.get(job), states, spares)
    _check_books(room)


def _check_job(
    room: Room,
    topology: Topology,
    job: str,
    old: Holding,
    action: Replace | Requeue | None,
    states: dict[int, NodeState],
    spares: frozenset[int],
) -> None:
    down = {node for node, state in states.items() if state in ("down", "vacating")}
    was = old.assignment.nodes["w"].tolist()
    if isinstance(action, Requeue):
        assert job not in room.holdings
        assert down & set(was)
        return
    now = _ranks(room, job)
    assert now
    assert not down & set(now)
    assert broken(topology, topology.capacity_NR, old.demand, room.holdings[job].assignment) is None
    if action is None:
        assert now == was
        return
    assert action.assignment.nodes["w"].tolist() == now
    for rank, node in enumerate(now):
        if node != was[rank]:
            size = old.demand.roles[0].segment_size or 1
            mates = was[rank // size * size : rank // size * size + size]
            assert set(mates) & set(action.lost_nodes)
            assert node not in states or node in was
            assert room.open_N[node] or node in spares or node in was
    assert set(action.used_spares) == spares & set(now)


def _check_books(room: Room) -> None:
    free = room.topology.capacity_NR.copy()
    gpus: dict[int, int] = {}
    for holding in room.holdings.values():
        each = holding.demand.roles[0].each.row
        for node, mask in zip(holding.node_M.tolist(), holding.gpus_M.tolist(), strict=True):
            free[node] -= each
            assert not mask & gpus.get(node, 0)
            gpus[node] = gpus.get(node, 0) | mask
    assert (free == room.free_NR).all()
    assert free.min() >= 0
