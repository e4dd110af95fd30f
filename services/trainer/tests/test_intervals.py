"""Confidence intervals against scipy, and their coverage."""

import numpy as np
import pytest
from scipy import stats

from reflux_trainer.intervals import mean_interval, share_interval


@pytest.mark.parametrize(("hits", "count"), [(0, 1), (0, 12), (5, 12), (12, 12), (201, 400)])
def test_the_interval_of_a_share_is_wilsons(hits: int, count: int) -> None:
    expected = stats.binomtest(hits, count).proportion_ci(method="wilson")
    assert share_interval(hits, count) == pytest.approx((expected.low, expected.high), abs=1e-9)


@pytest.mark.parametrize("count", [2, 3, 4, 5, 9, 40, 400])
def test_the_interval_of_a_mean_is_students(count: int) -> None:
    values = np.random.default_rng(count).random(count).tolist()
    expected = stats.t.interval(0.95, count - 1, np.mean(values), stats.sem(values))
    assert mean_interval(values) == pytest.approx(expected, abs=1e-12)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    draws = np.random.default_rng(3).beta(0.5, 0.5, (2000, 64))
    covered = [low <= 0.5 <= high for low, high in map(mean_interval, draws.tolist())]
    assert 0.93 <= np.mean(covered) <= 0.97
