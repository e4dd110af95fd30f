"""A prompt computed by one engine and decoded by another: the same bits, or computed again."""

import contextlib

import pytest
import torch
from aiohttp.test_utils import TestClient, TestServer

from reflux_inference_gateway.engine.core import EngineCore
from reflux_inference_gateway.engine.handover import HandoverFailed, KvExchange
from reflux_inference_gateway.engine.http import EngineDoor
from reflux_inference_gateway.engine.legs import Legs
from reflux_inference_gateway.engine.loop import EngineLoop
from reflux_inference_gateway.engine.served import CoreOptions, Weights
from reflux_inference_gateway.engine.tokenizer import TextTokenizer
from reflux_inference_gateway.engine.types import ComputedPrompt, GroupRequest, ModelLimits, Sampling
from reflux_model.cache import PrefixKV
from reflux_model.folder import load_folder
from reflux_transfer.handles import Scope
from reflux_transfer.registry import open_backend

from .engine_harness import Harness, group

PROMPT = [2 + at % 38 for at in range(40)]
TWO = torch.tensor([2])


def asked(name, n=3, **fields):
    return GroupRequest(
        request_id=name, prompt_ids=tuple(PROMPT), num_samples=n, sampling=Sampling(max_tokens=12, seed=7), **fields
    )


def exchange(config, *, limit=1 << 20, clock=lambda: 0.0, run="tiny"):
    return KvExchange(
        config, torch.float32, open_backend, "shm", Scope(run), limit_bytes=limit, lease_seconds=30.0, clock=clock
    )


@pytest.fixture
def pair(model_folder):
    """A prefill engine that has computed the prompt, its exchange, and that of another engine."""
    engine = Harness(model_folder)
    ((sample,),) = engine.run(asked("p", n=1, hand_over=True))
    with contextlib.closing(exchange(engine.config)) as here, contextlib.closing(exchange(engine.config)) as there:
        yield sample.computed, here, there


@pytest.mark.parametrize("chunk", [16, 64])
def test_decoding_elsewhere_gives_the_bits_of_one_engine(model_folder, chunk):
    (whole,) = Harness(model_folder, prefill_tokens=chunk).run(asked("whole"))
    prefill = Harness(model_folder, prefill_tokens=chunk)
    ((first,),) = prefill.run(asked("p", n=1, hand_over=True))
    with contextlib.closing(exchange(prefill.config)) as here, contextlib.closing(exchange(prefill.config)) as there:
        given = there.fetch(PROMPT, here.offer(PROMPT, first.computed))
    decode = Harness(model_folder, prefill_tokens=chunk)
    (samples,) = decode.run(asked("d", given=given))
    assert decode.core.filler.prompt_tokens == 0, "nothing of the prompt is computed here"
    assert [(one.token_ids, one.logprobs) for one in samples] == [(one.token_ids, one.logprobs) for one in whole]
    assert [one.spans for one in samples] == [one.spans for one in whole]


def test_keys_and_values_of_other_weights_are_not_used(model_folder, pair):
    computed, _, _ = pair
    decode = Harness(model_folder)
    (samples,) = decode.run(asked("d", given=ComputedPrompt(computed.kv, computed.epoch + 1)))
    assert decode.core.filler.prompt_tokens == len(PROMPT) - 1
    decode.core.submit(asked("waits", given=computed))
    decode.core.swap(Weights(decode.params, 2, 11))
    before = decode.core.prompts.reused_tokens
    decode.run()
    assert [decode.samples["waits"][i].token_ids for i in range(3)] == [one.token_ids for one in samples]
    assert decode.core.prompts.reused_tokens == before, "a swap came before it had a row"


def test_what_is_not_as_the_ticket_says_is_refused(pair):
    computed, here, there = pair
    ticket = here.offer(PROMPT, computed)
    assert torch.equal(there.fetch(PROMPT, ticket).kv.keys, computed.kv.keys)
    assert torch.equal(there.fetch(PROMPT, ticket).kv.values, computed.kv.values)
    wrong = [
        {"generation": ticket["generation"] ^ 1},
        {"checksum": "0" * 16},
        {"positions": 3},
        {"handle": "AAAA"},
        {"handle": 7},
        {"backend": "pigeon"},
        {"epoch": "x"},
    ]
    for fields in wrong:
        with pytest.raises(HandoverFailed):
            there.fetch(PROMPT, ticket | fields)
    for broken in ({}, {"prompt": ticket["prompt"]}):
        with pytest.raises(HandoverFailed):
            there.fetch(PROMPT, broken)
    with pytest.raises(HandoverFailed, match="another prompt"):
        there.fetch([*PROMPT[:-1], 9], ticket)
    region, _ = here._offers[ticket["generation"]]
    region.view[100] ^= 1
    with pytest.raises(HandoverFailed, match="not those that were offered"):
        there.fetch(PROMPT, ticket)
    assert here.release(ticket["generation"])
    assert not here.release(ticket["generation"])
    with pytest.raises(HandoverFailed):
        there.fetch(PROMPT, ticket)


