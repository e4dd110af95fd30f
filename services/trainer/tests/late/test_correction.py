import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reflux_trainer.algo.registry import ADVANTAGES, ALGORITHMS
from reflux_trainer.late.correction import (
    CorrectionPolicy,
    Provisional,
    correct,
    correction_weights,
    scaled,
)

REWARDS = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=3, max_size=8)


def provisional(rewards, algorithm="grpo", version=5):
    values = ADVANTAGES[algorithm](np.array(rewards, dtype=float))
    return Provisional(index=1, oldest_version=version, advantages_G=values)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(pairs=REWARDS)
@settings(max_examples=20, deadline=None)
def test_provisional_and_correction_add_up_to_what_the_final_rewards_teach(algorithm, pairs):
    released, final = np.array(pairs).T
    policy = CorrectionPolicy(algorithm=algorithm, least_change=0.0)
    group = provisional(released, algorithm)
    change = correct(group, final, 5, policy)
    assert group.advantages_G + change == pytest.approx(ADVANTAGES[algorithm](final), abs=1e-9)


def test_a_late_reward_beyond_the_lag_bound_is_dropped_by_name():
    policy = CorrectionPolicy(max_lag=4)
    final = np.array([1.0, 0.0, 0.0])
    assert correct(provisional([0, 1, 0], version=5), final, 10, policy) == "too_old"
    assert isinstance(correct(provisional([0, 1, 0], version=5), final, 9, policy), np.ndarray)


def test_equal_lessons_are_not_repeated_and_unknown_rewards_teach_nothing():
    policy = CorrectionPolicy()
    assert correct(provisional([0.1, 0.5, 0.9]), np.array([0.2, 0.6, 1.0]), 5, policy) == "unchanged"
    assert correct(provisional([0, 1, 0]), np.array([1.0, np.nan, np.nan]), 5, policy) == "unknown"


def test_a_member_without_a_final_reward_is_left_as_it_was_trained():
    group = provisional([0.0, 1.0, 0.0, 0.5])
    change = correct(group, np.array([1.0, np.nan, 0.0, 0.0]), 5, CorrectionPolicy())
    others = ADVANTAGES["grpo"](np.array([1.0, 0.0, 0.0])) - group.advantages_G[[0, 2, 3]]
    assert change[1] == 0.0
    assert change[[0, 2, 3]] == pytest.approx(others)


def test_a_group_that_was_filtered_is_taught_in_full_when_its_final_rewards_differ():
    untrained = Provisional(index=1, oldest_version=5, advantages_G=np.zeros(3))
    final = np.array([1.0, 0.0, 0.0])
    assert correct(untrained, final, 5, CorrectionPolicy()) == pytest.approx(ADVANTAGES["grpo"](final))


def test_a_token_of_a_correction_counts_as_much_as_one_of_the_batch():
    (change,) = scaled([np.array([1.0, -1.0])], tokens=10, batch_tokens=40)
    mean_over_own = change * 3 / 10  # three tokens of each answer under a mean over ten
    assert mean_over_own == pytest.approx(np.array([1.0, -1.0]) * 3 / 40)


def test_weights_are_truncated_and_one_where_nothing_has_changed():
    policy = CorrectionPolicy(cap=2.0)
    same = np.array([-1.0, -2.0])
    assert correction_weights(same, same, policy) == pytest.approx([1.0, 1.0])
    assert correction_weights(np.array([-1.0, -1.5, -0.5]), np.array([-1.5, -1.0, -1.5]), policy) == pytest.approx(
        [1.648721, 0.606531, 2.0], abs=1e-6
    )
    with pytest.raises(ValueError, match="cap > 0"):
        CorrectionPolicy(cap=0.0)
