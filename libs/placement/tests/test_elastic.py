"""Elastic jobs grow into idle room and shrink before anybody is preempted."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reflux_placement.gang import Assignment, GangDemand, Relation, RoleDemand
from reflux_placement.place.check import broken
from reflux_placement.place.search import find_place
from reflux_placement.policy.elastic import Shrink, grow, shrink_for
from reflux_placement.policy.view import Ask, Live, Resize
from reflux_placement.room import Room
from reflux_placement.topology import CLUSTER, NOTHING, Node, Resources, Topology, build_topology

GPUS = 4


def _cluster(racks: int = 2, nodes: int = 4) -> Topology:
    return build_topology(
        "c",
        [Node(f"r{r}n{n}", Resources(GPUS), {"rack": f"r{r}"}) for r in range(racks) for n in range(nodes)],
    )


def _gang(count: int, least: int, most: int, gpus: int = GPUS, **rules: object) -> GangDemand:
    role = RoleDemand(role="w", count=count, min_count=least, max_count=most, each=Resources(gpus), **rules)  # type: ignore[arg-type]
    return GangDemand(roles=(role,))


def _run(
    room: Room, job: str, gang: GangDemand, nodes: list[int], *, priority: int = 0, queue: str = "default"
) -> Live:
    room.take(job, gang, Assignment(CLUSTER, 0, {"w": np.array(nodes, dtype=np.int64)}))
    number = len(room.holdings)
    ask = Ask(job=job, number=number, gang=gang, submitted_at=0.0, priority=priority, queue=queue)
    return Live(ask=ask, started_at=0.0, saved_at=0.0)


def _ask(gang: GangDemand, priority: int = 0) -> Ask:
    return Ask(job="new", number=99, gang=gang, submitted_at=0.0, priority=priority)


def _ranks(room: Room, job: str) -> list[int]:
    return room.holdings[job].assignment.nodes["w"].tolist()


def test_a_job_grows_to_its_most_and_those_that_run_stay() -> None:
    room = Room(_cluster())
    live = {"a": _run(room, "a", _gang(2, 2, 6), [1, 5])}
    (resize,) = grow(room, live)
    assert len(_ranks(room, "a")) == 6
    assert _ranks(room, "a")[:2] == [1, 5]
    assert resize.why == "w 2 -> 6"
    assert grow(room, live) == []


def test_nobody_grows_while_an_ask_waits_or_into_reserved_nodes() -> None:
    room = Room(_cluster(racks=1))
    live = {"a": _run(room, "a", _gang(1, 1, 4), [0])}
    assert grow(room, live, waiting=[_ask(_gang(9, 9, 9))]) == []
    grow(room, live, reserved=[1, 3])
    assert _ranks(room, "a") == [0, 2]
    assert room.open_N.all()


def test_room_is_shared_by_how_far_each_is_from_its_desired_size() -> None:
    room = Room(_cluster(racks=3))
    live = {
        "a": _run(room, "a", _gang(2, 1, 12), [0]),
        "b": _run(room, "b", _gang(4, 1, 12), [1]),
    }
    grow(room, live)
    assert (len(_ranks(room, "a")), len(_ranks(room, "b"))) == (4, 8)


def test_equal_jobs_get_equal_shares() -> None:
    room = Room(_cluster(racks=4, nodes=8))
    live = {job: _run(room, job, _gang(1, 1, 32), [index]) for index, job in enumerate("abcde")}
    grow(room, live)
    sizes = [len(_ranks(room, job)) for job in live]
    assert sum(sizes) == 32
    assert max(sizes) - min(sizes) <= 1


def test_whole_segments_are_added_and_taken_away() -> None:
    room = Room(_cluster(racks=4))
    live = {"a": _run(room, "a", _gang(6, 3, 12, segment_size=3), [0, 1, 2, 4, 5, 6])}
    grow(room, live)
    assert _ranks(room, "a")[:6] == [0, 1, 2, 4, 5, 6]
    assert len(_ranks(room, "a")) == 12
    found = shrink_for(room, live, _ask(_gang(4, 4, 4, required_level="rack")))
    assert isinstance(found, Shrink)
    assert _ranks(room, "a") == [0, 1, 2, 4, 5, 6, 8, 9, 10] or len(_ranks(room, "a")) == 9


def test_a_quota_stops_growth_of_its_queue_only() -> None:
    room = Room(_cluster())
    live = {
        "a": _run(room, "a", _gang(1, 1, 8), [0], queue="small"),
        "b": _run(room, "b", _gang(1, 1, 8), [1], queue="big"),
        "c": _run(room, "c", _gang(1, 1, 8), [2], queue="small"),
    }
    grow(room, live, may_hold=lambda queue, more: queue == "big" or more.gpus <= GPUS)
    sizes = {job: len(_ranks(room, job)) for job in live}
    assert sizes["a"] + sizes["c"] == 3
    assert sizes["b"] == 5


def test_members_that_stay_keep_their_gpus_when_a_job_grows() -> None:
    room = Room(_cluster(racks=1))
    _run(room, "before", _gang(1, 1, 1, gpus=1), [0])
    live = {"a": _run(room, "a", _gang(1, 1, 3, gpus=1), [0])}
    room.release("before")
    grow(room, live)
    assert room.holdings["a"].gpus_M[0] == 0b10
    assert len(_ranks(room, "a")) == 3


def test_room_beyond_the_desired_size_goes_back_to_any_ask() -> None:
    room = Room(_cluster(racks=1))
    live = {"a": _run(room, "a", _gang(2, 1, 4), [0, 1, 2, 3], priority=9)}
    found = shrink_for(room, live, _ask(_gang(2, 2, 2), priority=0))
    assert isinstance(found, Shrink)
    assert _ranks(room, "a") == [0, 1]
    assert found.assignment.nodes["w"].tolist() == [2, 3]
    assert "new" in found.resizes[0].why
    assert shrink_for(room, live, _ask(_gang(3, 3, 3), priority=0)) is None
    assert _ranks(room, "a") == [0, 1]
    assert isinstance(shrink_for(room, live, _ask(_gang(3, 3, 3), priority=9)), Shrink)
    assert _ranks(room, "a") == [0]


def test_room_that_goes_back_in_lots_is_given_back_in_whole_lots() -> None:
    room = Room(_cluster())
    one = _run(room, "a", _gang(4, 1, 8), [0, 1, 2, 3, 4, 5, 6, 7])
    live = {"a": replace(one, smaller={"w": (2, 6)})}
    assert isinstance(shrink_for(room, live, _ask(_gang(1, 1, 1), priority=-1)), Shrink)  # borrowed beyond 4
    assert _ranks(room, "a") == [0, 1, 2, 3, 4, 5]
    assert shrink_for(room, live, _ask(_gang(3, 3, 3), priority=-1)) is None  # 2 is less than it asked for
    assert shrink_for(room, live, _ask(_gang(3, 3, 3))) is not None
    assert _ranks(room, "a") == [0, 1]
    assert shrink_for(room, live, _ask(_gang(7, 7, 7), priority=9)) is None


def test_only_what_is_needed_is_given_back_and_the_least_important_gives_first() -> None:
    room = Room(_cluster())
    live = {
        "high": _run(room, "high", _gang(4, 1, 4), [0, 1, 2, 3], priority=5),
        "low": _run(room, "low", _gang(4, 1, 4), [4, 5, 6, 7]),
    }
    found = shrink_for(room, live, _ask(_gang(2, 2, 2), priority=5))
    assert isinstance(found, Shrink)
    assert [resize.job for resize in found.resizes] == ["low"]
    assert _ranks(room, "low") == [4, 5]
    assert _ranks(room, "high") == [0, 1, 2, 3]


def test_jobs_shrink_as_a_set_that_really_makes_room_or_not_at_all() -> None:
    """kueue#5243: preemption freed room in four places where the ask needed it in one."""
    room = Room(_cluster())
    live = {
        "a": _run(room, "a", _gang(2, 1, 2), [0, 4]),
        "b": _run(room, "b", _gang(2, 1, 2), [1, 5]),
        "c": _run(room, "c", _gang(4, 4, 4), [2, 3, 6, 7]),
    }
    assert shrink_for(room, live, _ask(_gang(2, 2, 2, required_level="rack"), priority=9)) is not None
    assert (_ranks(room, "a"), _ranks(room, "b")) == ([0], [1])
    whole_rack = _ask(_gang(4, 4, 4, required_level="rack"), priority=9)
    before = room.free_NR.copy()
    assert shrink_for(room, live, whole_rack) is None
    assert (room.free_NR == before).all()


