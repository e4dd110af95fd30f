"""Advantages: vectors worked out by hand from the formulas that `algo` names, and what every estimator must do."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from reflux_trainer.algo.dr_grpo import dr_grpo_advantages
from reflux_trainer.algo.gae import gae_advantages
from reflux_trainer.algo.grpo import grpo_advantages
from reflux_trainer.algo.leave_one_out import leave_one_out_statistics
from reflux_trainer.algo.registry import ADVANTAGES, ALGORITHMS, Algorithm
from reflux_trainer.algo.reinforce_pp import discounted_returns, reinforce_pp_advantages, whiten
from reflux_trainer.algo.rewards import has_signal
from reflux_trainer.algo.rloo import rloo_advantages

groups = arrays(np.float64, st.integers(2, 9), elements=st.integers(-40, 40).map(lambda value: value / 8))


def close(actual: np.ndarray, expected: list[float]) -> None:
    np.testing.assert_allclose(actual, expected, atol=2e-6)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([6, 3], [3, -3]),
        ([9, 12], [-3, 3]),
        ([1], [0]),
        ([1, 0.5, 0, 0], [0.833333, 0.166667, -0.5, -0.5]),
        ([1, 0, 0, 1], [0.666667, -0.666667, -0.666667, 0.666667]),
    ],
)
def test_rloo_vectors(rewards: list[float], expected: list[float]) -> None:
    close(rloo_advantages(np.array(rewards, float)), expected)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [([6, 3], [1.5, -1.5]), ([9, 12], [-1.5, 1.5]), ([1, 0.5, 0, 0], [0.625, 0.125, -0.375, -0.375])],
)
def test_vectors_without_deviation(rewards: list[float], expected: list[float]) -> None:
    close(dr_grpo_advantages(np.array(rewards, float)), expected)


@pytest.mark.parametrize(
    ("rewards", "ddof", "eps", "expected"),
    [
        ([1, 0, 0, 1], 0, 0.0, [1, -1, -1, 1]),
        ([1, 0, 0, 1], 1, 1e-6, [0.866024, -0.866024, -0.866024, 0.866024]),
        ([1, 0.5, 0, 0], 0, 0.0, [1.507557, 0.301511, -0.904534, -0.904534]),
        ([1, 0.5, 0, 0], 1, 0.0, [1.305582, 0.261116, -0.783349, -0.783349]),
    ],
)
def test_grpo_vectors(rewards: list[float], ddof: int, eps: float, expected: list[float]) -> None:
    close(grpo_advantages(np.array(rewards, float), ddof=ddof, eps=eps), expected)


def test_leave_one_out_vector() -> None:
    means, deviations = leave_one_out_statistics(np.array([1.0, 2, 3]))
    close(means, [2.5, 2, 1.5])
    close(deviations, [0.707107, 1.414214, 0.707107])
    with pytest.raises(ValueError, match="needs 3 members"):
        leave_one_out_statistics(np.array([1.0, 2]))


def test_discounted_return_vector() -> None:
    close(discounted_returns(np.array([1.0, 2, 3]), 0.5), [2.75, 3.5, 3])


def test_whitening_vector() -> None:
    close(whiten(np.array([1.0, 3]), np.array([True, True])), [-0.707107, 0.707107])
    close(whiten(np.array([5.0, 3]), np.array([True, False])), [5, 3])
    close(whiten(np.array([5.0, 3]), np.array([False, False])), [5, 3])


def test_whitening_uses_the_masked_tokens_only() -> None:
    values, mask = np.array([[1.0, 3, 99], [7, 50, 60]]), np.array([[True, True, False], [True, False, False]])
    whitened = whiten(values, mask)[mask]
    assert whitened.mean() == pytest.approx(0, abs=1e-9)
    assert whitened.std(ddof=1) == pytest.approx(1, abs=1e-6)


def test_reinforce_pp_whitens_returns_over_the_whole_batch() -> None:
    advantages = reinforce_pp_advantages([np.array([0.0, 1]), np.array([0.0, 0, 3])], gamma=0.5)
    assert [each.size for each in advantages] == [2, 3]
    flat = np.array([0.5, 1, 0.75, 1.5, 3])
    close(np.concatenate(advantages), list((flat - flat.mean()) / flat.std(ddof=1)))
    assert reinforce_pp_advantages([]) == []


def test_gae_without_decay_is_the_return_minus_the_value() -> None:
    rewards, values = np.array([0.0, 0, 1]), np.array([0.2, 0.4, 0.6])
    close(gae_advantages(rewards, values, gamma=1.0, lam=1.0), [0.8, 0.6, 0.4])
    close(gae_advantages(rewards, values, gamma=1.0, lam=0.0), [0.2, 0.2, 0.4])
    close(gae_advantages(rewards, values, gamma=0.5, lam=1.0, bootstrap_value=2.0), [0.3, 0.6, 1.4])


@pytest.mark.parametrize("name", ALGORITHMS)
@given(rewards=groups, shift=st.integers(-8, 8))
def test_a_constant_added_to_all_rewards_changes_nothing(name: Algorithm, rewards: np.ndarray, shift: int) -> None:
    np.testing.assert_allclose(ADVANTAGES[name](rewards + shift), ADVANTAGES[name](rewards), atol=1e-7)


@given(rewards=groups, factor=st.sampled_from([0.25, 2.0, 8.0]))
def test_scaling_the_rewards(rewards: np.ndarray, factor: float) -> None:
    close(grpo_advantages(rewards * factor, eps=0.0), list(grpo_advantages(rewards, eps=0.0)))
    close(dr_grpo_advantages(rewards * factor), list(factor * dr_grpo_advantages(rewards)))
    close(rloo_advantages(rewards * factor), list(factor * rloo_advantages(rewards)))


@pytest.mark.parametrize("name", ALGORITHMS)
@given(rewards=groups, order=st.randoms(use_true_random=False))
def test_permuting_the_members_permutes_the_advantages(name: Algorithm, rewards: np.ndarray, order: object) -> None:
    permutation = list(range(rewards.size))
    order.shuffle(permutation)  # type: ignore[attr-defined]
    np.testing.assert_allclose(
        ADVANTAGES[name](rewards[permutation]), ADVANTAGES[name](rewards)[permutation], atol=1e-9
    )


@pytest.mark.parametrize("name", ALGORITHMS)
@given(rewards=groups, place=st.integers(0, 9))
def test_an_unknown_reward_counts_as_an_absent_member(name: Algorithm, rewards: np.ndarray, place: int) -> None:
    place = min(place, rewards.size)
    advantages = ADVANTAGES[name](np.insert(rewards, place, np.nan))
    assert advantages[place] == 0
    np.testing.assert_allclose(np.delete(advantages, place), ADVANTAGES[name](rewards), atol=1e-9)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("rewards", [[0.1] * 7, [0.7], [np.nan, np.nan], [np.nan, 0.3], []])
def test_a_group_without_contrast_gets_zeros_and_never_nan(name: Algorithm, rewards: list[float]) -> None:
    np.testing.assert_allclose(ADVANTAGES[name](np.array(rewards, float)), np.zeros(len(rewards)), atol=1e-12)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1.0, 1, 1], False),
        ([0.0, 0], False),
        ([0.0, 0.4], True),
        ([1.0, np.nan, 1], False),
        ([np.nan, 0.2, 0.3], True),
        ([np.nan], False),
        ([0.3], False),
        ([], False),
    ],
)
def test_only_groups_with_two_different_known_rewards_have_signal(rewards: list[float], expected: bool) -> None:
    assert has_signal(np.array(rewards)) is expected
