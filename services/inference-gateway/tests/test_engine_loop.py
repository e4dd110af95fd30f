import asyncio

import pytest
import torch

from reflux_inference_gateway.engine.core import CoreOptions, EngineCore, Weights
from reflux_inference_gateway.engine.loop import EngineLoop
from reflux_inference_gateway.engine.types import EngineStopped, GroupRequest, QueueFull, Sampling
from reflux_inference_gateway.engine.weights import layout_of, views
from reflux_model.folder import load_folder


def new_loop(folder, *, max_rows=8, max_open_samples=64, on_failure=lambda reason: None):
    config, params = load_folder(folder)
    options = CoreOptions(max_rows=max_rows, max_model_len=96)
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