def test_a_caller_may_protect_jobs() -> None:
    room = Room(_cluster(racks=1))
    live = {"a": _run(room, "a", _gang(4, 1, 4), [0, 1, 2, 3])}
    assert shrink_for(room, live, _ask(_gang(1, 1, 1), priority=9), may_shrink=lambda _live: False) is None


def test_a_size_that_would_part_a_decoder_from_its_prefill_is_not_taken() -> None:
    room = Room(_cluster())
    gang = GangDemand(
        roles=(
            RoleDemand(role="prefill", count=2, each=Resources(1)),
            RoleDemand(role="decode", count=4, min_count=2, max_count=8, each=Resources(2)),
        ),
        relations=(Relation(role="decode", near="prefill", level="rack"),),
    )
    nodes = {"prefill": np.array([0, 4]), "decode": np.array([1, 1, 5, 5])}
    room.take("a", gang, Assignment(CLUSTER, 0, nodes))
    live = {"a": Live(ask=Ask(job="a", number=1, gang=gang, submitted_at=0.0), started_at=0.0, saved_at=0.0)}
    filler = _gang(2, 2, 2, required_level="rack")
    shrink_for(room, live, _ask(filler, priority=9))
    grow(room, live)
    after = room.holdings["a"].assignment
    assert broken(room.topology, room.topology.capacity_NR, gang, after) is None


