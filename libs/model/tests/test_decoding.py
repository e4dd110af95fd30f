"""Continuous batching: rows come and go, and no row notices."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reflux_model.cache import SlotCache
from reflux_model.config import ModelConfig
from reflux_model.generation import generate
from reflux_model.inference import Segment, _bands, decode_step, extend, prefill
from reflux_model.parameters import initial_parameters
from reflux_model.sampling import SamplingParams
from reflux_model.training import logprobs

torch.set_num_threads(1)

CONFIG = ModelConfig(
    vocab_size=23,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_size=8,
    max_positions=64,
)
PARAMS = initial_parameters(CONFIG, seed=1, std=0.3)
END = 1


def _alone(prompt: list[int], seed: int) -> list[int]:
    sampling = SamplingParams.uniform([seed])
    return generate(PARAMS, CONFIG, [prompt], sampling, max_new_tokens=6, end_token=END)[0].tokens


@settings(max_examples=25, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(2, 22), min_size=1, max_size=6), min_size=1, max_size=4),
    group_size=st.integers(1, 3),
    first_seed=st.integers(0, 10_000),
)
def test_a_request_gets_the_same_tokens_in_any_batch(
    prompts: list[list[int]], group_size: int, first_seed: int
) -> None:
    seeds = [first_seed + index for index in range(len(prompts) * group_size)]
    batch = generate(
        PARAMS,
        CONFIG,
        prompts,
        SamplingParams.uniform(seeds),
        group_size=group_size,
        max_new_tokens=6,
        end_token=END,
    )
    for index, completion in enumerate(batch):
        assert completion.tokens == _alone(prompts[index // group_size], seeds[index])
        assert completion.finished == (completion.tokens[-1] == END)


def test_sampled_logprobs_agree_with_the_training_path() -> None:
    prompts = [[3, 4, 5, 6, 7], [8, 9]]
    sampling = SamplingParams.uniform(list(range(8)))
    batch = generate(PARAMS, CONFIG, prompts, sampling, group_size=4, max_new_tokens=6, end_token=END)
    groups = [[completion.tokens for completion in batch[start : start + 4]] for start in (0, 4)]
    recomputed = logprobs(PARAMS, CONFIG, prompts, groups)
    for completion, expected in zip(batch, recomputed, strict=True):
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-5, rtol=0)


def test_a_row_is_blind_to_what_a_slot_held_before() -> None:
    cache = SlotCache(CONFIG, num_slots=2, max_length=12)
    first = prefill(PARAMS, CONFIG, torch.tensor([[2, 3, 4, 5, 6, 7, 8]]))
    cache.insert(first.kv, torch.tensor([0]), torch.tensor([1]))
    for position in range(7, 12):
        decode_step(PARAMS, CONFIG, torch.tensor([9]), cache, torch.tensor([position]), torch.tensor([1]))
    second = prefill(PARAMS, CONFIG, torch.tensor([[10, 11, 12]]))
    cache.insert(second.kv, torch.tensor([0]), torch.tensor([1]))
    used = decode_step(PARAMS, CONFIG, torch.tensor([13]), cache, torch.tensor([3]), torch.tensor([1]))
    clean = SlotCache(CONFIG, num_slots=1, max_length=12)
    clean.insert(second.kv, torch.tensor([0]), torch.tensor([0]))
    fresh = decode_step(PARAMS, CONFIG, torch.tensor([13]), clean, torch.tensor([3]))
    torch.testing.assert_close(used, fresh, atol=1e-6, rtol=0)


def test_a_sequence_goes_on_in_another_cache_after_hand_over() -> None:
    source = SlotCache(CONFIG, num_slots=3, max_length=10)
    prefilled = prefill(PARAMS, CONFIG, torch.tensor([[2, 3, 4, 0], [5, 6, 7, 8]]), torch.tensor([3, 4]))
    source.insert(prefilled.kv, torch.tensor([0]), torch.tensor([2]))
    expected = decode_step(PARAMS, CONFIG, torch.tensor([9]), source, torch.tensor([3]), torch.tensor([2]))
    for handed in (prefilled.kv.row(0), source.extract(2, 3)):
        target = SlotCache(CONFIG, num_slots=1, max_length=8)
        target.insert(handed, torch.tensor([0]), torch.tensor([0]))
        got = decode_step(PARAMS, CONFIG, torch.tensor([9]), target, torch.tensor([3]))
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)


def test_prefilling_again_after_a_swap_equals_decoding() -> None:
    prompt, tail = [2, 3, 4], [9, 10, 11]
    cache = SlotCache(CONFIG, num_slots=1, max_length=8)
    cache.insert(prefill(PARAMS, CONFIG, torch.tensor([prompt])).kv, torch.tensor([0]), torch.tensor([0]))
    for offset, token in enumerate(tail):
        logits = decode_step(PARAMS, CONFIG, torch.tensor([token]), cache, torch.tensor([3 + offset]))
    again = prefill(PARAMS, CONFIG, torch.tensor([prompt + tail])).logits_BV
    torch.testing.assert_close(again, logits, atol=1e-5, rtol=0)


def test_what_does_not_fit_is_refused_by_name() -> None:
    cache = SlotCache(CONFIG, num_slots=1, max_length=4)
    with pytest.raises(ValueError, match="1 rows of 5 positions"):
        decode_step(PARAMS, CONFIG, torch.tensor([2]), cache, torch.tensor([4]))
    with pytest.raises(ValueError, match="prefix of 5 positions"):
        cache.insert(prefill(PARAMS, CONFIG, torch.tensor([[2] * 5])).kv, torch.tensor([0]), torch.tensor([0]))
    with pytest.raises(ValueError, match="at least one token"):
        prefill(PARAMS, CONFIG, torch.tensor([[2, 3]]), torch.tensor([0]))
    with pytest.raises(ValueError, match="needs slots"):
        SlotCache(CONFIG, num_slots=0, max_length=4)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(2, 22), min_size=1, max_size=9), min_size=1, max_size=4),
    chunk=st.integers(1, 9),
)
def test_a_prefill_in_chunks_leaves_what_one_prefill_leaves(rows: list[list[int]], chunk: int) -> None:
    cache = SlotCache(CONFIG, num_slots=6, max_length=10)
    for start in range(0, 9, chunk):
        segments = [
            Segment(slot + 1, start, row[start : start + chunk]) for slot, row in enumerate(rows) if len(row) > start
        ]
        if segments:
            hidden = extend(PARAMS, CONFIG, segments, cache)
            assert hidden.shape == (sum(len(segment.tokens) for segment in segments), CONFIG.hidden_size)
    for slot, row in enumerate(rows):
        whole = prefill(PARAMS, CONFIG, torch.tensor([row])).kv
        torch.testing.assert_close(cache.keys[:, slot + 1, :, : len(row)], whole.keys[:, 0], atol=1e-5, rtol=0)
        torch.testing.assert_close(cache.values[:, slot + 1, :, : len(row)], whole.values[:, 0], atol=1e-5, rtol=0)
    assert not cache.keys[:, 0].any(), "other slots are left alone"


def test_a_segment_that_does_not_fit_is_refused() -> None:
    cache = SlotCache(CONFIG, num_slots=1, max_length=4)
    for segment in (Segment(0, 0, []), Segment(0, 2, [3, 4, 5])):
        with pytest.raises(ValueError, match="4 positions"):
            extend(PARAMS, CONFIG, [segment], cache)


def test_a_slot_has_memory_for_what_is_written_only_and_gives_it_back() -> None:
    config = dataclasses.replace(CONFIG, head_size=64, max_positions=1 << 20)
    cache = SlotCache(config, num_slots=50, max_length=1 << 20)  # 50 GB of addresses
    for slot in (0, 7):
        cache.keys[:, slot, :, :4096] = 3.0
        cache.values[:, slot, :, :4096] = 4.0
    cache.trim(7, 64)
    for memory, value in ((cache.keys, 3.0), (cache.values, 4.0)):
        assert bool((memory[:, 0, :, :4096] == value).all()), "others keep theirs"
        assert bool((memory[:, 7, :, :64] == value).all())
        assert not memory[:, 7, :, 128:4096].any()
    cache.trim(0, 0)
    assert not cache.keys[:, 0, :, :4096].any()


def test_rows_of_very_different_lengths_are_decoded_as_each_alone() -> None:
    lengths = [3, 5, 2, 4, 3, 2, 2, 3, 900, 2, 3]
    config = dataclasses.replace(CONFIG, max_positions=1024)
    assert len(_bands(lengths)) == 2
    assert len(_bands([900] * 11)) == 1
    cache = SlotCache(config, num_slots=11, max_length=1024)
    generator = torch.Generator().manual_seed(3)
    cache.keys[:, :11, :, :900] = torch.randn(2, 11, 1, 900, 8, generator=generator)
    cache.values[:, :11, :, :900] = torch.randn(2, 11, 1, 900, 8, generator=generator)
    positions = torch.tensor(lengths) - 1
    together = decode_step(PARAMS, config, torch.arange(2, 13), cache, positions)
    for row in range(11):
        at = torch.tensor([row])
        alone = decode_step(PARAMS, config, torch.tensor([row + 2]), cache, positions[at], at)
        torch.testing.assert_close(together[row], alone[0], atol=1e-5, rtol=0)


def test_address_space_that_the_kernel_refuses_is_named() -> None:
    with pytest.raises(MemoryError, match="fewer rows or shorter sequences"):
        SlotCache(dataclasses.replace(CONFIG, head_size=1 << 20), num_slots=1 << 12, max_length=1 << 20)
