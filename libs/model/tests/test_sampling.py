"""Distribution, truncation and reproducibility of the sampler."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reflux_model.sampling import SamplingParams, _invert, sample, seeds_tensor, top_logprobs, uniform_numbers

LOGITS = torch.tensor([2.0, 0.5, 1.0, -1.0, 0.0])


def _draw(count: int, **settings_: float) -> torch.Tensor:
    params = SamplingParams.uniform(list(range(count)), **settings_)
    return sample(LOGITS.expand(count, -1), params, torch.full((count,), 7)).tokens_B


def test_frequencies_follow_the_softmax() -> None:
    drawn = torch.bincount(_draw(20_000), minlength=5) / 20_000
    torch.testing.assert_close(drawn, LOGITS.softmax(-1), atol=0.012, rtol=0)


def test_temperature_sharpens() -> None:
    drawn = torch.bincount(_draw(20_000, temperature=0.5), minlength=5) / 20_000
    torch.testing.assert_close(drawn, (LOGITS / 0.5).softmax(-1), atol=0.012, rtol=0)


def test_top_k_keeps_the_k_best() -> None:
    assert set(_draw(500, top_k=2).tolist()) == {0, 2}


def test_top_p_keeps_the_smallest_head_that_reaches_the_mass() -> None:
    best = float(LOGITS.softmax(-1).max())
    assert set(_draw(500, top_p=best - 0.01).tolist()) == {0}
    assert set(_draw(500, top_p=best + 0.01).tolist()) == {0, 2}


def test_min_p_keeps_what_is_likely_enough_beside_the_best() -> None:
    ratio = float((LOGITS[2] - LOGITS[0]).exp())  # the second best token's
    assert set(_draw(500, min_p=ratio - 0.01).tolist()) == {0, 2}
    assert set(_draw(500, min_p=ratio + 0.01).tolist()) == {0}
    assert set(_draw(500, min_p=1.0).tolist()) == {0}


def test_min_p_comes_after_temperature_and_before_top_p() -> None:
    ratio = float(((LOGITS[2] - LOGITS[0]) / 2.0).exp())
    assert set(_draw(500, min_p=ratio - 0.01, temperature=2.0).tolist()) == {0, 2}
    share = 1 / (1 + float((LOGITS[2] - LOGITS[0]).exp()))  # the best token's among the two that min-p leaves
    assert set(_draw(500, min_p=0.3, top_p=share - 0.01).tolist()) == {0}
    assert set(_draw(500, min_p=0.3, top_p=share + 0.01).tolist()) == {0, 2}


def test_draws_over_a_large_vocabulary_are_those_of_one_running_sum() -> None:
    logits = 3 * torch.randn(64, 1000, generator=torch.Generator().manual_seed(4))
    params = SamplingParams.uniform(list(range(64)))
    positions = torch.full((64,), 7)
    drawn = sample(logits, params, positions).tokens_B
    cumulative = logits.double().softmax(-1).cumsum(-1)
    wanted = uniform_numbers(params.seeds_B, positions)[:, None]
    low = cumulative.gather(-1, (drawn - 1).clamp_min(0)[:, None]) * (drawn > 0)[:, None]
    assert bool((low <= wanted + 1e-6).all())
    assert bool((cumulative.gather(-1, drawn[:, None]) >= wanted - 1e-6).all())
    assert len(set(drawn.tolist())) > 20


def test_a_token_that_is_cut_off_is_never_drawn_whatever_the_random_number() -> None:
    logits = torch.zeros(1, 600)
    logits[0, [3, 300, 301]] = 9.0
    for uniform in (0.0, 1 / 3, 2 / 3, 1 - 2.0**-53):
        weights = (logits == 9.0).float()
        drawn = _invert(weights, torch.tensor([uniform], dtype=torch.float64))
        assert int(drawn) in (3, 300, 301)


def test_a_temperature_near_zero_is_greedy() -> None:
    assert set(_draw(50, temperature=1e-30).tolist()) == {0}


def test_zero_temperature_is_greedy_and_keeps_plain_logprobs() -> None:
    out = sample(LOGITS[None], SamplingParams.uniform([3], temperature=0.0), torch.tensor([0]))
    assert out.tokens_B.tolist() == [0]
    assert out.logprobs_B[0] == pytest.approx(float(LOGITS.log_softmax(-1)[0]))


def test_logprobs_are_those_of_the_plain_distribution() -> None:
    out = sample(LOGITS[None], SamplingParams.uniform([3], temperature=2.0, top_k=1), torch.tensor([0]))
    assert out.logprobs_B[0] == pytest.approx(float(LOGITS.log_softmax(-1)[0]))


@settings(max_examples=50, deadline=None)
@given(
    seeds=st.lists(st.integers(-(2**63), 2**64 - 1), min_size=2, max_size=5),
    position=st.integers(0, 10_000),
    temperature=st.floats(0.1, 3.0),
    top_k=st.integers(0, 7),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 1.0),
)
def test_a_row_does_not_depend_on_its_neighbours(
    seeds: list[int], position: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = torch.randn(len(seeds), 7, generator=torch.Generator().manual_seed(position))
    rows = len(seeds)
    mixed = SamplingParams(
        torch.tensor([temperature] + [1.0] * (rows - 1)),
        torch.tensor([top_k] + [0] * (rows - 1)),
        torch.tensor([top_p] + [1.0] * (rows - 1)),
        torch.tensor([min_p] + [0.0] * (rows - 1)),
        seeds_tensor(seeds),
    )
    together = sample(logits, mixed, torch.full((rows,), position))
    for row in range(rows):
        index = torch.tensor([row])
        alone = sample(logits[index], mixed.rows(index), torch.tensor([position]))
        assert alone.tokens_B[0] == together.tokens_B[row]


def test_the_random_numbers_are_uniform_and_uncorrelated() -> None:
    seeds = torch.arange(200).repeat_interleave(100)
    numbers = uniform_numbers(seeds, torch.arange(100).repeat(200))
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert abs(float(numbers.mean()) - 0.5) < 4 / math.sqrt(12 * 20_000)
    grid = numbers.view(200, 100)
    assert abs(float(torch.corrcoef(torch.stack([grid[:-1].flatten(), grid[1:].flatten()]))[0, 1])) < 0.03
    assert abs(float(torch.corrcoef(torch.stack([grid[:, :-1].flatten(), grid[:, 1:].flatten()]))[0, 1])) < 0.03


def test_top_logprobs_come_best_first() -> None:
    ids, values = top_logprobs(LOGITS[None], 3)
    assert ids.tolist() == [[0, 2, 1]]
    torch.testing.assert_close(values[0], LOGITS.log_softmax(-1)[[0, 2, 1]])
    assert top_logprobs(LOGITS[None], 9)[0].shape == (1, 5)
