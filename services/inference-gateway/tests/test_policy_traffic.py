import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reflux_inference_gateway.policy.traffic import CanaryLimits, Traffic

BOUNDED = settings(max_examples=40, deadline=None, derandomize=True)
KEYS = [f"trajectory-{number}" for number in range(400)]
WEIGHTS = st.dictionaries(st.sampled_from("abcd"), st.floats(0.1, 10), min_size=1)


def divided(weights, canary=""):
    traffic = Traffic()
    traffic.set(weights, canary)
    return traffic


def test_without_weights_requests_go_anywhere():
    traffic = divided({"a": 1.0})
    assert traffic.arm("x") == "a"
    traffic.set({})
    assert traffic.arm("x") == ""


@BOUNDED
@given(WEIGHTS)
def test_keys_are_sticky_and_weight_zero_gets_nothing(weights):
    traffic = divided(weights | {"none": 0.0})
    arms = [traffic.arm(key) for key in KEYS]
    assert arms == [divided(weights).arm(key) for key in KEYS]
    assert set(arms) <= set(weights)


@BOUNDED
@given(WEIGHTS)
def test_parts_follow_the_weights(weights):
    traffic, total = divided(weights), sum(weights.values())
    arms = [traffic.arm(f"key-{number}") for number in range(1500)]
    for arm, weight in weights.items():
        part = weight / total
        assert abs(arms.count(arm) / 1500 - part) <= 5 * math.sqrt(part * (1 - part) / 1500) + 1e-9


@BOUNDED
@given(WEIGHTS, st.sampled_from("abcd"), st.floats(0, 10))
def test_a_changed_weight_moves_only_keys_into_or_out_of_its_arm(weights, arm, weight):
    before = divided(weights)
    after = divided(weights | {arm: weight + (0.1 if set(weights) <= {arm} else 0.0)})
    for key in KEYS:
        old, new = before.arm(key), after.arm(key)
        if weight >= weights.get(arm, 0.0):
            assert new in (old, arm)
        else:
            assert old in (new, arm)


@pytest.mark.parametrize(
    ("weights", "canary"),
    [
        ({"a": -1.0, "b": 2.0}, ""),
        ({"a": 0.0}, ""),
        ({"a": math.inf}, ""),
        ({"a": math.nan}, ""),
        ({"a": 1.0}, "a"),
        ({"a": 1.0, "b": 0.0}, "a"),
        ({"a": 1.0, "b": 0.0}, "b"),
        ({"a": 1.0}, "b"),
    ],
)
def test_weights_that_send_requests_nowhere_are_refused_and_change_nothing(weights, canary):
    traffic = divided({"old": 1.0})
    with pytest.raises(ValueError, match=r"weights|canary"):
        traffic.set(weights, canary)
    assert traffic.weights == {"old": 1.0}


def test_a_failing_canary_is_taken_back_soon_and_its_keys_go_home():
    traffic = divided({"stable": 9.0, "new": 1.0}, canary="new")
    for count in range(1, 40):
        assert not traffic.answered("stable", failed=True), "the stable arm's errors are not the canary's"
        if traffic.answered("new", failed=count % 2 == 0):
            break
    assert count <= 30, "half of its requests failed"
    assert traffic.weights == {"stable": 9.0, "new": 0.0}
    assert "fail" in traffic.rolled_back
    assert {traffic.arm(key) for key in KEYS} == {"stable"}
    assert not traffic.answered("new", failed=True), "it is taken back once"


def test_a_good_canary_stays_for_long():
    draw, traffic = random.Random(3), divided({"stable": 1.0, "new": 1.0}, canary="new")
    assert not any(traffic.answered("new", failed=draw.random() < 0.01) for _ in range(20_000))


def test_a_canary_that_was_good_for_long_and_turns_bad_is_found_as_soon():
    traffic = divided({"stable": 1.0, "new": 1.0}, canary="new")
    for _ in range(5000):
        traffic.answered("new", failed=False)
    assert any(traffic.answered("new", failed=True) for _ in range(12))


def test_a_canary_over_its_limit_is_found_within_the_stated_number_of_requests():
    limits = CanaryLimits(error_rate=0.05, good_error_rate=0.01)
    divergence = 0.05 * math.log(5) + 0.95 * math.log(0.95 / 0.99)
    counts = []
    for seed in range(20):
        draw, traffic = random.Random(seed), Traffic()
        traffic.set({"stable": 1.0, "new": 1.0}, "new", limits)
        counts.append(next(at for at in range(10_000) if traffic.answered("new", failed=draw.random() < 0.05)))
    assert sum(counts) / len(counts) <= 1.5 * math.log(limits.requests_per_false_alarm) / divergence


def test_a_canary_that_computes_something_else_is_taken_back_at_once():
    traffic = divided({"stable": 1.0, "new": 1.0}, canary="new")
    assert not traffic.condemned("stable", "its weights are a mixture")
    assert traffic.condemned("new", "its log-probs differ")
    assert traffic.weights == {"stable": 1.0, "new": 0.0}
    assert traffic.rolled_back == "new: its log-probs differ"
    assert not traffic.condemned("new", "its log-probs differ"), "it is taken back once"
    traffic.set({"stable": 1.0, "new": 1.0}, canary="new")
    assert traffic.rolled_back == ""
