"""Refresh after a swap, in chunks between decode steps: same numbers, bounded gaps, nobody starved."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reflux_inference_gateway.engine import core as core_module
from reflux_inference_gateway.engine import filler as filler_module
from reflux_inference_gateway.engine.refresh import Pace, PauseMeter, Unfilled, next_pieces
from reflux_inference_gateway.engine.served import Weights
from reflux_model.parameters import initial_parameters

from .engine_harness import Harness, check_spans, group, sharpened


class FixedPace(Pace):
    """Chunks of one size, whatever was measured."""

    def __init__(self, tokens):
        super().__init__(tokens)
        self._fixed = tokens

    def tokens(self, running):
        return self._fixed


def started(folder, groups, *, steps=3, **options):
    engine = Harness(folder, **options)
    for one in groups:
        engine.core.submit(one)
    for _ in range(steps):
        engine.core.step()
    return engine


def new_weights(engine, version):
    return Weights(sharpened(initial_parameters(engine.config, 90 + version), 8.0), version, 10 * version)


def some_groups(count, seed, max_tokens=14):
    draw = random.Random(seed)
    prompts = [[draw.randrange(2, 40) for _ in range(draw.randint(1, 30))] for _ in range(count)]
    return [group(f"g{i}", prompt, 1 + i % 3, max_tokens=max_tokens, seed=i) for i, prompt in enumerate(prompts)]


def counts(core):
    return {
        (sequence.request.request_id, sequence.index): (sequence.stale, int(core._rows.generated_B[row]))
        for row, sequence in enumerate(core._sequences)
    }


def resting(core):
    """Samples that nobody decodes now, under the old weights neither."""
    waits = [sequence.stale and not (sequence.lane.old and sequence.lingering) for sequence in core._sequences]
    return {(s.request.request_id, s.index) for s, rests in zip(core._sequences, waits, strict=True) if rests}


@pytest.mark.parametrize("chunk", [1, 5, 23])
def test_chunks_give_the_log_probs_of_one_big_refresh(model_folder, chunk):
    answers = []
    for tokens in (chunk, 100_000):
        groups = some_groups(8, seed=chunk)
        engine = started(model_folder, groups, max_rows=12)
        engine.core.filler.pace = FixedPace(tokens)
        new = new_weights(engine, 2)
        engine.core.swap(new, overwritten=True)  # so that all draw the same tokens under the new weights
        engine.run()
        for one in groups:
            samples = [engine.samples[one.request_id][i] for i in range(one.num_samples)]
            check_spans(engine, one, samples, {1: engine.params, 2: new.params})
        answers.append(engine.samples)
    for name, samples in answers[0].items():
        for index, sample in samples.items():
            other = answers[1][name][index]
            assert sample.token_ids == other.token_ids
            assert torch.allclose(torch.tensor(sample.logprobs), torch.tensor(other.logprobs), atol=1e-4)


def test_a_stale_row_never_decodes_under_new_weights_and_a_fresh_one_always_does(model_folder):
    groups = some_groups(9, seed=1, max_tokens=40)
    engine = started(model_folder, groups, max_rows=16)
    engine.core.filler.pace = FixedPace(6)
    new = new_weights(engine, 2)
    engine.core.swap(new)
    mixed = 0
    while any(stale for stale, _ in counts(engine.core).values()):
        before = counts(engine.core)
        engine.core.step()
        after, rests = counts(engine.core), resting(engine.core)
        mixed += 0 < len(rests) < len(after)
        for row, (_, generated) in after.items():
            assert generated == before[row][1] + (row not in rests)
    assert mixed > 3, "rows come back one after the other"
    engine.run()
    for one in groups:  # every token is one of the version that its span names
        samples = [engine.samples[one.request_id][i] for i in range(one.num_samples)]
        check_spans(engine, one, samples, {1: engine.params, 2: new.params})


def test_rows_longer_than_a_chunk_go_on_under_the_old_weights_until_the_first_is_fresh(model_folder):
    groups = [group(f"g{i}", [4 + i] * 30, 1, max_tokens=40, ignore_eos=True, seed=i) for i in range(6)]
    engine = started(model_folder, groups, prefill_tokens=256)
    engine.core.filler.pace = FixedPace(8)
    new, last = new_weights(engine, 2), [generated for _, generated in counts(engine.core).values()]
    engine.core.swap(new)
    steps = 0
    while not engine.core.lanes.own.settled:
        engine.core.step()
        now, steps = [generated for _, generated in counts(engine.core).values()], steps + 1
        assert sum(now) > sum(last), "somebody decodes in every step"
        last = now
    assert steps == 4, "32 positions, 8 at a time"
    assert sum(stale for stale, _ in counts(engine.core).values()) == 5
    engine.run()
    spans = [[(span.version, span.start) for span in engine.samples[one.request_id][0].spans] for one in groups]
    assert sorted(start[-1] for start in spans) == [(2, 3), *[(2, 6)] * 5]
    for one in groups:
        check_spans(engine, one, [engine.samples[one.request_id][0]], {1: engine.params, 2: new.params})


def test_overwritten_weights_are_not_decoded_with(model_folder):
    engine = started(model_folder, [group(f"g{i}", [4 + i] * 30, 1, max_tokens=40, ignore_eos=True) for i in range(3)])
    engine.core.filler.pace = FixedPace(8)
    engine.core.swap(new_weights(engine, 2), overwritten=True)
    before = counts(engine.core)
    engine.core.step()
    assert counts(engine.core) == {row: (True, generated) for row, (_, generated) in before.items()}


class SimulatedCosts:
    """A clock on which a refreshed token and a decoded row take one millisecond each, and nothing else takes any."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        extend, decode = filler_module.extend, core_module.decode_step

        def slow_extend(params, config, segments, *rest):
            self.now += 1e-3 * sum(len(segment.tokens) for segment in segments)
            return extend(params, config, segments, *rest)

        def slow_decode(params, config, tokens_B, *rest):
            self.now += 1e-3 * len(tokens_B)
            return decode(params, config, tokens_B, *rest)

        monkeypatch.setattr(filler_module, "extend", slow_extend)
        monkeypatch.setattr(core_module, "decode_step", slow_decode)

    def __call__(self):
        return self.now


