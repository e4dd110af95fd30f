"""Prompts that are computed once, in chunks, and shared: by a group, by neighbours, by later requests."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reflux_inference_gateway.engine.prefixes import PrefixIndex
from reflux_inference_gateway.engine.served import Weights
from reflux_model.parameters import initial_parameters
from reflux_model.training import logprobs

from .engine_harness import Harness, check_spans, group, sharpened

HEAD = [2 + at % 38 for at in range(50)]


def same(left, right):
    assert [one.token_ids for one in left] == [one.token_ids for one in right]
    for one, other in zip(left, right, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_a_later_prompt_reuses_what_it_shares_and_says_the_same(model_folder):
    engine = Harness(model_folder)
    engine.run(group("first", [*HEAD, 7, 8, 9], 2))
    assert (engine.core.filler.prompt_tokens, engine.core.prompts.reused_tokens) == (52, 0)
    later = [group("same", [*HEAD, 7, 8, 9], 3, seed=1), group("other", [*HEAD, 9, 3], 2, seed=2)]
    for one, computed in zip(later, (52 - 48, 51 - 48), strict=True):
        before = engine.core.filler.prompt_tokens
        (samples,) = engine.run(one)
        assert engine.core.filler.prompt_tokens - before == computed, "three blocks of 16 are known"
        same(samples, Harness(model_folder, blocks=0).run(one)[0])
    assert engine.core.prompts.reused_tokens == 96


def test_a_prompt_that_is_known_whole_is_not_computed_at_all(model_folder):
    engine = Harness(model_folder)
    one = group("a", HEAD[:33], 2)
    (first,) = engine.run(one)
    before = engine.core.filler.prompt_tokens
    (again,) = engine.run(group("b", HEAD[:33], 2))
    assert engine.core.filler.prompt_tokens == before
    same(first, again)


def test_neighbours_that_begin_alike_wait_for_the_first_one(model_folder):
    engine = Harness(model_folder, blocks=0, prefill_tokens=400)
    groups = [group(f"g{i}", [*HEAD, 5 + i, *[7] * i], 2, seed=i) for i in range(6)]
    answers = engine.run(*groups)
    assert engine.core.filler.prompt_tokens == 50 + sum(range(6)), "the head is computed once, without any store"
    for one, samples in zip(groups, answers, strict=True):
        same(samples, Harness(model_folder, blocks=0).run(one)[0])


def test_followers_of_an_aborted_prompt_compute_it_themselves(model_folder):
    engine = Harness(model_folder, prefill_tokens=200)
    first, second = group("first", [*HEAD, 5], 2), group("second", [*HEAD, 6, 7], 2)
    engine.core.submit(first)
    engine.core.submit(second)
    engine.core._admit(engine.core.batcher.admit())
    assert [one.leader is not None for one in engine.core._sequences] == [False, True, True, True]
    engine.core.abort("first")
    engine.run()
    same([engine.samples["second"][i] for i in range(2)], Harness(model_folder).run(second)[0])


def test_other_salts_share_nothing(model_folder):
    engine = Harness(model_folder, prefill_tokens=400)
    one = group("a", HEAD)
    engine.run(one, *(group(name, HEAD, salt=name) for name in ("x", "y")))
    assert engine.core.prompts.reused_tokens == 0
    engine.run(group("x2", HEAD, salt="x"))
    assert engine.core.prompts.reused_tokens == 48


@pytest.mark.parametrize("kv", ["refresh", "keep"])
def test_new_weights_make_all_that_is_kept_void(model_folder, kv):
    engine = Harness(model_folder, kv=kv)
    engine.run(group("before", HEAD, 2))
    running = group("running", [*HEAD, 4], 2, max_tokens=20, ignore_eos=True)
    engine.core.submit(running)
    engine.core.step()
    new = sharpened(initial_parameters(engine.config, 99), 8.0)
    engine.core.swap(Weights(new, 2, 20))
    reused = engine.core.prompts.reused_tokens
    late = group("late", [*HEAD, 5], 3, ignore_eos=True)
    (samples,) = engine.run(late)
    assert [span.version for one in samples for span in one.spans] == [2, 2, 2]
    check_spans(engine, late, samples, {2: new})
    if kv == "refresh":
        assert engine.core.prompts.reused_tokens == reused + 48, "what was computed again is known again"
        check_spans(engine, running, list(engine.samples["running"].values()), {1: engine.params, 2: new})
    else:
        assert engine.core.prompts.reused_tokens == reused, "old keys and values are not shared"


@pytest.mark.parametrize("kv", ["refresh", "keep"])
def test_a_swap_in_the_middle_of_a_prompt_begins_it_anew(model_folder, kv):
    engine = Harness(model_folder, kv=kv, prefill_tokens=20)
    one = group("a", HEAD, 2, ignore_eos=True)
    engine.core.submit(one)
    engine.core.step()
    new = sharpened(initial_parameters(engine.config, 99), 8.0)
    engine.core.swap(Weights(new, 2, 20))
    engine.core.step()
    assert engine.core.lanes.own.settled, "nobody decodes under the old weights"
    engine.run()
    samples = [engine.samples["a"][i] for i in range(2)]
    assert [(s.version, s.kv_version, s.start) for one in samples for s in one.spans] == [(2, 2, 0)] * 2
    check_spans(engine, one, samples, {2: new})


def test_a_long_prompt_holds_nobody_up_for_more_than_a_chunk(model_folder):
    engine = Harness(model_folder, prefill_tokens=10)
    running = group("running", [4, 5], 2, max_tokens=30, ignore_eos=True)
    engine.core.submit(running)
    engine.core.step()
    long = group("long", [*HEAD, *HEAD[:30]], 2, max_tokens=6, ignore_eos=True)
    engine.core.submit(long)
    steps = 0
    while not engine.core.filler.prompt_tokens >= 1 + 79:
        computed, drawn = engine.core.filler.prompt_tokens, engine.core.generated_tokens
        engine.core.step()
        steps += 1
        assert 0 < engine.core.filler.prompt_tokens - computed <= 10
        assert engine.core.generated_tokens - drawn >= 2, "the running rows decode in every step"
    assert steps == 8
    engine.run()
    for one in (running, long):
        samples = [engine.samples[one.request_id][i] for i in range(2)]
        same(samples, Harness(model_folder, prefill_tokens=400).run(one)[0])


def test_rows_that_wait_between_others_disturb_nobody(model_folder):
    engine = Harness(model_folder, prefill_tokens=5)
    running = [group(f"r{i}", [3 + i], 1, max_tokens=3 + 3 * i, ignore_eos=True, seed=i) for i in range(6)]
    for one in running:
        engine.core.submit(one)
    while engine.core.batcher.num_waiting:
        engine.core.step()
    long = group("long", HEAD, 2, max_tokens=10, ignore_eos=True)
    (samples,) = engine.run(long)  # rows that end before it is filled move it into their place
    same(samples, Harness(model_folder, prefill_tokens=400).run(long)[0])
    for one in running:
        same([engine.samples[one.request_id][0]], Harness(model_folder).run(one)[0])


@pytest.mark.parametrize("chunk", [7, 400])
def test_prompt_log_probs_are_those_of_the_learner(model_folder, chunk):
    engine = Harness(model_folder, prefill_tokens=chunk)
    engine.run(group("known", HEAD))
    (samples,) = engine.run(group("a", HEAD, 3, prompt_logprobs=2))
    expected = logprobs(engine.params, engine.config, [HEAD[:1]], [[HEAD[1:]]])[0]
    for sample in samples:
        own = [scores[token].logprob for scores, token in zip(sample.prompt_scores, HEAD[1:], strict=True)]
        assert torch.allclose(torch.tensor(own), expected, atol=1e-4)
        for scores, token in zip(sample.prompt_scores, HEAD[1:], strict=True):
            assert {1, 2} <= {one.rank for one in scores.values()}
            assert len(scores) == (2 if scores[token].rank <= 2 else 3)
    assert engine.run(group("b", HEAD[:1], prompt_logprobs=0))[0][0].prompt_scores == []


def test_samples_that_get_rows_later_have_the_prompt_log_probs_too(model_folder):
    engine = Harness(model_folder, max_rows=2)
    (samples,) = engine.run(group("a", HEAD, 5, prompt_logprobs=0))
    assert engine.core.prompts.seated == 1
    assert all(sample.prompt_scores == samples[0].prompt_scores for sample in samples)
    assert len(samples[0].prompt_scores) == len(HEAD) - 1


def test_random_groups_with_common_heads_are_exact_whatever_is_kept(model_folder):
    draw = random.Random(5)
    engine = Harness(model_folder, max_rows=7, blocks=6, prefill_tokens=40)
    for turn in range(3):
        groups = []
        for number in range(8):
            tail = [draw.randrange(2, 40) for _ in range(draw.randint(1, 20))]
            groups.append(group(f"{turn}-{number}", HEAD[: draw.choice((0, 16, 31, 48))] + tail, draw.randint(1, 3)))
        for one, samples in zip(groups, engine.run(*groups), strict=True):
            expected = logprobs(engine.params, engine.config, [one.prompt_ids], [[s.token_ids for s in samples]])
            for sample, row in zip(samples, expected, strict=True):
                assert torch.allclose(torch.tensor(sample.logprobs), row, atol=1e-4)
    assert engine.core.prompts.reused_tokens > 100


PROMPTS = st.lists(
    st.tuples(st.lists(st.integers(0, 1), max_size=14), st.sampled_from(["", "s"]), st.booleans()), max_size=40
)


@settings(max_examples=200, deadline=None)
@given(PROMPTS, st.integers(1, 6))
def test_places_hold_what_was_written_last_and_the_pool_never_overflows(prompts, num_blocks):
    index, pool = PrefixIndex(num_blocks, 3), {}
    for tokens, salt, write in prompts:
        places = index.find(tokens, salt)
        for number, place in enumerate(places):
            assert pool[place] == (salt, tokens[: 3 * (number + 1)]), "a place holds the block of just this beginning"
        if write:
            for number, place in index.add(tokens, salt):
                assert number >= len(places)
                pool[place] = (salt, tokens[: 3 * (number + 1)])
            assert len(index.find(tokens, salt)) == min(len(tokens) // 3, num_blocks)
        assert len(index) <= num_blocks


def test_the_least_recently_used_end_makes_room():
    index = PrefixIndex(4, 2)
    index.add([1, 1, 2, 2])
    index.add([3, 3, 4, 4])
    index.find([1, 1, 2, 2])
    index.add([5, 5])
    assert [len(index.find(prompt)) for prompt in ([1, 1, 2, 2], [3, 3, 4, 4], [5, 5])] == [2, 1, 1]
