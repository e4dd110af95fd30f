"""How many prompts are kept open: Little's law, its bounds, and what it does to a simulated loop."""

import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reflux_trainer.in_flight import InFlight

SECONDS = st.floats(0.0, 1e6)


@given(st.lists(st.tuples(st.lists(SECONDS, max_size=20), SECONDS), max_size=20), st.integers(1, 64), st.integers(0, 8))
def test_the_target_stays_between_two_batches_and_the_bound_on_lag(steps, size, max_lag):
    most = (max_lag + 1) * size
    chosen = InFlight(groups_per_step=size, most=most)
    assert chosen.wanted == most
    for latencies, busy in steps:
        chosen.observe(latencies, busy)
        assert min(most, 2 * size) <= chosen.wanted <= most


def test_the_target_is_rate_times_latency_and_two_batches():
    chosen = InFlight(groups_per_step=10, most=1000)
    for _ in range(3):
        chosen.observe([4.0] * 10, 2.0)
    assert chosen.wanted == 10 / 2.0 * 4.0 + 20


def played(in_flight: InFlight, *, size: int, most: int, latency: float, train: float, steps: int = 60):
    """Seconds per step and from issue to training, over the second half of a loop with constant latency.

    A step's prompts stay open until its version is committed, at its end; then new ones are issued.
    """
    now, ready, wanted, told = 0.0, [], most, []
    for _ in range(steps):
        while len(ready) < wanted:
            heapq.heappush(ready, (now + latency, now))
        taken = [heapq.heappop(ready) for _ in range(size)]
        began = max(now, taken[-1][0])
        told.append((began - now + train, sum(began - issued for _, issued in taken) / size))
        now = began + train
        in_flight.observe([latency] * size, train)
        wanted = in_flight.wanted
    half = told[steps // 2 :]
    return sum(seconds for seconds, _ in half) / len(half), sum(age for _, age in half) / len(half)


@pytest.mark.parametrize(("latency", "train"), [(1.0, 1.0), (0.2, 1.0), (3.0, 1.0)])
def test_a_loop_trains_younger_samples_at_the_same_speed(latency, train):
    size, most = 8, 64
    adaptive = played(InFlight(groups_per_step=size, most=most), size=size, most=most, latency=latency, train=train)

    class Most(InFlight):
        wanted = most

    fixed = played(Most(groups_per_step=size, most=most), size=size, most=most, latency=latency, train=train)
    assert adaptive[0] == pytest.approx(fixed[0], rel=0.01)
    assert adaptive[1] < fixed[1]
