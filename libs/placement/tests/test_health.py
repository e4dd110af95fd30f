"""Nodes that die, come back, flap and drain."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reflux_placement.policy import health as nodes
from reflux_placement.policy.health import HEALTHY, Damping, NodeHealth, advance, back_at, drain, observe, state_of
from reflux_placement.topology import Node, Resources, build_topology


def _flap(until: float, period: float = 30.0) -> tuple[NodeHealth, float, list[str]]:
    """A node that is down for half of every period; its states when it has just come up."""
    health, now, seen = HEALTHY, 0.0, []
    while now < until:
        health = observe(health, reachable=False, now=now)
        health = observe(health, reachable=True, now=now + period / 2)
        seen.append(state_of(health, now + period / 2))
        now += period
    return health, now - period / 2, seen


def test_a_node_that_flaps_every_30_s_is_suppressed_at_its_third_failure_and_stays_so() -> None:
    _, _, seen = _flap(600.0)
    assert seen[:2] == ["up", "up"]
    assert set(seen[2:]) == {"flapping"}


def test_a_node_that_flapped_for_a_day_comes_back_after_the_longest_stable_time() -> None:
    health, now, _ = _flap(86_400.0)
    back = back_at(health, now)
    assert back is not None
    assert now + 800.0 < back <= now + Damping().longest_seconds
    assert state_of(health, back - 1.0) == "flapping"
    assert state_of(health, back + 1.0) == "up"


def test_a_node_that_fails_once_a_day_is_never_suppressed() -> None:
    health = HEALTHY
    for day in range(30):
        health = observe(health, reachable=False, now=day * 86_400.0)
        health = observe(health, reachable=True, now=day * 86_400.0 + 600.0)
        assert state_of(health, day * 86_400.0 + 600.0) == "up"
    assert health.failures == 30


def test_time_that_a_node_is_down_does_not_count_as_stable() -> None:
    health, now, _ = _flap(300.0)
    health = observe(health, reachable=False, now=now)
    health = observe(health, reachable=True, now=now + 86_400.0)
    assert state_of(health, now + 86_400.0) == "flapping"


def test_looking_at_a_dead_node_again_and_again_is_one_failure() -> None:
    health = HEALTHY
    for now in range(100):
        health = observe(health, reachable=False, now=float(now))
    assert health.failures == 1
    assert state_of(health, 100.0) == "down"
    assert state_of(observe(health, reachable=True, now=101.0), 101.0) == "up"


def test_a_restart_between_two_looks_is_a_failure() -> None:
    health = HEALTHY
    for now in (0.0, 30.0, 60.0):
        health = observe(health, reachable=True, restarted=True, now=now)
    assert health.failures == 3
    assert state_of(health, 60.0) == "flapping"


def test_down_beats_draining_beats_flapping() -> None:
    health, now, _ = _flap(300.0)
    assert state_of(health, now) == "flapping"
    assert state_of(drain(health, True), now) == "draining"
    assert state_of(observe(drain(health, True), reachable=False, now=now), now) == "down"
    assert state_of(drain(drain(health, True), False), now) == "flapping"


def test_a_drain_counts_from_the_first_word_and_is_forgotten_with_it() -> None:
    health = drain(drain(HEALTHY, True, 5.0), True, 9.0)
    assert health.draining_since == 5.0
    assert drain(health, False, 11.0) == HEALTHY
    assert drain(drain(health, False, 11.0), True, 12.0).draining_since == 12.0


def test_states_go_by_index_and_only_open_nodes_take_work() -> None:
    topology = build_topology("c", [Node(name, Resources(4), {"rack": "r"}) for name in "abcd"])
    dead = observe(HEALTHY, reachable=False, now=1.0)
    states = nodes.node_states(topology, {"c": dead, "b": drain(HEALTHY, True), "a": HEALTHY, "gone": dead}, 2.0)
    assert states == {1: "draining", 2: "down"}
    assert nodes.open_nodes(topology, states, frozenset({3})).tolist() == [True, False, False, False]


@pytest.mark.parametrize(
    "wrong",
    [{"reuse": 3000.0}, {"penalty": 0.0}, {"half_life_seconds": 0.0}, {"longest_seconds": 300.0}, {"reuse": 0.0}],
)
def test_a_rule_without_effect_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="damping"):
        Damping(**wrong)


_looks = st.lists(st.tuples(st.floats(0.0, 400.0), st.booleans(), st.booleans()), max_size=30)


@settings(max_examples=60, deadline=None)
@given(looks=_looks)
def test_whatever_happens_the_penalty_is_bounded_and_a_stable_node_comes_back(
    looks: list[tuple[float, bool, bool]],
) -> None:
    damping, health, now = Damping(), HEALTHY, 0.0
    for wait, reachable, restarted in looks:
        now += wait
        health = observe(health, reachable=reachable, restarted=restarted, now=now)
        assert 0.0 <= health.penalty <= damping.ceiling
        assert NodeHealth.from_plain(json.loads(json.dumps(health.to_plain()))) == health
    health = observe(health, reachable=True, now=now)
    assert state_of(health, now + damping.longest_seconds + 1.0) == "up"


@settings(max_examples=60, deadline=None)
@given(looks=_looks, steps=st.lists(st.floats(0.1, 200.0), min_size=1, max_size=5))
def test_how_often_one_looks_does_not_change_the_outcome(
    looks: list[tuple[float, bool, bool]], steps: list[float]
) -> None:
    health, now = HEALTHY, 0.0
    for wait, reachable, restarted in looks:
        now += wait
        health = observe(health, reachable=reachable, restarted=restarted, now=now)
    often = health
    for step in steps:
        now += step
        often = advance(often, now)
    once = advance(health, now)
    assert often.penalty == pytest.approx(once.penalty)
    assert abs(once.penalty - Damping().reuse) < 1e-6 or often.suppressed == once.suppressed
