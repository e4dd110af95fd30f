import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reflux_sandbox.report import correlate, to_report


def moments(lengths, late):
    x = [math.log1p(length) for length in lengths]
    pairs = list(zip(x, late, strict=True))
    return len(x), sum(late), sum(x), sum(v * v for v in x), sum(v for v, is_late in pairs if is_late)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10_000), st.booleans()), min_size=10, max_size=200))
def test_the_correlation_from_sums_is_that_of_the_answers(rows):
    lengths, late = [row[0] for row in rows], [row[1] for row in rows]
    found = correlate(*moments(lengths, late))
    if len(set(late)) == 2 and len(set(lengths)) > 1:
        expected = np.corrcoef(np.log1p(lengths), np.array(late, dtype=float))[0, 1]
        assert found.r == pytest.approx(expected, abs=1e-5)
    else:
        assert (found.r, found.suspicious) == (0.0, False)


def test_timeouts_of_long_answers_are_flagged_and_those_by_chance_are_not():
    dice = random.Random(1)
    lengths = [dice.randrange(10, 2000) for _ in range(400)]
    by_length = correlate(*moments(lengths, [length > 1500 for length in lengths]))
    by_chance = correlate(*moments(lengths, [dice.random() < 0.2 for _ in lengths]))
    short_ones = correlate(*moments(lengths, [length < 300 for length in lengths]))
    assert by_length.suspicious
    assert by_length.p_value < 1e-6
    assert not by_chance.suspicious
    assert not short_ones.suspicious
    assert short_ones.r < 0


def test_few_timeouts_flag_nothing():
    lengths = [10] * 96 + [5000] * 4
    assert not correlate(*moments(lengths, [length > 10 for length in lengths])).suspicious


def test_p_values_of_chance_are_spread_evenly():
    dice = np.random.default_rng(3)
    values = [
        correlate(*moments(dice.integers(1, 1000, 60).tolist(), (dice.random(60) < 0.3).tolist())).p_value
        for _ in range(400)
    ]
    assert 0.02 <= np.mean(np.array(values) < 0.05) <= 0.09


def test_an_unknown_run_has_an_empty_report():
    report = to_report({})
    assert (sum(report.outcomes.values()), report.executed, report.lengths.answers) == (0, 0, 0)
