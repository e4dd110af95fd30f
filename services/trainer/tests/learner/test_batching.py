"""Cuts of a batch: whole, in order, and small enough whatever its size."""

from hypothesis import given
from hypothesis import strategies as st

from reflux_trainer.learner.batching import MAX_ATTENTION_CELLS, MAX_LOGITS, micro_batches, parts_for_scoring
from reflux_trainer.learner.ops import CompletionData, GroupData, LossSpec

LOSS = LossSpec(name="ppo", clip_low=0.2, clip_high=0.2)


def groups_of(sizes: list[list[int]]) -> list[GroupData]:
    """One group per list, one completion per number of tokens; each token id is the number of its completion."""
    number = iter(range(1_000_000))
    return [
        GroupData([1, 2, 3], [CompletionData([next(number)] * size, [-1.0] * size, 1.0, []) for size in group])
        for group in sizes
    ]


@given(
    st.lists(st.lists(st.integers(1, 3000), min_size=1, max_size=12), min_size=1, max_size=5),
    st.integers(0, 4),
    st.sampled_from([29, 32_000]),
)
def test_every_cut_is_bounded_and_nothing_is_lost(sizes: list[list[int]], limit: int, vocab_size: int) -> None:
    seen = []
    for part in parts_for_scoring(groups_of(sizes), limit, vocab_size):
        completions = [completion for group in part for completion in group.completions]
        seen += [(completion.token_ids[0], len(completion.token_ids)) for completion in completions]
        assert limit == 0 or len(completions) <= limit
        if len(completions) == 1:
            continue
        width = max(3 + sum(len(each.token_ids) - 1 for each in group.completions) for group in part)
        assert len(part) * width**2 <= MAX_ATTENTION_CELLS
        assert vocab_size * sum(len(completion.token_ids) for completion in completions) <= MAX_LOGITS
    assert seen == list(enumerate(size for group in sizes for size in group))


def test_a_group_of_many_long_answers_does_not_become_one_huge_row() -> None:
    parts = list(micro_batches(groups_of([[400] * 64]), LOSS, 128, 29))
    assert len(parts) > 10
    assert all(part.packed.allowed_RSS.numel() <= MAX_ATTENTION_CELLS for part in parts)
    assert sum(part.mask_T.numel() for part in parts) == 400 * 64
