import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr

from reflux_sandbox.ladder.calibration import Record, TrustLimits, figures, is_trusted, rank_correlation

REWARDS = st.lists(st.tuples(st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0]), st.floats(0, 1)), min_size=3, max_size=30)


def window(pairs, **changes):
    return [Record(cheap=cheap, lead=0.0, full=full, **changes) for cheap, full in pairs]


@given(REWARDS)
@settings(max_examples=20, deadline=None)
def test_equal_weights_give_spearmans_coefficient(pairs):
    cheap, full = np.array(pairs).T
    ours = rank_correlation(cheap, full, np.full(len(pairs), 3.0))
    if np.ptp(cheap) == 0 or np.ptp(full) == 0:
        assert math.isnan(ours)
    else:
        assert ours == pytest.approx(spearmanr(cheap, full).statistic, abs=1e-9)


def test_a_weight_of_two_is_the_pair_twice():
    pairs = [(0.1, 0.3), (0.5, 0.2), (0.9, 0.8), (0.4, 0.4)]
    twice = figures([*window(pairs), *window(pairs[:1])])
    weighted = figures([*window(pairs[:1], weight=2.0), *window(pairs[1:])])
    assert weighted.rank_correlation == pytest.approx(twice.rank_correlation)
    assert weighted.bias == pytest.approx(twice.bias)


def test_inverse_probabilities_undo_a_selection_by_value():
    dice = np.random.default_rng(7)
    cheap = dice.random(20_000)
    full = np.clip(cheap - 0.3 * (cheap > 0.6), 0, 1)  # flatters the good ones by 0.3
    chosen = (cheap < 0.5) | (dice.random(cheap.size) < 0.1)  # the good ones are seen in the audit only
    weights = np.where(cheap < 0.5, 1.0, 10.0)
    seen = [
        Record(cheap=c, lead=0.0, full=f if there else None, weight=w)
        for c, f, w, there in zip(cheap, full, weights, chosen, strict=True)
    ]
    truth = float((cheap - full).mean())
    assert figures(seen).bias == pytest.approx(truth, abs=0.01)
    naive = float((cheap - full)[chosen].mean())
    assert abs(naive - truth) > 0.05


def test_coverage_counts_samples_and_skipped_ones_have_no_pair():
    known = figures(
        [Record(cheap=0.5, lead=0, copies=3, full=0.4, predicted=(0.0, 0.4)), Record(cheap=0.1, lead=0, copies=1)]
    )
    assert (known.pairs, known.coverage, known.interval_coverage) == (1, 0.75, 1.0)


def test_an_empty_window_says_nothing():
    known = figures([])
    assert (known.pairs, known.effective_pairs) == (0, 0.0)
    assert all(math.isnan(value) for value in (known.bias, known.rank_correlation, known.coverage, known.spread))
    assert not is_trusted(True, known, TrustLimits())


def test_trust_has_hysteresis_and_a_minimum():
    dice = np.random.default_rng(3)
    cheap = dice.random(200)
    between = figures(window(list(zip(cheap, cheap + dice.normal(0, 0.5, 200), strict=True))))
    limits = TrustLimits(enter=0.6, leave=0.35)
    assert limits.leave < between.rank_correlation < limits.enter
    assert is_trusted(True, between, limits)
    assert not is_trusted(False, between, limits)
    assert not is_trusted(True, figures(window([(0.1, 0.1), (0.5, 0.5)])), limits)
    with pytest.raises(ValueError, match="leave <= enter"):
        TrustLimits(enter=0.2, leave=0.3)
