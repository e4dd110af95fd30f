"""Figures of merit of a refinement on patterns whose answers are known."""

import numpy as np
import pytest

from reflux_tasks.xrd.rietveld.figures import needs, r_values

ANGLES = np.linspace(20, 60, 2000)


def peaks(places: list[float], width: float = 0.2) -> np.ndarray:
    return np.exp(-((ANGLES[:, None] - np.array(places)) ** 2) / (2 * width**2)).sum(axis=1)


def scan(height: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Counts, calculated pattern and parts [2, points] of a main and a minor phase whose peaks are a little narrower
    than the model's."""
    main, minor = [25.0, 33.0, 41.0, 55.0], [28.0, 47.0]
    expected = height * (0.1 + peaks(main, 0.19) + 0.15 * peaks(minor, 0.19))
    parts = height * np.array([peaks(main), 0.15 * peaks(minor)])
    return np.random.default_rng(0).poisson(expected).astype(float), height * 0.1 + parts.sum(axis=0), parts


def test_needs_hardly_depend_on_the_counting_time() -> None:
    short, long = (needs(*scan(height)) for height in (2000.0, 32_000.0))
    assert long[0] > long[1] > 0.12
    assert short[1] == pytest.approx(long[1], rel=0.3)
    assert short[0] == pytest.approx(long[0], rel=0.3)


def test_a_phase_that_mends_the_shape_of_another_is_not_needed() -> None:
    counts, calculated, parts = scan(12_800.0)
    mending = np.vstack([parts, -0.03 * parts[0] + 400 * peaks([25.0, 33.0], 0.15)])
    assert needs(counts, calculated - parts.sum(axis=0) + mending.sum(axis=0), mending)[2] < 0.12


def test_one_phase_is_needed_by_all_that_it_explains() -> None:
    counts, calculated, parts = scan(400.0)
    background, only = calculated - parts.sum(axis=0), parts.sum(axis=0)[None]
    weights = 1 / (np.maximum(counts, 1) + (0.2 * only[0]) ** 2)
    left, right = (float((weights * (counts - each) ** 2).sum()) for each in (background, calculated))
    assert needs(counts, calculated, only) == [pytest.approx(left / right - 1)]


def test_r_values_follow_their_definitions() -> None:
    counts, calculated, _ = scan(400.0)
    found = r_values(counts, calculated, np.full_like(counts, 40.0), free=10)
    weights = 1 / np.maximum(counts, 1)
    misfit = (weights * (counts - calculated) ** 2).sum()
    assert found["r_wp"] == pytest.approx(np.sqrt(misfit / (weights * counts**2).sum()))
    assert found["r_wb"] == pytest.approx(np.sqrt(misfit / (weights * (counts - 40) ** 2).sum()))
    assert found["goodness"] == pytest.approx(np.sqrt(misfit / (len(counts) - 10)))
