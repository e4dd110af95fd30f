import random

import pytest
import torch

from reflux_inference_gateway.engine.served import Weights
from reflux_inference_gateway.engine.types import GroupRequest, Sampling, sample_seed
from reflux_model.parameters import initial_parameters
from reflux_model.training import logprobs

from .engine_harness import Harness, check_spans, group, sharpened


def random_groups(count, seed=0, **sampling):
    draw = random.Random(seed)
    groups = []
    for number in range(count):
        prompt = [draw.randrange(2, 40) for _ in range(draw.randint(1, 20))]
        fields = {"seed": number, "max_tokens": draw.randint(1, 14)} | sampling
        groups.append(group(f"g{number}", prompt, draw.randint(1, 6), **fields))
    return groups


def test_log_probs_equal_a_recomputation_from_the_tokens_alone(model_folder):
    engine = Harness(model_folder, max_rows=5)
    groups = random_groups(12)
    answers = engine.run(*groups)
    for one, samples in zip(groups, answers, strict=True):
        expected = logprobs(engine.params, engine.config, [one.prompt_ids], [[s.token_ids for s in samples]])
        for sample, row in zip(samples, expected, strict=True):
            assert torch.allclose(torch.tensor(sample.logprobs), row, atol=1e-4)
            assert len(sample.token_ids) == len(sample.logprobs) <= one.sampling.max_tokens


def test_same_seed_gives_the_same_tokens_whatever_else_is_in_the_batch(model_folder):
    groups = random_groups(10, seed=4)
    together = Harness(model_folder, max_rows=7).run(*groups)
    alone = [Harness(model_folder, max_rows=32).run(one)[0] for one in groups]
    for left, right in zip(together, alone, strict=True):
        assert [s.token_ids for s in left] == [s.token_ids for s in right]


def test_group_equals_single_requests_with_the_seeds_of_its_samples(model_folder):
    engine = Harness(model_folder)
    fanned = engine.run(group("g", [5, 6, 7], 9, seed=123))[0]
    assert engine.core.prompts.seated == 1
    for index, sample in enumerate(fanned):
        single = engine.run(group(f"s{index}", [5, 6, 7], 1, seed=sample_seed(123, index)))[0][0]
        assert single.token_ids == sample.token_ids
    assert len({tuple(sample.token_ids) for sample in fanned}) > 1


def test_a_group_larger_than_the_batch_is_prefilled_once(model_folder):
    engine = Harness(model_folder, max_rows=4)
    samples = engine.run(group("big", [3, 4, 5], 30), group("other", [9], 2))[0]
    assert engine.core.prompts.seated == 2
    assert [sample.index for sample in samples] == list(range(30))


def test_greedy_takes_the_best_token_and_top_k_one_agrees(model_folder):
    engine = Harness(model_folder)
    greedy, narrow = engine.run(
        group("greedy", [8, 9], temperature=0.0), group("narrow", [8, 9], temperature=1.0, top_k=1)
    )
    assert greedy[0].token_ids == narrow[0].token_ids
    expected = logprobs(engine.params, engine.config, [[8, 9]], [[greedy[0].token_ids]])[0]
    assert torch.allclose(torch.tensor(greedy[0].logprobs), expected, atol=1e-4)


def test_log_probs_are_those_of_temperature_one(model_folder):
    engine = Harness(model_folder)
    sample = engine.run(group("hot", [8, 9], temperature=1.7, top_p=0.8))[0][0]
    expected = logprobs(engine.params, engine.config, [[8, 9]], [[sample.token_ids]])[0]
    assert torch.allclose(torch.tensor(sample.logprobs), expected, atol=1e-4)


def test_stop_tokens_and_length_give_their_finish_reason(model_folder):
    engine = Harness(model_folder, sharpen=1.0)
    long = engine.run(group("long", [8], max_tokens=60, ignore_eos=True))[0][0]
    assert (long.finish_reason, len(long.token_ids)) == ("length", 60)
    stop = long.token_ids[20]
    first = long.token_ids.index(stop)
    stopped = engine.run(group("stopped", [8], max_tokens=60, ignore_eos=True, stop_token_ids=(stop,)))[0][0]
    assert (stopped.finish_reason, stopped.token_ids) == ("stop", long.token_ids[: first + 1])
    eos = engine.run(*(group(f"e{i}", [8], max_tokens=80, seed=i) for i in range(8)))
    ended = [samples[0] for samples in eos if samples[0].finish_reason == "stop"]
    assert ended
    assert all(sample.token_ids[-1] == 1 and 1 not in sample.token_ids[:-1] for sample in ended)


def test_top_log_probs_hold_the_best_tokens_of_each_position(model_folder):
    engine = Harness(model_folder)
    greedy = engine.run(group("g", [8, 9], temperature=0.0, top_logprobs=3))[0][0]
    assert len(greedy.top_logprobs) == len(greedy.token_ids)
    for token, value, top in zip(greedy.token_ids, greedy.logprobs, greedy.top_logprobs, strict=True):
        assert len(top) == 3
        assert max(top, key=lambda one: top[one]) == token
        assert top[token] == pytest.approx(value, abs=1e-5)


