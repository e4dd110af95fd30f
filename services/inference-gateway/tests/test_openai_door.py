"""The OpenAI API through the gateway to a real engine, as plain HTTP."""

import asyncio
import json
import random

import aiohttp
import grpc
import pytest
from aiohttp.test_utils import TestClient, TestServer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from reflux.common.v1.common_pb2 import SamplingParams
from reflux.inference_gateway.v1 import engine_service_pb2 as pb
from reflux.inference_gateway.v1.engine_service_pb2_grpc import EngineServiceStub
from reflux_inference_gateway.engine.http import EngineDoor
from reflux_inference_gateway.engine.openai_request import parse_call
from reflux_inference_gateway.engine.tokenizer import TextTokenizer
from reflux_inference_gateway.engine.types import ModelLimits, sample_seed
from reflux_inference_gateway.openai_errors import ApiError
from reflux_kit import auth

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LIMITS = ModelLimits(vocab_size=40, max_model_len=96)


@pytest.fixture
async def http(fleet):
    async with aiohttp.ClientSession(fleet.gateway.http) as session:
        yield session


async def post(http, path, **fields):
    async with http.post(path, json={"model": "tiny", **fields}) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def events(http, path, **fields):
    """All events of a stream, which must end with [DONE]."""
    async with http.post(path, json={"model": "tiny", "stream": True, **fields}) as response:
        assert response.status == 200, await response.text()
        assert response.headers["Content-Type"].startswith("text/event-stream")
        lines = (await response.text()).strip().split("\n\n")
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def test_completion_has_choices_log_probs_ids_versions_and_usage(http):
    answer = await post(
        http, COMPLETIONS, prompt="abc", n=3, max_tokens=7, seed=4, logprobs=2, return_token_ids=True, ignore_eos=True
    )
    assert (answer["object"], answer["model"]) == ("text_completion", "tiny")
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 21, "total_tokens": 24}
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    for choice in answer["choices"]:
        assert (len(choice["token_ids"]), choice["prompt_token_ids"]) == (7, [2, 3, 4])
        assert choice["finish_reason"] == "length"
        assert choice["weight_versions"] == [{"version": 0, "start": 0, "end": 7}]
        logprobs = choice["logprobs"]
        assert [len(logprobs[key]) for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [7] * 4
        assert all(2 <= len(top) <= 3 and max(top.values()) <= 0 for top in logprobs["top_logprobs"])
        shown = "".join(token for token in logprobs["tokens"] if not token.startswith("<"))
        assert shown == choice["text"]


async def test_prompts_as_text_ids_or_lists_agree(http):
    fields = {"max_tokens": 6, "seed": 9, "return_token_ids": True}
    text = await post(http, COMPLETIONS, prompt="abc", **fields)
    ids = await post(http, COMPLETIONS, prompt=[2, 3, 4], **fields)
    assert text["choices"] == ids["choices"]
    texts = await post(http, COMPLETIONS, prompt=["abc", "b"], n=2, **fields)
    lists = await post(http, COMPLETIONS, prompt=[[2, 3, 4], [3]], n=2, **fields)
    assert texts["choices"] == lists["choices"]
    assert [choice["index"] for choice in texts["choices"]] == [0, 1, 2, 3]
    assert texts["choices"][0]["token_ids"] == text["choices"][0]["token_ids"]
    seed = sample_seed(9, 3) - (1 << 64) * (sample_seed(9, 3) >> 63)
    last = await post(http, COMPLETIONS, prompt=[3], **(fields | {"seed": seed}))
    assert last["choices"][0]["token_ids"] == texts["choices"][3]["token_ids"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("extra", [{}, {"stop": ["b", "xyz", "q."]}])
async def test_stream_says_the_same_as_the_whole_answer(http, path, extra):
    fields = {"n": 3, "max_tokens": 24, "seed": 8, "ignore_eos": True, "return_token_ids": True, **extra}
    fields |= {"prompt": "hello"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "hi"}]}
    fields |= {"logprobs": 1} if path == COMPLETIONS else {"logprobs": True, "top_logprobs": 1}
    whole = await post(http, path, **fields)
    stream = await events(http, path, stream_options={"include_usage": True}, **fields)
    assert stream[-1]["choices"] == []
    assert stream[-1]["usage"] == whole["usage"]
    for index, choice in enumerate(whole["choices"]):
        parts = [event["choices"][0] for event in stream[:-1] if event["choices"][0]["index"] == index]
        text = "".join(part["text"] if path == COMPLETIONS else part["delta"].get("content", "") for part in parts)
        assert text == (choice["text"] if path == COMPLETIONS else choice["message"]["content"])
        assert [token for part in parts for token in part.get("token_ids", [])] == choice["token_ids"]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [choice["finish_reason"]]
        assert parts[-1]["finish_reason"]
        if path == COMPLETIONS:
            values = [value for part in parts if part["logprobs"] for value in part["logprobs"]["token_logprobs"]]
            assert values == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-4)
        else:
            assert parts[0]["delta"]["role"] == "assistant"
    stops = extra.get("stop", [])
    assert {event["object"] for event in stream} == {
        "text_completion" if path == COMPLETIONS else "chat.completion.chunk"
    }
    assert not any(stop in text for stop in stops)


