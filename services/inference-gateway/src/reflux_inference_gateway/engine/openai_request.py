"""OpenAI request bodies to engine requests; every refusal names the field. Pure apart from the tokenizer."""

import json
import math
import random
from dataclasses import dataclass
from typing import Any, Literal

from reflux_inference_gateway.engine.tokenizer import TextTokenizer
from reflux_inference_gateway.engine.types import ModelLimits, Sampling
from reflux_inference_gateway.openai_errors import ApiError

Kind = Literal["completion", "chat"]
_MAX_STOPS = 16
_MAX_LOGPROBS = 20
_DEFAULT_COMPLETION_TOKENS = 16
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "logit_bias": (None, {}),
    "suffix": (None, ""),
    "echo": (False, None),
    "tools": (None, []),
    "response_format": (None, {"type": "text"}),
    "guided_json": (None,),
}


@dataclass(frozen=True, kw_only=True)
class CompletionCall:
    """A checked OpenAI request: one or more prompts, n samples each."""

    kind: Kind
    prompts: list[tuple[int, ...]]
    num_samples: int
    sampling: Sampling
    logprobs: bool
    stream: bool
    include_usage: bool
    return_token_ids: bool
    cache_salt: str = ""
    hand_over: bool = False
    """The answer brings a ticket for what was computed of the prompt."""
    ticket: dict[str, Any] | None = None
    """What another engine computed of the prompt."""


def parse_call(kind: Kind, body: bytes, model_id: str, tokenizer: TextTokenizer, limits: ModelLimits) -> CompletionCall:
    """Checks a body against the model's limits; raises ApiError 400 or 404. Fields that nobody knows are ignored."""
    fields = _json_object(body)
    if fields.get("model") not in (model_id, None):
        raise ApiError(404, f"the model {fields['model']!r:.200} does not exist", param="model", code="model_not_found")
    for name, neutral in _NEUTRAL.items():
        if name in fields and fields[name] not in neutral:
            raise ApiError(400, f"{name} is not supported by this engine", param=name, code="unsupported_parameter")
    prompts = _prompts(fields, tokenizer) if kind == "completion" else [_chat_prompt(fields, tokenizer)]
    for prompt in prompts:
        _check_prompt(prompt, limits, "prompt" if kind == "completion" else "messages")
    num_samples = _integer(fields, "n", 1, 1, limits.max_samples)
    if len(prompts) * num_samples > limits.max_samples:
        raise ApiError(400, f"prompts x n must be at most {limits.max_samples}", param="n")
    if fields.get("best_of") not in (None, num_samples):
        raise ApiError(400, "best_of must equal n", param="best_of")
    stream = _boolean(fields, "stream")
    options = fields.get("stream_options") or {}
    if not isinstance(options, dict):
        raise ApiError(400, "stream_options must be an object", param="stream_options")
    logprobs, top = _logprobs(kind, fields)
    return CompletionCall(
        kind=kind,
        prompts=prompts,
        num_samples=num_samples,
        sampling=_sampling(kind, fields, limits, max(map(len, prompts)), top),
        logprobs=logprobs,
        stream=stream,
        include_usage=_boolean(options, "include_usage"),
        return_token_ids=_boolean(fields, "return_token_ids"),
        cache_salt=_salt(fields),
        hand_over=_hand_over(fields, len(prompts)),
        ticket=_ticket(fields, len(prompts)),
    )


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return fields


def _prompts(fields: dict[str, Any], tokenizer: TextTokenizer) -> list[tuple[int, ...]]:
    try:
        return _encoded(fields.get("prompt"), tokenizer)
    except ValueError as error:
        raise ApiError(400, str(error), param="prompt") from error


def _encoded(prompt: object, tokenizer: TextTokenizer) -> list[tuple[int, ...]]:
    if isinstance(prompt, str):
        return [tuple(tokenizer.encode(prompt))]
    if isinstance(prompt, list) and prompt:
        if all(_is_id(token) for token in prompt):
            return [tuple(prompt)]
        if all(isinstance(text, str) for text in prompt):
            return [tuple(tokenizer.encode(text)) for text in prompt]
        if all(isinstance(ids, list) and all(_is_id(token) for token in ids) for ids in prompt):
            return [tuple(ids) for ids in prompt]
    raise ApiError(400, "prompt must be a text, a list of token ids, or a non-empty list of either", param="prompt")


def _chat_prompt(fields: dict[str, Any], tokenizer: TextTokenizer) -> tuple[int, ...]:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages must be a non-empty list", param="messages")
    try:
        return tuple(tokenizer.chat_prompt([_message(index, message) for index, message in enumerate(messages)]))
    except ValueError as error:
        raise ApiError(400, str(error), param="messages") from error


def _message(index: int, message: object) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ApiError(400, f"messages[{index}] needs a role", param=f"messages[{index}].role")
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_text_part(index, part) for part in content)
    if not isinstance(content, str):
        raise ApiError(400, f"messages[{index}] needs content", param=f"messages[{index}].content")
    return {**message, "content": content}


def _text_part(index: int, part: object) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise ApiError(400, "only text content is supported", param=f"messages[{index}].content")
    return text


