import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reflux_inference_gateway.policy.breaker import Breaker, BreakerLimits, Position

LIMITS = BreakerLimits(
    window_requests=10, min_failures=3, failure_rate=0.5, open_seconds=5, max_open_seconds=12, probes=2
)


def opened(at=0.0):
    breaker = Breaker(LIMITS)
    for _ in range(3):
        breaker.failed(at)
    return breaker


def test_it_opens_after_enough_failures_and_lets_probes_through_after_its_rest():
    breaker = Breaker(LIMITS)
    for _ in range(2):
        breaker.failed(0.0)
        assert breaker.allows(0.0)
    breaker.failed(0.0)
    assert breaker.position(0.0) is breaker.position(4.9) is Position.OPEN
    assert not breaker.allows(4.9)
    assert breaker.position(5.0) is Position.HALF_OPEN
    for _ in range(2):
        assert breaker.allows(5.0)
        breaker.started(5.0)
    assert not breaker.allows(5.0), "as many probes at once as the limits say"
    breaker.succeeded(5.1)
    assert breaker.allows(5.1)
    breaker.succeeded(5.2)
    assert breaker.position(5.2) is Position.CLOSED


def test_a_failed_probe_doubles_the_rest_up_to_the_longest():
    breaker, now, rests = opened(), 0.0, []
    for _ in range(4):
        start = now
        while not breaker.allows(now):
            now += 0.5
        rests.append(now - start)
        breaker.started(now)
        breaker.failed(now)
    assert rests == [5.0, 10.0, 12.0, 12.0]


def test_rare_failures_never_open_it_however_many_there_are():
    breaker = Breaker(LIMITS)
    for number in range(10_000):
        breaker.failed(0.0) if number % 3 == 0 else breaker.succeeded(0.0)
    assert breaker.position(0.0) is Position.CLOSED


def test_a_cancelled_or_silent_probe_frees_its_place():
    breaker = opened()
    breaker.started(5.0)
    breaker.started(5.0)
    breaker.cancelled(6.0)
    assert breaker.allows(6.0)
    breaker.started(6.0)
    assert not breaker.allows(6.0)
    assert breaker.allows(10.0), "the probe of 5.0 was never answered"


def test_answers_of_requests_from_before_it_opened_change_nothing_while_it_rests():
    breaker = opened()
    breaker.succeeded(1.0)
    breaker.failed(2.0)
    breaker.cancelled(3.0)
    assert breaker.position(4.9) is Position.OPEN
    assert breaker.position(5.0) is Position.HALF_OPEN


EVENTS = st.lists(
    st.tuples(st.sampled_from(["failed", "succeeded", "cancelled", "started"]), st.floats(0, 4)), max_size=120
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(EVENTS)
def test_it_never_stays_shut_whatever_happens(events):
    breaker, now = Breaker(LIMITS), 0.0
    for name, seconds in events:
        now += seconds
        getattr(breaker, name)(now)
        assert breaker.allows(now + 2 * LIMITS.max_open_seconds)
        assert len(breaker._failures) <= 10
    now += 2 * LIMITS.max_open_seconds
    for _ in range(LIMITS.probes):
        assert breaker.allows(now)
        breaker.started(now)
        breaker.succeeded(now)
    assert breaker.position(now) is Position.CLOSED


@pytest.mark.parametrize("fields", [{"failure_rate": 0.0}, {"min_failures": 30}, {"probes": 0}, {"min_failures": 0}])
def test_limits_that_make_no_sense_are_refused(fields):
    with pytest.raises(ValueError, match="never open or close"):
        BreakerLimits(**fields)