async def test_prompt_log_probs_come_with_rank_and_text_for_every_token_after_the_first(http):
    fields = {"prompt": [[2, 3, 4, 5], [3]], "max_tokens": 2, "n": 2, "seed": 4, "prompt_logprobs": 1}
    answer = await post(http, COMPLETIONS, **fields)
    assert [len(choice["prompt_logprobs"]) for choice in answer["choices"]] == [4, 4, 1, 1]
    first, *scored = answer["choices"][0]["prompt_logprobs"]
    assert first is None
    for token, scores in zip((3, 4, 5), scored, strict=True):
        assert scores[str(token)]["decoded_token"] == "abcd"[token - 2]
        assert 1 in {one["rank"] for one in scores.values()}
        assert all(one["logprob"] <= 0 for one in scores.values())
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "prompt_logprobs": 0}
    (choice,) = (await post(http, CHAT, **chat))["choices"]
    assert len(choice["prompt_logprobs"]) > 2


async def test_min_p_of_one_leaves_the_best_token_only(http):
    fields = {"prompt": "abc", "max_tokens": 9, "return_token_ids": True}
    narrow = await post(http, COMPLETIONS, **fields, min_p=1.0, seed=5)
    greedy = await post(http, COMPLETIONS, **fields, temperature=0)
    assert narrow["choices"][0]["token_ids"] == greedy["choices"][0]["token_ids"]


