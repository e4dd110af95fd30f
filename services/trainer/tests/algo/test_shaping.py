"""Penalties, KL estimators, off-policy weights and aggregation: vectors worked out by hand from
the formulas that the modules of `algo` name."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reflux_trainer.algo.aggregation import AGGREGATIONS, Aggregation, token_weights
from reflux_trainer.algo.corrections import effective_sample_share, importance_weights, masked, truncated
from reflux_trainer.algo.grpo import grpo_advantages
from reflux_trainer.algo.kl import kl_estimate, penalised_rewards
from reflux_trainer.algo.overlong import overlong_penalty
from reflux_trainer.algo.rewards import has_signal

OLD, SAMPLER = np.array([-1, -1.5, -0.5]), np.array([-1.5, -1, -1.5])
ALL = np.ones(3, bool)


def close(actual: object, expected: object) -> None:
    np.testing.assert_allclose(actual, expected, atol=2e-6)


def test_overlong_vectors_with_and_without_floor() -> None:
    lengths, rewards = np.array([10, 22, 25, 30]), np.array([1, 0.8, 0.6, 0.4])
    settings = {"max_length": 25, "buffer": 5, "factor": 0.5}
    close(rewards + overlong_penalty(lengths, floor=False, **settings), [1, 0.6, 0.1, -0.6])
    close(rewards + overlong_penalty(lengths, floor=True, **settings), [1, 0.6, 0.1, -0.1])


def test_overlong_vector_of_the_paper() -> None:
    lengths = np.array([16384, 17408, 18432, 20480, 20481])
    close(overlong_penalty(lengths, max_length=20480, buffer=4096), [0, -0.25, -0.5, -1, -1])


def test_shaping_must_not_revive_an_all_correct_group() -> None:
    raw = np.ones(4)
    shaped = raw + overlong_penalty(np.array([10, 20, 24, 25]), max_length=25, buffer=5)
    assert has_signal(shaped)
    assert not has_signal(raw)
    assert grpo_advantages(shaped).any()


def test_kl_vectors() -> None:
    logprobs, reference = np.full(3, -1.0), np.array([0.0, -15, -30])
    close(kl_estimate(logprobs, reference, "k1"), [-1, 14, 29])
    close(kl_estimate(logprobs, reference, "k2"), [0.5, 98, 420.5])
    close(kl_estimate(logprobs, reference, "k3"), [0.718282, 13.000001, 28])


def test_kl_as_a_reward_costs_every_token_and_pays_the_last() -> None:
    rewards = penalised_rewards(2.0, np.array([-1.0, -2, -1]), np.array([-1.5, -1, -1]), 0.1, "k1")
    close(rewards, [-0.05, 0.1, 2.0])


@given(st.floats(-1e4, 1e4), st.floats(-1e4, 1e4))
def test_k3_is_never_negative_and_never_overflows(logprob: float, reference: float) -> None:
    estimate = kl_estimate(np.array([logprob]), np.array([reference]), "k3")
    assert np.isfinite(estimate).all()
    assert (estimate >= 0).all()


def test_tis_vectors() -> None:
    close(truncated(importance_weights(OLD, SAMPLER, ALL), 2.0), [1.648721, 0.606531, 2.0])
    close(truncated(importance_weights(OLD, SAMPLER, ALL, "sequence"), 5.0), [2.718282] * 3)
    middle_masked = np.array([True, False, True])
    close(truncated(importance_weights(OLD, SAMPLER, middle_masked, "sequence"), 5.0), [4.481689] * 3)


def test_tis_sequence_cap_vector() -> None:
    weights = importance_weights(np.full(3, -1.0), np.full(3, -2.0), ALL, "sequence")
    close(weights, [20.085537] * 3)
    close(truncated(weights, 5.0), [5.0] * 3)


def test_mis_vector() -> None:
    close(masked(importance_weights(OLD, SAMPLER, ALL), 0.5, 2.0), [1.648721, 0.606531, 0])


@given(st.lists(st.floats(-20, 0), min_size=1, max_size=6), st.sampled_from(["token", "sequence"]))
def test_equal_policies_need_no_correction(logprobs: list[float], level: str) -> None:
    values = np.array(logprobs)
    weights = importance_weights(values, values, np.ones(values.size, bool), level)  # type: ignore[arg-type]
    close(truncated(weights, 2.0), np.ones(values.size))
    close(masked(weights, 0.5, 2.0), np.ones(values.size))
    assert effective_sample_share(weights) == pytest.approx(1.0)


def test_one_dominating_weight_shrinks_the_effective_sample() -> None:
    assert effective_sample_share(np.array([1.0, 0, 0, 0])) == pytest.approx(0.25)
    assert effective_sample_share(np.zeros(3)) == 0.0


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_mean", 1.333333),
        ("sequence_mean", 1.5),
        ("constant", 1.0),
        ("sum", 8.0),
        ("sequence_mean_token_sum", 4.0),
    ],
)
def test_aggregation_vectors(mode: Aggregation, expected: float) -> None:
    losses = [np.ones(4), np.full(2, 2.0)]
    weights = token_weights([np.ones(4, bool), np.ones(2, bool)], mode, constant_length=4)
    close(sum(float(w @ loss) for w, loss in zip(weights, losses, strict=True)), expected)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_an_empty_mask_gives_zero_weights(mode: Aggregation) -> None:
    for weights in token_weights([np.zeros(3, bool), np.zeros(0, bool)], mode, constant_length=4):
        assert not weights.any()


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_a_masked_member_counts_as_an_absent_one(mode: Aggregation) -> None:
    alone = token_weights([np.ones(4, bool)], mode, constant_length=4)
    beside = token_weights([np.ones(4, bool), np.zeros(3, bool)], mode, constant_length=4)
    close(beside[0], alone[0])


def test_a_constant_denominator_needs_its_length() -> None:
    with pytest.raises(ValueError, match="constant_length"):
        token_weights([np.ones(2, bool)], "constant")
