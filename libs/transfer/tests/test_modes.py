import pytest
from hypothesis import given
from hypothesis import strategies as st

from reflux_transfer.modes import Budget, NotEnoughMemory, choose_mode

MB = 10**6


@pytest.mark.parametrize(
    ("budget", "wanted", "mode", "sentence"),
    [
        (
            Budget(269 * MB, 4096 * MB, 512 * MB),
            "auto",
            "swap",
            "2 x 269 MB + KV 512 MB = 1050 MB <= 4096 MB free: swap",
        ),
        (
            Budget(269 * MB, 1050 * MB, 512 * MB),
            "auto",
            "swap",
            "2 x 269 MB + KV 512 MB = 1050 MB <= 1050 MB free: swap",
        ),
        (
            Budget(269 * MB, 1049 * MB, 512 * MB),
            "auto",
            "in_place",
            "2 x 269 MB + KV 512 MB = 1050 MB > 1049 MB free: no swap; "
            "1 x 269 MB + KV 512 MB = 781 MB <= 1049 MB free: in_place",
        ),
        (Budget(MB, 9 * MB), "in_place", "in_place", "1 x 1 MB + KV 0 MB = 1 MB <= 9 MB free: in_place"),
    ],
)
def test_the_mode_follows_the_budget_and_says_why(budget: Budget, wanted, mode: str, sentence: str) -> None:
    choice = choose_mode(budget, wanted)
    assert (choice.mode, choice.sentence) == (mode, sentence)
    assert choice.buffers == {"swap": 2, "in_place": 1}[mode]


def test_a_mode_that_does_not_fit_is_refused_with_its_arithmetic() -> None:
    with pytest.raises(NotEnoughMemory, match=r"2 x 8 MB .* > 15 MB free: no swap"):
        choose_mode(Budget(8 * MB, 15 * MB), "swap")
    with pytest.raises(MemoryError, match=r"no swap; 1 x 8 MB .* > 7 MB free: no in_place"):
        choose_mode(Budget(8 * MB, 7 * MB))


@given(st.integers(1, 10**9), st.integers(0, 10**10), st.integers(0, 10**9))
def test_what_is_chosen_fits(weights: int, free: int, cache: int) -> None:
    budget = Budget(weights, free, cache)
    if weights + cache > free:
        with pytest.raises(NotEnoughMemory):
            choose_mode(budget)
    else:
        choice = choose_mode(budget)
        assert choice.buffers * weights + cache <= free
        assert (choice.mode == "swap") == (2 * weights + cache <= free)