async def test_stop_string_ends_the_text_before_it(http):
    free = await post(http, COMPLETIONS, prompt="abc", max_tokens=60, seed=2, ignore_eos=True)
    text = free["choices"][0]["text"]
    stop = text[5:7]
    stopped = await post(http, COMPLETIONS, prompt="abc", max_tokens=60, seed=2, ignore_eos=True, stop=stop)
    choice = stopped["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text[: text.index(stop)], "stop")
    assert stopped["usage"]["completion_tokens"] < 60


async def test_chat_uses_the_whole_context_by_default_and_counts_the_prompt(http):
    answer = await post(http, CHAT, messages=[{"role": "user", "content": "hi"}], seed=1, ignore_eos=True)
    usage = answer["usage"]
    assert usage["total_tokens"] == 96
    assert answer["choices"][0]["message"]["role"] == "assistant"


BAD = [
    (COMPLETIONS, {}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": 7}, "prompt"),
    (COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
    (COMPLETIONS, {"prompt": [40]}, "prompt"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt"),
    (COMPLETIONS, {"prompt": [2] * 96}, "prompt"),
    (COMPLETIONS, {"prompt": "a", "n": 0}, "n"),
    (COMPLETIONS, {"prompt": "a", "n": 1_000_000}, "n"),
    (COMPLETIONS, {"prompt": ["a"] * 40, "n": 40}, "n"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 96}, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": "9"}, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature"),
    (COMPLETIONS, {"prompt": "a", "temperature": True}, "temperature"),
    (COMPLETIONS, {"prompt": "a", "top_p": 1.5}, "top_p"),
    (COMPLETIONS, {"prompt": "a", "top_k": 1.5}, "top_k"),
    (COMPLETIONS, {"prompt": "a", "min_p": 1.5}, "min_p"),
    (COMPLETIONS, {"prompt": "a", "min_p": "x"}, "min_p"),
    (COMPLETIONS, {"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs"),
    (COMPLETIONS, {"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    (COMPLETIONS, {"prompt": "a", "cache_salt": 5}, "cache_salt"),
    (COMPLETIONS, {"prompt": "a", "kv_transfer_params": 5}, "kv_transfer_params"),
    (COMPLETIONS, {"prompt": ["a", "b"], "kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
    (COMPLETIONS, {"prompt": "a", "kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params"),
    (
        COMPLETIONS,
        {"prompt": "a", "kv_transfer_params": {"do_remote_decode": True}, "stream": True},
        "kv_transfer_params",
    ),
    (COMPLETIONS, {"prompt": "a", "seed": "x"}, "seed"),
    (COMPLETIONS, {"prompt": "a", "stop": [""]}, "stop"),
    (COMPLETIONS, {"prompt": "a", "stop": ["x"] * 17}, "stop"),
    (COMPLETIONS, {"prompt": "a", "stop_token_ids": ["x"]}, "stop_token_ids"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs"),
    (COMPLETIONS, {"prompt": "a", "echo": True}, "echo"),
    (COMPLETIONS, {"prompt": "a", "best_of": 3}, "best_of"),
    (COMPLETIONS, {"prompt": "a", "stream": 1}, "stream"),
    (COMPLETIONS, {"prompt": "a", "stream_options": 3}, "stream_options"),
    (CHAT, {}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": ["hi"]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 96}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}, "tools"),
]


async def test_every_bad_field_is_named_with_status_400(http):
    for path, fields, name in BAD:
        async with http.post(path, json={"model": "tiny", **fields}) as response:
            error = (await response.json())["error"]
        assert (response.status, error["param"]) == (400, name), fields
        assert error["type"] == "invalid_request_error"
    async with http.post(COMPLETIONS, json={"model": "tinier", "prompt": "a"}) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (404, "model_not_found")


async def test_many_clients_get_their_own_answers(http):
    alone = [await post(http, COMPLETIONS, prompt=[2 + i], max_tokens=8, seed=i) for i in range(12)]
    order = list(range(12)) * 3
    random.Random(1).shuffle(order)
    together = await asyncio.gather(*(post(http, COMPLETIONS, prompt=[2 + i], max_tokens=8, seed=i) for i in order))
    for index, answer in zip(order, together, strict=True):
        assert answer["choices"][0]["text"] == alone[index]["choices"][0]["text"]


async def test_every_engine_method_answers_empty_and_random_requests_with_a_status(fleet):
    draw = random.Random(3)
    messages = [b""] + [draw.randbytes(draw.randint(1, 40)) for _ in range(12)]
    address = fleet.engines[0].log.read_text().partition("gRPC on ")[2].split()[0]
    allowed = {"OK", "INVALID_ARGUMENT", "NOT_FOUND"}
    async with grpc.aio.insecure_channel(address) as channel:
        stub = EngineServiceStub(channel)
        for method in pb.DESCRIPTOR.services_by_name["EngineService"].methods:
            call = getattr(stub, method.name)
            call._request_serializer = bytes
            for raw in messages:
                assert await code_of(call, raw, streams=method.server_streaming) in allowed
    assert "Traceback" not in fleet.engines[0].log.read_text()


async def test_alternatives_and_prompt_log_probs_cross_grpc_too(fleet):
    address = fleet.engines[0].log.read_text().partition("gRPC on ")[2].split()[0]
    sampling = SamplingParams(max_tokens=4, seed=5, top_logprobs=2, prompt_logprobs=0, ignore_eos=True, temperature=1)
    request = pb.GenerateRequest(
        request_id="alternatives", prompt_token_ids=[2, 3, 4], num_samples=1, sampling=sampling
    )
    async with grpc.aio.insecure_channel(address) as channel:
        stub = EngineServiceStub(channel)
        ((sample,),) = [answer.samples async for answer in stub.Generate(request, timeout=20)]
        scored = await stub.ScorePrompt(pb.ScorePromptRequest(token_ids=[2, 3, 4]), timeout=20)
    assert [list(scores.token_ids) for scores in sample.prompt_scores] == [[3], [4]]
    assert [scores.logprobs[0] for scores in sample.prompt_scores] == pytest.approx(list(scored.logprobs), abs=1e-5)
    for token, logprob, top in zip(sample.token_ids, sample.logprobs, sample.top_logprobs, strict=True):
        assert len(top.token_ids) == 2
        assert max(top.logprobs) >= logprob
        if token in top.token_ids:
            assert dict(zip(top.token_ids, top.logprobs, strict=True))[token] == pytest.approx(logprob, abs=1e-5)


async def code_of(call, raw, *, streams):
    try:
        if streams:
            stream = call(raw, timeout=5)
            await stream.read()
            stream.cancel()
        else:
            await call(raw, timeout=5)
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


def test_chat_template_of_the_tokenizer_is_used_and_may_refuse(model_folder, tmp_path):
    for path in model_folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    template = (
        "{% for m in messages %}{% if m.role == 'odd' %}{{ raise_exception('no odd role') }}{% endif %}"
        "{{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}ab{% endif %}"
    )
    config = {"eos_token": {"content": "<eos>"}, "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = TextTokenizer(tmp_path)
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "cd"}]}], "max_tokens": 3}
    call = parse_call("chat", json.dumps(body).encode(), "tiny", tokenizer, LIMITS)
    assert tokenizer.decode(call.prompts[0]) == "cdab"
    assert 1 in call.prompts[0]
    body["messages"][0]["role"] = "odd"
    with pytest.raises(ApiError, match="no odd role"):
        parse_call("chat", json.dumps(body).encode(), "tiny", tokenizer, LIMITS)


def test_a_text_outside_a_closed_vocabulary_is_a_bad_request(tmp_path):
    words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1, "Ti": 2}, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    words.save(str(tmp_path / "tokenizer.json"))
    tokenizer = TextTokenizer(tmp_path)
    assert tokenizer.encode("Ti Ti") == [2, 2]
    for prompt in ("Ti Unobtainium", ["Ti", "Unobtainium"]):
        body = json.dumps({"model": "tiny", "prompt": prompt, "max_tokens": 2}).encode()
        with pytest.raises(ApiError) as caught:
            parse_call("completion", body, "tiny", tokenizer, LIMITS)
        assert (caught.value.status, caught.value.param) == (400, "prompt")


def test_without_a_template_roles_are_prefixed_lines(model_folder):
    tokenizer = TextTokenizer(model_folder)
    prompt = tokenizer.chat_prompt([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(prompt).startswith("user")


def test_unknown_fields_are_ignored_and_neutral_ones_accepted(model_folder):
    body = {"model": "tiny", "prompt": "ab", "cache_salt": "x", "priority": 3, "user": "me"}
    body |= {"presence_penalty": 0, "frequency_penalty": 0.0, "echo": False, "best_of": 1, "logit_bias": None}
    call = parse_call("completion", json.dumps(body).encode(), "tiny", TextTokenizer(model_folder), LIMITS)
    assert (call.num_samples, call.sampling.max_tokens, call.logprobs) == (1, 16, False)


def test_engine_door_serves_the_routes_of_other_engines():
    routes = {
        resource.canonical for resource in EngineDoor(*[None] * 4, "", 1024, None).application().router.resources()
    }
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/health"} <= routes


async def test_an_engine_refuses_tokens_of_other_runs():
    secret = "a secret of the stack, long enough"
    door = EngineDoor(None, None, LIMITS, "mine", secret, 1024, None)
    async with TestClient(TestServer(door.application())) as client:
        for run, status in (("mine", 200), ("other", 403), ("", 200)):
            headers = {"Authorization": f"Bearer {auth.mint(secret, 'researcher', run=run)}"}
            async with client.get("/v1/models", headers=headers) as response:
                assert response.status == status
