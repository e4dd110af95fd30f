import asyncio
import threading

import pytest
import torch

from reflux_inference_gateway.engine.core import EngineCore
from reflux_inference_gateway.engine.holding import layout_of, views
from reflux_inference_gateway.engine.loop import EngineLoop
from reflux_inference_gateway.engine.probing import fingerprint_of, live_fingerprint
from reflux_inference_gateway.engine.served import CoreOptions, Weights
from reflux_inference_gateway.engine.types import EngineStopped, GroupRequest, QueueFull, Sampling
from reflux_kit.errors import Unavailable
from reflux_model.folder import load_folder
from reflux_model.training import logprobs
from reflux_transfer import fingerprint


def new_loop(folder, *, max_rows=8, max_open_samples=64, on_failure=lambda reason: None):
    config, params = load_folder(folder)
    options = CoreOptions(max_rows=max_rows, max_model_len=96, kv_tokens=96 * max_rows)
    return EngineLoop(
        lambda deliver: EngineCore(config, Weights(params, 0, 0), options, deliver, eos_ids=[1]),
        max_open_samples=max_open_samples,
        on_failure=on_failure,
    )


def request(name, n=2, max_tokens=8, **fields):
    sampling = Sampling(max_tokens=max_tokens, seed=5, ignore_eos=True)
    return GroupRequest(request_id=name, prompt_ids=(4, 5), num_samples=n, sampling=sampling, **fields)


async def finish(loop, one):
    return [event async for batch in loop.generate(one) for event in batch]


async def test_groups_of_many_callers_all_finish_and_the_load_returns_to_zero(model_folder):
    async with new_loop(model_folder) as loop:
        results = await asyncio.gather(*(finish(loop, request(f"r{i}")) for i in range(20)))
        assert all(len(events) == 2 for events in results)
        load = loop.load()
        assert (load.running, load.waiting, load.pending_tokens) == (0, 0, 0)
        assert load.generated_tokens == 20 * 2 * 8


async def test_swap_takes_effect_between_steps_and_frees_the_old_weights(model_folder):
    _, params = load_folder(model_folder)
    layout = layout_of(params)
    arena = memoryview(bytearray(layout.region_bytes))
    for slot in layout.slots:
        arena[slot.offset : slot.end] = params[slot.name].flatten().view(torch.uint8).numpy().tobytes()
    fresh = views(layout, arena)
    assert all(torch.equal(fresh[name], params[name]) for name in params)
    async with new_loop(model_folder) as loop:
        before = await finish(loop, request("before"))
        pause_ms = await asyncio.wrap_future(loop.swap(Weights(fresh, 7, 70)))
        after = await finish(loop, request("after"))
        assert pause_ms >= 0
        assert [event.token_ids for event in after] == [event.token_ids for event in before]
        assert {(span.version, span.start, span.end) for event in after for span in event.spans} == {(7, 0, 8)}
        assert (loop.load().version, loop.load().epoch) == (7, 70)


async def test_queue_is_bounded_and_an_id_may_come_again(model_folder):
    async with new_loop(model_folder, max_rows=1, max_open_samples=4) as loop:
        task = asyncio.create_task(finish(loop, request("a", n=3, max_tokens=90)))
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await finish(loop, request("b", n=2))
        assert len(await finish(loop, request("a", n=1))) == 1  # the same id again is another group
        assert len(await task) == 3
        assert len(await finish(loop, request("big", n=9))) == 9  # larger than the bound, but nothing else is open


async def test_closing_the_iterator_aborts_the_group(model_folder):
    async with new_loop(model_folder, max_rows=2) as loop:
        events = loop.generate(request("a", n=6, max_tokens=90, stream_tokens=True))
        await anext(events)
        await events.aclose()
        assert len(await finish(loop, request("b"))) == 2
        assert loop.load().running == 0
        assert loop.load().generated_tokens < 6 * 90


async def test_stopping_ends_open_groups_with_an_error(model_folder):
    loop = new_loop(model_folder, max_rows=1)
    async with loop:
        events = loop.generate(request("a", n=40, max_tokens=90))
        await anext(events)
    with pytest.raises(EngineStopped):
        async for _ in events:
            pass
    with pytest.raises(EngineStopped):
        await finish(loop, request("late"))