def test_jobs_that_may_shrink_to_nothing_keep_somebody() -> None:
    room = Room(_cluster(racks=1, nodes=2))
    live = {"a": _run(room, "a", _gang(2, 0, 2), [0, 1])}
    assert shrink_for(room, live, _ask(_gang(2, 2, 2), priority=9)) is None
    assert shrink_for(room, live, _ask(_gang(1, 1, 1), priority=9)) is not None
    assert _ranks(room, "a") == [0]


_RULES = [{}, {"required_level": "rack"}, {"segment_size": 2}, {"max_per_domain": 3, "spread_level": "rack"}]


def _elastic_world(rng: random.Random) -> tuple[Room, dict[str, Live]]:
    room = Room(_cluster(racks=rng.randint(1, 3), nodes=rng.randint(2, 4)))
    live: dict[str, Live] = {}
    for index in range(rng.randint(1, 5)):
        rules = rng.choice(_RULES)
        unit = 2 if "segment_size" in rules else 1
        least, count, most = sorted(unit * rng.randint(1, 4) for _ in range(3))
        gang = _gang(count, least, most, rng.choice([1, 2, 4]), **rules)
        found = find_place(room, gang)
        if isinstance(found, Assignment):
            job = f"j{index}"
            live[job] = _run(room, job, gang, found.nodes["w"].tolist(), priority=rng.randint(0, 2))
    for node in range(room.topology.num_nodes):
        room.open_N[node] = rng.random() > 0.1
    return room, live


def _check(room: Room, live: dict[str, Live], before: dict[str, list[int]], opened: np.ndarray) -> None:
    for job, each in live.items():
        now = _ranks(room, job)
        assert now[: len(before[job])] == before[job][: len(now)]
        assert all(opened[node] for node in now[len(before[job]) :])
        assert broken(room.topology, room.topology.capacity_NR, each.ask.gang, room.holdings[job].assignment) is None
    held = room.topology.capacity_NR.copy()
    for holding in room.holdings.values():
        np.subtract.at(held, holding.node_M, np.array(holding.demand.roles[0].each.row))
    assert (held == room.free_NR).all()
    assert held.min() >= 0


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 20))
def test_growing_keeps_every_rule_and_leaves_no_unit_that_would_fit(seed: int) -> None:
    _check_growth(seed)


def _check_growth(seed: int) -> None:
    rng = random.Random(seed)
    room, live = _elastic_world(rng)
    reserved = [node for node in range(room.topology.num_nodes) if rng.random() < 0.2]
    opened = room.open_N.copy()
    opened[reserved] = False
    before = {job: _ranks(room, job) for job in live}
    resizes = grow(room, live, reserved=reserved)
    _check(room, live, before, opened)
    assert {resize.job for resize in resizes} == {job for job in live if _ranks(room, job) != before[job]}
    assert grow(room, live, reserved=reserved) == []


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 20))
def test_shrinking_makes_room_with_a_set_of_which_none_can_be_spared(seed: int) -> None:
    _check_shrinking(seed)


@pytest.mark.slow
def test_five_thousand_worlds_grow_and_shrink_by_the_rules() -> None:
    for seed in range(5000):
        _check_growth(seed)
        _check_shrinking(seed)


def _check_shrinking(seed: int) -> None:
    rng = random.Random(seed)
    room, live = _elastic_world(rng)
    rules = rng.choice(_RULES[:2])
    ask = _ask(_gang(*[rng.randint(1, 6)] * 3, rng.choice([2, 4]), **rules), priority=rng.randint(0, 2))  # type: ignore[misc]
    if isinstance(find_place(room, ask.gang), Assignment):
        return
    before = {job: _ranks(room, job) for job in live}
    start = room.copy()
    found = shrink_for(room, live, ask)
    if found is None:
        assert (room.free_NR == start.free_NR).all()
        return
    _check(room, live, before, room.open_N)
    for resize in found.resizes:
        assert len(_ranks(room, resize.job)) < len(before[resize.job])
        floor = live[resize.job].ask.gang.roles[0]
        may_go_below = live[resize.job].ask.priority <= ask.priority
        assert len(_ranks(room, resize.job)) >= (floor.least if may_go_below else min(floor.count, floor.most))
        assert not isinstance(find_place(_without(start, found.resizes, resize), ask.gang), Assignment)
    assert broken(room.topology, room.usable_NR(), ask.gang, found.assignment) is None


def _without(start: Room, resizes: tuple[Resize, ...], spared: Resize) -> Room:
    """The room if all but one of the shrinks were booked."""
    room = start.copy()
    for resize in resizes:
        if resize is not spared:
            demand = room.holdings[resize.job].demand
            room.release(resize.job)
            room.take(resize.job, demand, resize.assignment)
    return room


@pytest.mark.parametrize("gpus", [0, 1])
def test_members_that_need_next_to_nothing_do_not_grow_for_ever(gpus: int) -> None:
    room = Room(_cluster(racks=1, nodes=1))
    live = {"a": _run(room, "a", _gang(1, 1, 40, gpus), [0])}
    grow(room, live)
    assert len(_ranks(room, "a")) == (40 if gpus == 0 else GPUS)
    assert live["a"].ask.gang.total() != NOTHING or gpus == 0