def test_another_run_cannot_read_it(model_folder, pair):
    computed, here, _ = pair
    config, _ = load_folder(model_folder)
    ticket = here.offer(PROMPT, computed)
    with (
        contextlib.closing(exchange(config, run="other")) as stranger,
        pytest.raises(HandoverFailed, match="WrongHandle"),
    ):
        stranger.fetch(PROMPT, ticket)


def test_offers_end_with_their_lease_and_what_does_not_fit_is_refused(model_folder, pair):
    computed, _, there = pair
    config, _ = load_folder(model_folder)
    now = [0.0]
    length = 64 + 2 * computed.kv.keys.numel() * 4
    with contextlib.closing(exchange(config, limit=2 * length, clock=lambda: now[0])) as here:
        tickets = [here.offer(PROMPT, computed) for _ in range(2)]
        assert here.held_bytes == 2 * length
        with pytest.raises(MemoryError):
            here.offer(PROMPT, computed)
        for ticket in tickets:
            there.fetch(PROMPT, ticket)
        assert here.release(tickets[0]["generation"])
        last = here.offer(PROMPT, computed)
        now[0] = 31.0
        assert here.expire() == 2
        assert here.held_bytes == 0
        with pytest.raises(HandoverFailed):
            there.fetch(PROMPT, last)
        there.fetch(PROMPT, here.offer(PROMPT, computed))


def test_a_prompt_that_is_larger_than_all_offers_may_be_is_not_offered_and_drives_none_out(model_folder):
    engine = Harness(model_folder)
    ((long,),) = engine.run(asked("p", n=1, hand_over=True))
    short = ComputedPrompt(PrefixKV(long.computed.kv.keys[..., :2, :], long.computed.kv.values[..., :2, :], TWO), 0)
    with contextlib.closing(exchange(engine.config, limit=64 + long.computed.kv.keys.numel() * 4)) as here:
        kept = here.offer(PROMPT[:3], short)
        with pytest.raises(MemoryError):
            here.offer(PROMPT, long.computed)
        assert list(here._offers) == [kept["generation"]]


async def test_two_doors_hand_a_prompt_over_as_vllm_does(model_folder):
    config, params = load_folder(model_folder)
    options = CoreOptions(max_rows=8, max_model_len=96, kv_tokens=8 * 96)
    body = {"model": "tiny", "prompt": PROMPT, "seed": 5, "n": 2, "logprobs": 0, "return_token_ids": True}
    async with contextlib.AsyncExitStack() as stack:
        clients, loops = [], []
        for _ in range(2):
            loops.append(
                await stack.enter_async_context(
                    EngineLoop(
                        lambda deliver: EngineCore(config, Weights(params, 0, 0), options, deliver),
                        max_open_samples=64,
                        on_failure=lambda reason: None,
                    )
                )
            )
            kv = stack.enter_context(contextlib.closing(exchange(config)))
            limits = ModelLimits(vocab_size=40, max_model_len=96)
            door = EngineDoor(loops[-1], TextTokenizer(model_folder), limits, "tiny", "", 1 << 20, Legs(loops[-1], kv))
            clients.append(await stack.enter_async_context(TestClient(TestServer(door.application()))))

        async def ask(client, **fields):
            async with client.post("/v1/completions", json=body | fields) as response:
                assert response.status == 200, await response.text()
                return await response.json()

        leg = {"n": 1, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        params_of_leg = (await ask(clients[0], **leg))["kv_transfer_params"]
        assert params_of_leg["do_remote_prefill"] is True
        decoded = await ask(clients[1], max_tokens=9, kv_transfer_params=params_of_leg)
        assert loops[1].load().prefilled_tokens == 0
        whole = await ask(clients[0], max_tokens=9)
        assert decoded["choices"] == whole["choices"]
        params_of_leg["reflux"]["checksum"] = "0" * 16
        again = await ask(clients[1], max_tokens=9, kv_transfer_params=params_of_leg)
        assert [one["token_ids"] for one in again["choices"]] == [one["token_ids"] for one in whole["choices"]]
        assert loops[1].load().prefilled_tokens == len(PROMPT) - 1, "it is computed here instead"


def test_a_handed_over_prompt_serves_a_group_larger_than_the_batch(model_folder, pair):
    computed, _, _ = pair
    decode = Harness(model_folder, max_rows=2)
    (samples,) = decode.run(asked("d", n=5, given=computed))
    assert decode.core.filler.prompt_tokens == 0
    (alone,) = Harness(model_folder).run(group("a", PROMPT, 5))
    assert [one.token_ids for one in samples] == [one.token_ids for one in alone]