def _check_prompt(prompt: tuple[int, ...], limits: ModelLimits, field: str) -> None:
    if not prompt:
        raise ApiError(400, f"{field} holds no token", param=field)
    if max(prompt) >= limits.vocab_size or min(prompt) < 0:
        raise ApiError(400, f"{field} holds ids outside 0 to {limits.vocab_size - 1}", param=field)
    if len(prompt) >= limits.max_model_len:
        raise ApiError(
            400,
            f"{field} has {len(prompt)} tokens; the context holds {limits.max_model_len} with at least one generated",
            param=field,
            code="context_length_exceeded",
        )


def _sampling(kind: Kind, fields: dict[str, Any], limits: ModelLimits, longest: int, top: int) -> Sampling:
    room = limits.max_model_len - longest
    name = "max_completion_tokens" if fields.get("max_completion_tokens") is not None else "max_tokens"
    default = min(room, _DEFAULT_COMPLETION_TOKENS) if kind == "completion" else room
    max_tokens = _integer(fields, name, default, 1, 1 << 31)
    if max_tokens > room:
        raise ApiError(
            400,
            f"{name} {max_tokens} and {longest} prompt tokens exceed the context of {limits.max_model_len}",
            param=name,
            code="context_length_exceeded",
        )
    seed = fields.get("seed")
    return Sampling(
        max_tokens=max_tokens,
        temperature=_number(fields, "temperature", 1.0, 0.0, 100.0),
        top_p=_number(fields, "top_p", 1.0, 0.0, 1.0) or 1.0,
        top_k=max(0, _integer(fields, "top_k", 0, -1, 1 << 31)),
        min_p=_number(fields, "min_p", 0.0, 0.0, 1.0),
        seed=random.getrandbits(63) if seed is None else _integer(fields, "seed", 0, -(1 << 63), (1 << 64) - 1),
        stop_token_ids=_stop_ids(fields),
        stops=_stops(fields),
        ignore_eos=_boolean(fields, "ignore_eos"),
        top_logprobs=top,
        prompt_logprobs=_prompt_logprobs(fields),
    )


def _logprobs(kind: Kind, fields: dict[str, Any]) -> tuple[bool, int]:
    """Whether log-probs are wanted, and how many alternatives per position."""
    if kind == "chat":
        return _boolean(fields, "logprobs"), _integer(fields, "top_logprobs", 0, 0, _MAX_LOGPROBS)
    wanted = fields.get("logprobs")
    if wanted is None or wanted is False:
        return False, 0
    return True, 1 if wanted is True else _integer(fields, "logprobs", 0, 0, _MAX_LOGPROBS)


def _prompt_logprobs(fields: dict[str, Any]) -> int | None:
    """As in vLLM: how many alternatives per prompt token; not while streaming, since they come before any token."""
    if fields.get("prompt_logprobs") is None:
        return None
    if fields.get("stream"):
        raise ApiError(400, "prompt_logprobs are not available with stream", param="prompt_logprobs")
    return _integer(fields, "prompt_logprobs", 0, 0, _MAX_LOGPROBS)


def _salt(fields: dict[str, Any]) -> str:
    salt = fields.get("cache_salt") or ""
    if not isinstance(salt, str):
        raise ApiError(400, f"cache_salt must be a text, got {salt!r:.40}", param="cache_salt")
    return salt


def _transfer(fields: dict[str, Any], num_prompts: int) -> dict[str, Any]:
    """As in vLLM: `do_remote_decode` on the leg that computes the prompt, its answer's parameters on the other leg."""
    params = fields.get("kv_transfer_params") or {}
    if not isinstance(params, dict):
        raise ApiError(400, "kv_transfer_params must be an object", param="kv_transfer_params")
    if params and num_prompts > 1:
        raise ApiError(400, "kv_transfer_params are for one prompt", param="kv_transfer_params")
    return params


def _hand_over(fields: dict[str, Any], num_prompts: int) -> bool:
    wanted = _boolean(_transfer(fields, num_prompts), "do_remote_decode")
    if wanted and fields.get("stream"):
        raise ApiError(400, "do_remote_decode is not available with stream", param="kv_transfer_params")
    return wanted


def _ticket(fields: dict[str, Any], num_prompts: int) -> dict[str, Any] | None:
    params = _transfer(fields, num_prompts)
    if not _boolean(params, "do_remote_prefill"):
        return None
    if not isinstance(params.get("reflux"), dict):
        raise ApiError(400, "these kv_transfer_params are not of this kind of engine", param="kv_transfer_params")
    return params["reflux"]


def _stops(fields: dict[str, Any]) -> tuple[str, ...]:
    stop = fields.get("stop")
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or len(stops) > _MAX_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise ApiError(400, f"stop must be a text or a list of up to {_MAX_STOPS} non-empty texts", param="stop")
    return tuple(stops)


def _stop_ids(fields: dict[str, Any]) -> tuple[int, ...]:
    ids = fields.get("stop_token_ids") or []
    if not isinstance(ids, list) or len(ids) > 64 or not all(_is_id(token) for token in ids):
        raise ApiError(400, "stop_token_ids must be a list of up to 64 token ids", param="stop_token_ids")
    return tuple(ids)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _boolean(fields: dict[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise ApiError(400, f"{name} must be true or false, got {value!r:.40}", param=name)
    return bool(value)


def _integer(fields: dict[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ApiError(400, f"{name} must be a whole number from {low} to {high}, got {value!r:.40}", param=name)
    return value


def _number(fields: dict[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ApiError(400, f"{name} must be a number, got {value!r:.40}", param=name)
    if not low <= value <= high:
        raise ApiError(400, f"{name} must be {low} to {high}, got {value}", param=name)
    return float(value)
