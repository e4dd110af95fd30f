"""Cuts of a batch: whole, in order, and small enough whatever its size; and rows that several groups share."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from reflux_model.packing import ATTENTION_WIDTH, balanced_rows, join_rows, pack_rows
from reflux_model.training import packed_scores
from reflux_trainer.learner.batching import MAX_ATTENTION_CELLS, MICRO_BATCH_TOKENS, micro_batches, parts_of
from reflux_trainer.learner.ops import CompletionData, GroupData, LossSpec

from .tiny import tiny_learner

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
)
def test_every_cut_is_bounded_and_nothing_is_lost(sizes: list[list[int]], limit: int) -> None:
    seen = []
    for part in parts_of(groups_of(sizes), limit):
        for placed in part:
            for place, completion in zip(placed.places, placed.group.completions, strict=True):
                assert completion.token_ids[0] == place
                seen.append((place, len(completion.token_ids)))
        count = sum(len(placed.places) for placed in part)
        assert limit == 0 or count <= limit
        if count == 1:
            continue
        width = max(placed.row_length for placed in part)
        assert len(part) * width**2 <= MAX_ATTENTION_CELLS
        assert sum(placed.row_length for placed in part) <= MICRO_BATCH_TOKENS
    assert sorted(seen) == list(enumerate(size for group in sizes for size in group))


def test_a_group_of_many_long_answers_does_not_become_one_huge_row() -> None:
    parts = list(micro_batches(groups_of([[400] * 64]), LOSS, 128))
    assert len(parts) > 10
    assert all(part.packed.allowed_RSS.numel() <= MAX_ATTENTION_CELLS for part in parts)
    assert sum(part.mask_T.numel() for part in parts) == 400 * 64


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40))
def test_rows_that_trees_share_overlap_nowhere_and_are_no_dearer_than_rows_of_their_own(lengths: list[int]) -> None:
    placed = [
        (row, start, start + length) for (row, start), length in zip(balanced_rows(lengths), lengths, strict=True)
    ]
    taken = {(row, position) for row, start, end in placed for position in range(start, end)}
    assert len(taken) == sum(lengths)
    rows, width = 1 + max(row for row, _, _ in placed), max(end for _, _, end in placed)
    alone = len(lengths) * max(lengths) * (1 + max(lengths) / ATTENTION_WIDTH)
    assert rows * width * (1 + width / ATTENTION_WIDTH) <= alone


PROMPTS = [[3, 4, 5, 6, 7, 8, 9], [8, 9], [10, 11, 12], [2], [4, 4]]
COMPLETIONS = [[[20, 21, 22, 1], [5]], [[23, 24]], [[25, 26, 1], [27]], [[28, 9]], [[3, 3, 3]]]


def test_samples_that_share_a_row_never_see_each_other() -> None:
    learner = tiny_learner()
    packed = pack_rows(PROMPTS, COMPLETIONS)
    assert packed.tokens_RS.shape[0] < len(PROMPTS)
    together = packed_scores(learner.params, learner.config, packed).logprobs_T
    alone = [
        packed_scores(learner.params, learner.config, pack_rows([prompt], [[completion]])).logprobs_T
        for prompt, group in zip(PROMPTS, COMPLETIONS, strict=True)
        for completion in group
    ]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-5, rtol=1e-5)


def test_rows_that_are_put_below_each_other_score_as_before() -> None:
    learner = tiny_learner()
    parts = [pack_rows(PROMPTS[:2], COMPLETIONS[:2]), pack_rows(PROMPTS[2:], COMPLETIONS[2:])]
    joined = packed_scores(learner.params, learner.config, join_rows(parts)).logprobs_T
    expected = torch.cat([packed_scores(learner.params, learner.config, part).logprobs_T for part in parts])
    torch.testing.assert_close(joined, expected, atol=1e-6, rtol=1e-5)


def test_targets_need_not_be_what_is_fed() -> None:
    learner = tiny_learner()
    scores = packed_scores(learner.params, learner.config, pack_rows([[3]], [[[7, 8, 9]]], [[[4, 5]]])).logprobs_T
    plain = packed_scores(learner.params, learner.config, pack_rows([[3, 4, 5]], [[[9]]])).logprobs_T
    torch.testing.assert_close(scores[2], plain[0], atol=1e-6, rtol=1e-5)
