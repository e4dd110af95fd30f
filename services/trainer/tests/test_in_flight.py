"""How many prompts are kept open: Little's law, its bounds, and what it does to a simulated loop."""

import heapq
import itertools
from collections.abc import Callable, Iterator

import numpy as np
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


def played(in_flight: InFlight, *, size: int, most: int, latencies: Iterator[float], train: float, steps: int):
    """Seconds per step and from issue to training, over the second half of a loop.

    A step's prompts stay open until its version is committed, at its end; then new ones are issued.
    """
    now, ready, wanted, told = 0.0, [], most, []
    for _ in range(steps):
        while len(ready) < wanted:
            heapq.heappush(ready, (now + next(latencies), now))
        taken = [heapq.heappop(ready) for _ in range(size)]
        began = max(now, taken[-1][0])
        told.append((began - now + train, sum(began - issued for _, issued in taken) / size))
        now = began + train
        in_flight.observe([end - issued for end, issued in taken], train)
        wanted = in_flight.wanted
    half = told[steps // 2 :]
    return sum(seconds for seconds, _ in half) / len(half), sum(age for _, age in half) / len(half)


class Most(InFlight):
    """Keeps all prompts open that the bound on lag allows."""

    @property
    def wanted(self) -> int:
        return self._most


def compared(draw: Callable[[], Iterator[float]], train: float, steps: int = 60):
    """Seconds per step and age, of the adaptive loop and of the full one, on the same draws."""
    size, most = 8, 64
    kinds = (InFlight(groups_per_step=size, most=most), Most(groups_per_step=size, most=most))
    return [played(kind, size=size, most=most, latencies=draw(), train=train, steps=steps) for kind in kinds]


@pytest.mark.parametrize(("latency", "train"), [(1.0, 1.0), (0.2, 1.0), (3.0, 1.0)])
def test_a_loop_trains_younger_samples_at_the_same_speed(latency, train):
    adaptive, fixed = compared(lambda: itertools.repeat(latency), train)
    assert adaptive[0] == pytest.approx(fixed[0], rel=0.01)
    assert adaptive[1] < fixed[1]


@pytest.mark.parametrize("median", [0.2, 1.0, 2.0])
def test_long_tailed_latencies_cost_a_trainer_that_is_the_bottleneck_little(median):
    """Log-normal with a 99th percentile of twenty medians, as verifications of make bench-rl."""

    def draws() -> Iterator[float]:
        random = np.random.default_rng(5)
        while True:
            yield median * float(np.exp(random.normal(0.0, np.log(20.0) / 2.326)))

    adaptive, fixed = compared(draws, train=1.0, steps=600)
    told = ("step", adaptive[0], fixed[0], "age", adaptive[1], fixed[1])
    print(f"median {median}:", *told)
    assert adaptive[0] <= 1.1 * fixed[0]
    assert adaptive[1] <= fixed[1]
