"""OpenAI's own Python client against the gateway and a real engine."""

import itertools

import openai
import pytest

PROMPT = "the quick brown fox"
CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is xrd"}]


def test_models_are_listed_and_found_and_unknown_ones_are_not(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").object == "model"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("tinier")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_completion_has_choices_log_probs_and_usage(client):
    answer = client.completions.create(model="tiny", prompt=PROMPT, n=2, max_tokens=6, logprobs=2, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage.prompt_tokens == len(PROMPT)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    for choice in answer.choices:
        assert choice.finish_reason in ("length", "stop")
        assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) == len(choice.logprobs.top_logprobs)
        assert max(choice.logprobs.token_logprobs) <= 0


def test_token_ids_go_in_and_come_out_through_the_clients_extras(client):
    extra = {"return_token_ids": True, "ignore_eos": True}
    answer = client.completions.create(model="tiny", prompt=[2, 3, 4], max_tokens=5, seed=2, extra_body=extra)
    (choice,) = answer.choices
    assert choice.model_extra["prompt_token_ids"] == [2, 3, 4]
    assert len(choice.model_extra["token_ids"]) == 5
    assert choice.model_extra["weight_versions"][0]["start"] == 0


def test_chat_answers_as_an_assistant(client):
    answer = client.chat.completions.create(
        model="tiny", messages=CHAT, max_completion_tokens=8, logprobs=True, top_logprobs=2, seed=3
    )
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.refusal is None
    assert choice.message.tool_calls is None
    assert len(choice.logprobs.content) == answer.usage.completion_tokens
    assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)


@pytest.mark.parametrize(
    ("stream", "logprobs", "usage"), list(itertools.product((False, True), (False, True), (False, True)))
)
def test_reason_and_usage_agree_for_every_combination_of_stream_log_probs_and_usage(client, stream, logprobs, usage):
    """G20: finish reasons and usage that streams lose or double."""
    fields = {"model": "tiny", "messages": CHAT, "max_tokens": 9, "seed": 5, "extra_body": {"ignore_eos": True}}
    fields |= {"logprobs": True} if logprobs else {}
    whole = client.chat.completions.create(**fields)
    if not stream:
        assert (whole.usage.completion_tokens, whole.choices[0].finish_reason) == (9, "length")
        return
    chunks = list(client.chat.completions.create(stream=True, stream_options={"include_usage": usage}, **fields))
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert reasons == ["length"]
    usages = [chunk.usage for chunk in chunks if chunk.usage]
    assert usages == ([whole.usage] if usage else [])
    assert len({chunk.id for chunk in chunks}) == 1
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    scored = [
        token for chunk in chunks for choice in chunk.choices if choice.logprobs for token in choice.logprobs.content
    ]
    assert len(scored) == (9 if logprobs else 0)


def test_completion_stream_tells_choices_apart(client):
    fields = {"model": "tiny", "prompt": PROMPT, "n": 3, "max_tokens": 7, "seed": 6, "extra_body": {"ignore_eos": True}}
    whole = client.completions.create(**fields)
    texts = dict.fromkeys(range(3), "")
    for chunk in client.completions.create(stream=True, **fields):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == {choice.index: choice.text for choice in whole.choices}


def test_a_stream_that_is_closed_early_leaves_the_server_well(client):
    fields = {"model": "tiny", "prompt": PROMPT, "max_tokens": 80, "extra_body": {"ignore_eos": True}}
    for _ in range(3):
        stream = client.completions.create(stream=True, **fields)
        next(iter(stream))
        stream.close()
    assert client.completions.create(**fields).usage.completion_tokens == 80


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"model": "tinier"}, openai.NotFoundError, "model"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"n": 0}, openai.BadRequestError, "n"),
        ({"prompt": [99]}, openai.BadRequestError, "prompt"),
        ({"prompt": "x" * 2048}, openai.BadRequestError, "prompt"),
        ({"best_of": 3}, openai.BadRequestError, "best_of"),
    ],
)
def test_mistakes_arrive_as_the_clients_own_errors_that_name_the_field(client, fields, error, param):
    with pytest.raises(error) as caught:
        client.completions.create(**{"model": "tiny", "prompt": "a", "max_tokens": 2, **fields})
    assert caught.value.param == param
    assert caught.value.type == ("not_found_error" if error is openai.NotFoundError else "invalid_request_error")


def test_what_is_not_supported_is_a_named_bad_request(client):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=CHAT, tools=[tool])
    assert caught.value.param == "tools"
