"""One-port schedules: valid, near the bound, near the optimum where that can be enumerated."""

import itertools
from collections.abc import Iterable
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from reflux_weightplan.expand import Expander
from reflux_weightplan.mesh import Cut, Mesh, Placement
from reflux_weightplan.plan import PlanOptions, plan
from reflux_weightplan.schedule import list_schedule
from reflux_weightplan.spec import SpecLayout, TensorSpec


def bound(seconds: np.ndarray) -> float:
    return max(seconds.sum(axis=0).max(), seconds.sum(axis=1).max())


def check_no_port_does_two_things(seconds: np.ndarray, start: np.ndarray) -> None:
    assert (np.isnan(start) == (seconds == 0)).all()
    for times, lengths in [*zip(start, seconds, strict=True), *zip(start.T, seconds.T, strict=True)]:
        order = np.argsort(times)[: np.count_nonzero(lengths)]
        ends = times[order] + lengths[order]
        assert (times[order][1:] >= ends[:-1] - 2e-7).all()


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.randoms(use_true_random=False))
def test_schedules_are_valid_and_within_twice_the_bound(sources: int, targets: int, random: Random) -> None:
    seconds = np.array([[random.choice((0.0, 0.0, random.random())) for _ in range(targets)] for _ in range(sources)])
    start, makespan = list_schedule(seconds)
    check_no_port_does_two_things(seconds, start)
    assert np.nanmax(start + seconds, initial=0.0) <= makespan + 1e-9
    assert bound(seconds) - 1e-9 <= makespan <= 2 * bound(seconds) + 1e-6


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=6, max_size=6))
def test_small_schedules_are_near_the_best_of_all_orders(lengths: list[int]) -> None:
    seconds = np.array(lengths, float).reshape(2, 3)
    best = min(greedy(seconds, order) for order in itertools.permutations(np.ndindex(2, 3)))
    assert list_schedule(seconds)[1] <= 1.34 * best + 1e-6


def greedy(seconds: np.ndarray, order: Iterable[tuple[int, ...]]) -> float:
    source, target = [0.0] * seconds.shape[0], [0.0] * seconds.shape[1]
    for left, right in order:
        source[left] = target[right] = max(source[left], target[right]) + seconds[left, right]
    return max(*source, *target)


def test_the_order_of_enumeration_would_be_many_times_slower() -> None:
    seconds = np.random.default_rng(0).uniform(0.9, 1.1, (32, 48))
    start, makespan = list_schedule(seconds)
    check_no_port_does_two_things(seconds, start)
    assert makespan <= 1.02 * bound(seconds)
    assert greedy(seconds, np.ndindex(32, 48)) > 1.5 * bound(seconds)


def test_transfers_keep_to_the_schedule_so_that_no_two_ranks_begin_at_one_source() -> None:
    shape, sharded = (64, 1 << 10), Placement((Cut(0, "f", "chunk"),))
    tensors = [TensorSpec(f"w{index}", shape, "float32", sharded, index) for index in range(3)]
    source = SpecLayout(Mesh((("f", 4),)), tuple(tensors))
    target = SpecLayout(Mesh((("replica", 4),)), tuple(TensorSpec(each.name, shape, "float32") for each in tensors))
    made = plan(source, target, PlanOptions(relay="direct"))
    assert made.schedule is not None
    orders = [list(dict.fromkeys(Expander(made).transfers(rank).rows["source_rank"].tolist())) for rank in range(4)]
    assert sorted(order[0] for order in orders) == [0, 1, 2, 3]
    assert orders == [np.argsort(made.schedule.start_SD[:, rank]).tolist() for rank in range(4)]