def test_the_pause_of_64_running_rows_is_three_quarters_of_a_decode_step(model_folder, monkeypatch):
    clock, figures = SimulatedCosts(monkeypatch), []
    engine = Harness(model_folder, max_rows=64, clock=clock, settled=figures.append)
    for number in range(8):
        engine.core.submit(group(f"g{number}", [5 + number] * 20, 8, max_tokens=75, ignore_eos=True))
    while engine.core.batcher.num_waiting:
        engine.core.step()
    for version in (2, 3):
        engine.core.step()
        running = engine.core.batcher.num_active
        tokens = int(engine.core._rows.positions_B[:running].sum())
        engine.core.swap(new_weights(engine, version))
        while len(figures) < version - 1:
            engine.core.step()
        assert figures[-1].refreshed_tokens == tokens > running * 20
        assert 0 < figures[-1].pause_seconds <= 0.048 + 1e-9, "a decode step of 64 rows takes 64 ms"
        assert figures[-1].refresh_seconds >= tokens * 1e-3


def test_the_pause_does_not_grow_with_the_length_of_the_rows(model_folder, monkeypatch):
    clock, figures = SimulatedCosts(monkeypatch), []
    engine = Harness(model_folder, max_rows=8, clock=clock, settled=figures.append)
    engine.core.submit(group("long", [5] * 60, 8, max_tokens=30, ignore_eos=True))
    for _ in range(3):
        engine.core.step()
    engine.core.swap(new_weights(engine, 2))
    engine.run()
    assert figures[-1].refreshed_tokens > 8 * 60
    assert 0 < figures[-1].pause_seconds <= 0.020 + 1e-9, "a chunk takes 20 ms, a whole row 60"


