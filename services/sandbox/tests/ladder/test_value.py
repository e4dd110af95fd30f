import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reflux_sandbox.ladder.calibration import Record
from reflux_sandbox.ladder.value import (
    ATOMS,
    ESTIMATORS,
    Forecaster,
    Outlook,
    advantages,
    expected_error,
    gains,
    leads,
    settled,
)

ATOM_LISTS = st.lists(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]), min_size=1, max_size=4)
GROUPS = st.lists(st.tuples(ATOM_LISTS, st.integers(1, 4)), min_size=1, max_size=5)


def outlook(values, copies=1):
    return Outlook(np.resize(np.sort(np.array(values, dtype=float)), ATOMS), copies)


def group_of(rows):
    return [outlook(values, copies) for values, copies in rows]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(rows=GROUPS)
@settings(max_examples=20, deadline=None)
def test_value_is_never_negative_and_known_answers_have_none(estimator, rows):
    group = group_of(rows)
    worth = gains(group, estimator)
    assert all(gain >= 0 for gain in worth)
    assert all(gain == 0 for gain, each in zip(worth, group, strict=True) if each.known)
    assert expected_error(group, estimator) >= 0


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(rows=GROUPS, data=st.data())
@settings(max_examples=20, deadline=None)
def test_the_order_of_a_group_does_not_matter(estimator, rows, data):
    group = group_of(rows)
    order = data.draw(st.permutations(range(len(group))))
    turned = [group[position] for position in order]
    worth = gains(group, estimator)
    assert gains(turned, estimator) == pytest.approx([worth[position] for position in order], abs=1e-9)
    assert expected_error(turned, estimator) == pytest.approx(expected_error(group, estimator), abs=1e-9)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_decided_group_is_worth_nothing(estimator):
    alike = [outlook([0.0, 1.0], copies=8)]  # eight equal answers: whatever they get, nobody is better
    assert gains(alike, estimator) == [0.0]
    assert expected_error(alike, estimator) == 0.0
    known = [settled(0.0, 3), settled(1.0, 5)]
    assert gains(known, estimator) == [0.0, 0.0]
    assert expected_error(known, estimator) == 0.0


@given(rows=st.lists(st.tuples(st.floats(0, 1), st.integers(1, 4)), min_size=2, max_size=5), first=st.floats(0.01, 1))
@settings(max_examples=20, deadline=None)
def test_value_grows_with_the_spread_of_the_forecast(rows, first):
    shape = np.linspace(-1, 1, ATOMS)

    def worth(spread):
        group = [Outlook(mean + spread * shape, copies) for mean, copies in rows]
        return gains(group, "centred")

    for narrow, wide in zip(worth(first), worth(2 * first), strict=True):
        assert wide == pytest.approx(2 * narrow)
        assert wide > narrow


def test_the_answer_that_may_change_the_order_is_worth_most_under_grpo():
    group = [settled(1.0, 1), outlook([0.0, 1.0]), outlook([0.0, 0.05]), settled(0.0, 5)]
    worth = gains(group, "grpo")
    assert worth[1] > 5 * worth[2] > 0


def test_advantages_are_those_of_the_trainer_by_the_sheets_vectors():
    ones = np.ones(4, dtype=int)
    grpo = advantages(np.array([[1.0, 0.5, 0.0, 0.0]]), ones, "grpo")[0]
    assert grpo == pytest.approx([1.305582, 0.261116, -0.783349, -0.783349], abs=1e-5)
    assert advantages(np.array([[1.0, 0.5, 0.0, 0.0]]), ones, "centred")[0] == pytest.approx(
        [0.625, 0.125, -0.375, -0.375]
    )
    pooled = advantages(np.array([[1.0, 0.5, 0.0]]), np.array([1, 1, 2]), "grpo")[0]
    assert pooled == pytest.approx(grpo[:3])
    assert advantages(np.full((1, 4), 0.3), ones, "grpo")[0] == pytest.approx(np.zeros(4))


def test_a_forecast_is_what_near_answers_got_by_their_weights():
    far = [Record(cheap=0.0, lead=0.0, full=0.0, cpu_seconds=9.0) for _ in range(8)]
    near = [Record(cheap=0.9, lead=0.2, full=1.0, cpu_seconds=1.0) for _ in range(7)]
    rare = Record(cheap=0.9, lead=0.2, full=0.0, weight=7.0, cpu_seconds=3.0)
    forecast = Forecaster([*far, *near, rare]).outlook(0.9, 0.2, 2)
    assert forecast.estimate == pytest.approx(0.5)
    assert forecast.cpu_seconds == pytest.approx(2.0)
    assert forecast.interval == (0.0, 1.0)
    assert forecast.copies == 2
    with pytest.raises(ValueError, match="no pair"):
        Forecaster([Record(cheap=0.5, lead=0.0)]).outlook(0.5, 0.0, 1)


def test_the_lead_is_over_the_best_of_the_others():
    assert leads([0.9, 0.5, 0.9, 0.1]) == pytest.approx([0.0, -0.4, 0.0, -0.8])
    assert leads([0.7, 0.2]) == pytest.approx([0.5, -0.5])
    assert leads([0.4]) == [0.0]