@pytest.mark.parametrize("kv", ["refresh", "keep"])
def test_swap_between_steps_gives_spans_without_gaps(model_folder, kv):
    engine = Harness(model_folder, kv=kv)
    new = sharpened(initial_parameters(engine.config, 99), 8.0)
    requests = [group("a", [4, 5, 6], 3, ignore_eos=True), group("b", [7], 2, ignore_eos=True)]
    engine.core.submit(requests[0])
    for _ in range(4):
        engine.core.step()
    engine.core.submit(requests[1])
    engine.core.step()
    engine.core.swap(Weights(new, 2, 11))
    answers = engine.run()
    assert answers == []
    first, second = engine.samples["a"], engine.samples["b"]
    for sample in first.values():
        spans = [(span.version, span.start, span.end) for span in sample.spans]
        assert spans == [(1, 0, 5), (2, 5, 12)]
        assert sample.spans[1].kv_version == (2 if kv == "refresh" else 1)
    assert [(s.version, s.start, s.end) for s in second[0].spans] == [(1, 0, 1), (2, 1, 12)]
    if kv == "refresh":
        for one in requests:
            samples = [engine.samples[one.request_id][i] for i in range(one.num_samples)]
            check_spans(engine, one, samples, {1: engine.params, 2: new})


def test_prompts_of_very_different_lengths_are_not_padded_to_the_longest(model_folder):
    lengths = [60, *[2] * 9, 40, *[3] * 9]
    engine = Harness(model_folder, max_rows=32, prefill_tokens=64)
    groups = [group(f"g{i}", [5 + i % 7] * length, seed=i) for i, length in enumerate(lengths)]
    answers = engine.run(*groups)
    assert engine.core.filler.prompt_tokens == sum(lengths) - len(lengths), "the last token is fed by a decode step"
    for one, (sample,) in zip(groups, answers, strict=True):
        expected = logprobs(engine.params, engine.config, [one.prompt_ids], [[sample.token_ids]])[0]
        assert torch.allclose(torch.tensor(sample.logprobs), expected, atol=1e-4)


def test_swap_while_a_group_waits_for_rows_computes_its_prompt_again(model_folder):
    engine = Harness(model_folder, max_rows=2)
    new = sharpened(initial_parameters(engine.config, 99), 8.0)
    one = group("a", [4, 5, 6], 6, ignore_eos=True)
    engine.core.submit(one)
    engine.core.step()
    engine.core.swap(Weights(new, 2, 11))
    engine.run()
    assert engine.core.prompts.seated == 2
    samples = [engine.samples["a"][i] for i in range(6)]
    assert [s.spans[-1].version for s in samples] == [2] * 6
    check_spans(engine, one, samples, {1: engine.params, 2: new})


def test_abort_ends_running_and_waiting_samples_with_what_they_have(model_folder):
    engine = Harness(model_folder, max_rows=3)
    engine.core.submit(group("a", [4, 5], 5, ignore_eos=True))
    engine.core.submit(group("b", [6], 2, ignore_eos=True))
    for _ in range(4):
        engine.core.step()
    assert engine.core.abort("a")
    assert not engine.core.abort("a")
    engine.run()
    a = engine.samples["a"]
    assert sorted(a) == [0, 1, 2, 3, 4]
    assert {sample.finish_reason for sample in a.values()} == {"abort"}
    assert [len(a[i].token_ids) for i in range(5)] == [4, 4, 4, 0, 0]
    b = engine.samples["b"]
    alone = Harness(model_folder).run(group("b", [6], 2, ignore_eos=True))[0]
    assert [b[0].token_ids, b[1].token_ids] == [sample.token_ids for sample in alone]
    assert engine.core.pending_tokens() == 0


def test_stop_string_over_token_borders_ends_the_text_before_it(model_folder):
    from reflux_inference_gateway.engine.tokenizer import TextTokenizer

    tokenizer = TextTokenizer(model_folder)
    engine = Harness(model_folder, decode=tokenizer.decode, sharpen=2.0)
    free = engine.run(group("free", [8, 9], max_tokens=40, ignore_eos=True))[0][0]
    text = tokenizer.decode(free.token_ids)
    stop = text[11:15]
    at = text.index(stop)
    stopped = engine.run(group("stopped", [8, 9], max_tokens=40, ignore_eos=True, stops=(stop, "@@")))[0][0]
    assert (stopped.text, stopped.finish_reason) == (text[:at], "stop")
    assert free.token_ids[: len(stopped.token_ids)] == stopped.token_ids
    assert tokenizer.decode(stopped.token_ids[:-1]).find(stop) < 0


def test_token_streaming_delivers_every_token_before_the_sample(model_folder):
    engine = Harness(model_folder)
    one = GroupRequest(
        request_id="s", prompt_ids=(4, 5), num_samples=2, sampling=Sampling(max_tokens=6, seed=1), stream_tokens=True
    )
    samples = engine.run(one)[0]
    for sample in samples:
        deltas = [delta for delta in engine.deltas["s"] if delta.index == sample.index]
        assert [delta.token_id for delta in deltas] == sample.token_ids
        assert [delta.logprob for delta in deltas] == pytest.approx(sample.logprobs)


def test_rows_share_a_memory_that_is_smaller_than_all_of_them(model_folder):
    engine = Harness(model_folder, max_rows=16, kv_tokens=100)
    groups = random_groups(12, seed=6)
    most = 0
    for one in groups:
        engine.core.submit(one)
    while engine.core.step():
        most = max(most, engine.core.batcher.num_active)
        assert sum(engine.core._memory._held) <= 100
    assert 3 < most < 16
    for one in groups:
        samples = [engine.samples[one.request_id][i] for i in range(one.num_samples)]
        alone = Harness(model_folder).run(one)[0]
        assert [sample.token_ids for sample in samples] == [sample.token_ids for sample in alone]