def test_swaps_that_come_faster_than_the_refresh_starve_no_row(model_folder):
    engine = started(model_folder, [group(f"g{i}", [4 + i] * 20, 2, max_tokens=30, ignore_eos=True) for i in range(4)])
    engine.core.filler.pace = FixedPace(30)
    for version in range(2, 40):
        engine.core.swap(new_weights(engine, version))
        engine.core.step()
    assert min(generated for _, generated in counts(engine.core).values()) > 3
    engine.run()
    assert all(sample.finish_reason == "length" for group in engine.samples.values() for sample in group.values())


def test_rows_that_end_or_are_aborted_while_others_are_stale_leave_the_rest_right(model_folder):
    groups = [group(f"g{i}", [3 + i] * (1 + 3 * i), 2, max_tokens=4 + i, ignore_eos=True) for i in range(7)]
    engine = started(model_folder, groups, steps=2)
    engine.core.filler.pace = FixedPace(4)
    new = new_weights(engine, 2)
    engine.core.swap(new)
    engine.core.step()
    late = group("late", [9, 8, 7], 3)
    engine.core.submit(late)
    assert engine.core.abort("g5"), "its rows are stale"
    engine.run()
    for one in [*groups, late]:
        samples = [engine.samples[one.request_id][i] for i in range(one.num_samples)]
        assert {sample.finish_reason for sample in samples} <= (
            {"abort"} if one.request_id == "g5" else {"length", "stop"}
        )
        check_spans(engine, one, samples, {1: engine.params, 2: new.params})
    assert all(span.version == 2 for sample in engine.samples["late"].values() for span in sample.spans)


rows = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 20), st.integers(1, 40)), min_size=1, max_size=12)


@settings(max_examples=100, deadline=None)
@given(rows=rows, tokens=st.integers(1, 60))
def test_chunks_cover_every_stale_position_once_and_the_oldest_first(rows, tokens):
    stale = {row: Unfilled(row, since, done, done + left) for row, (since, done, left) in enumerate(rows)}
    finished = []
    while stale:
        pieces = next_pieces(stale.values(), tokens)
        assert 0 < sum(piece.end - piece.start for piece in pieces) <= tokens
        assert len({piece.row for piece in pieces}) == len(pieces)
        for piece in pieces:
            one = stale.pop(piece.row)
            assert piece.start == one.done
            assert piece.last == (piece.end == one.length)
            if piece.last:
                finished.append(one.turn)
            else:
                stale[piece.row] = Unfilled(one.row, one.turn, piece.end, one.length)
    assert len(finished) == len(rows)
    assert finished == sorted(finished)


def test_a_chunk_takes_three_quarters_of_a_decode_step_but_20_ms_at_least():
    pace = Pace(4096)
    assert pace.tokens(running=64) == 64, "nothing is measured yet"
    pace.refreshed(100, 0.1)
    assert pace.tokens(running=64) == 20
    pace.decoded(0.4)
    assert pace.tokens(running=64) == 300
    pace.refreshed(300, 100.0)
    for _ in range(40):
        pace.refreshed(16, 10.0)
    assert pace.tokens(running=64) == 16, "one pass over the weights is paid anyway"
    for _ in range(40):
        pace.refreshed(4096, 1e-6)
    assert pace.tokens(running=64) == 4096


def test_only_time_with_rows_to_decode_counts_as_a_pause():
    figures = []
    meter = PauseMeter(figures.append)
    meter.decoded(1.0, 2.0, stale=False)
    meter.idle(3.0)
    meter.swapped(4.0)
    assert not meter.resumed
    meter.idle(5.0)
    assert meter.resumed
    assert [one.pause_seconds for one in figures] == [0.0]
    meter.decoded(6.0, 7.0, stale=False)
    meter.swapped(7.5)
    meter.decoded(9.0, 10.0, stale=True)
    meter.refreshed(5)
    meter.decoded(13.0, 14.0, stale=True)
    assert len(figures) == 1
    meter.decoded(15.0, 16.0, stale=False)
    meter.decoded(90.0, 91.0, stale=False)
    assert (figures[1].pause_seconds, figures[1].refresh_seconds, figures[1].refreshed_tokens) == (3.0, 7.5, 5)
    assert len(figures) == 2