async def test_failure_of_the_thread_reaches_every_caller_and_the_owner(model_folder):
    told = []
    async with new_loop(model_folder, on_failure=told.append) as loop:
        await asyncio.wrap_future(loop.swap(Weights({}, 1, 1)))
        for name in ("running", "late"):
            with pytest.raises(EngineStopped, match="KeyError"):
                await finish(loop, request(name))
        assert [reason.split(":")[0] for reason in told] == ["KeyError"]
        assert loop.failure == told[0]


async def test_a_fill_runs_while_nothing_decodes_and_counts_as_the_pause(model_folder):
    async with new_loop(model_folder) as loop:
        before = await finish(loop, request("before"))
        weights, seen = loop.weights, []

        def fill():
            seen.append((threading.current_thread().name, loop.writes % 2))
            for tensor in weights.params.values():
                tensor.mul_(1.0)

        running = asyncio.create_task(finish(loop, request("running", n=8, max_tokens=80)))
        await asyncio.sleep(0)
        pause_ms = await asyncio.wrap_future(loop.swap(Weights(weights.params, 1, 11), fill))
        assert seen == [("engine", 1)]
        assert loop.writes % 2 == 0
        assert pause_ms >= 0
        assert len(await running) == 8
        assert [one.token_ids for one in await finish(loop, request("after"))] == [one.token_ids for one in before]


async def test_weights_that_did_not_arrive_end_all_requests_until_others_do(model_folder):
    async with new_loop(model_folder, max_rows=2) as loop:
        weights = loop.weights

        def broken():
            raise ConnectionError("the source is gone")

        open_groups = [loop.generate(request(f"g{i}", n=3, max_tokens=90, stream_tokens=True)) for i in range(3)]
        await anext(open_groups[0])
        others = [asyncio.create_task(anext(events)) for events in open_groups[1:]]
        await asyncio.sleep(0)
        with pytest.raises(ConnectionError):
            await asyncio.wrap_future(loop.swap(Weights(weights.params, 1, 11), broken))
        assert "the source is gone" in (loop.unfit or "")
        for one in (drain(open_groups[0]), *others, finish(loop, request("late"))):
            with pytest.raises(EngineStopped, match="mixture"):
                await one
        with pytest.raises(EngineStopped, match="mixture"):
            await asyncio.wrap_future(loop.score([3, 4, 5]))
        with pytest.raises(Unavailable, match="mixture"):
            await live_fingerprint(loop)
        assert (loop.load().running, loop.load().waiting, loop.load().version) == (0, 0, 0)
        await asyncio.wrap_future(loop.swap(Weights(weights.params, 2, 12), lambda: None))
        assert loop.unfit is None
        assert len(await finish(loop, request("again"))) == 2


async def drain(events):
    async for _ in events:
        pass


async def test_a_prompt_is_scored_between_steps_as_the_learner_scores_it(model_folder):
    config, params = load_folder(model_folder)
    (expected,) = logprobs(params, config, [[4]], [[[5, 6, 7, 8]]])
    async with new_loop(model_folder) as loop:
        running = asyncio.create_task(finish(loop, request("running", n=4, max_tokens=60)))
        scored = await asyncio.wrap_future(loop.score([4, 5, 6, 7, 8]))
        assert scored.logprobs == pytest.approx(expected.tolist(), abs=1e-6)
        assert (scored.version, scored.epoch) == (0, 0)
        assert len(await running) == 4


async def test_the_fingerprint_is_that_of_the_bytes_whatever_their_type(model_folder):
    for dtype in (torch.float32, torch.bfloat16):
        _, params = load_folder(model_folder, dtype=dtype)
        layout = layout_of(params)
        arena = memoryview(bytearray(layout.region_bytes))
        for name, place in views(layout, arena).items():
            place.copy_(params[name])
        assert fingerprint_of(params) == fingerprint.of(arena, layout)
        params["model.norm.weight"][0] += 1.0
        assert fingerprint_of(params) != fingerprint.of(arena, layout)


async def test_questions_to_an_engine_that_ended_are_answered_with_its_reason(model_folder):
    loop = new_loop(model_folder)
    async with loop:
        pass
    for question in (loop.score([3, 4]), loop.swap(loop.weights)):
        with pytest.raises(EngineStopped, match="the engine stops"):
            await asyncio.wrap_future(question)
