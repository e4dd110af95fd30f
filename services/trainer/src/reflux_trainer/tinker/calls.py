"""Open sampling calls, which of them are drawn together, and how. Pure."""

import asyncio
import json
from dataclasses import dataclass, field

from reflux.common.v1 import common_pb2
from reflux_kit.errors import InvalidRequest
from reflux_trainer.tinker.bodies import Sample, parse
from reflux_trainer.tinker.records import Sampler
from reflux_trainer.tinker.wire import PromptWish

_MAX_SEED = (1 << 64) - 1


@dataclass(eq=False)
class Call:
    """One open asample future."""

    sampler: Sampler
    seq_id: int
    prompt: tuple[int, ...]
    body: Sample
    seed: int
    """The client's, or one that was drawn when the future was logged: a repetition draws the same."""
    reason: str = "waits for its turn"
    paused: bool = False
    cancelled: bool = False
    task: "asyncio.Task[None] | None" = None


@dataclass(eq=False)
class Group:
    """Calls of one prompt, sampler and kind of sampling that are drawn together."""

    calls: list[Call] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Samples in all."""
        return sum(call.body.num_samples for call in self.calls)


def open_call(sampler: Sampler, seq_id: int, payload: bytes) -> Call:
    """Reads a logged asample request."""
    document = json.loads(payload)
    body = parse(Sample, document["body"].encode())
    prompt = tuple(token for chunk in body.prompt.chunks for token in chunk.tokens)
    return Call(sampler, seq_id, prompt, body, document["seed"])


def close_call(raw: bytes, seed: int) -> bytes:
    """What is logged of an asample request."""
    return json.dumps({"body": raw.decode(), "seed": seed}).encode()


def check_sample(body: Sample, vocab_size: int) -> None:
    """Refuses what nobody could draw, or what would be left out of the answer. Raises `InvalidRequest`."""
    if any(chunk.type != "encoded_text" for chunk in body.prompt.chunks):
        raise InvalidRequest("prompt.chunks: only encoded_text is served", field="prompt")
    tokens = [token for chunk in body.prompt.chunks for token in chunk.tokens]
    if not tokens:
        raise InvalidRequest("prompt holds no token", field="prompt")
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        raise InvalidRequest(f"prompt holds ids outside 0 to {vocab_size - 1}", field="prompt")
    if body.target_prompt_logprobs is not None:
        raise InvalidRequest("target_prompt_logprobs is not served", field="target_prompt_logprobs")
    if body.prompt_alt_tokens_k:
        raise InvalidRequest("prompt_alt_tokens_k is not served", field="prompt_alt_tokens_k")


def say(group: Group, reason: str, *, paused: bool) -> None:
    """Tells polls why a group is not done."""
    for call in group.calls:
        call.reason, call.paused = reason, paused


def group_key(call: Call) -> tuple[object, ...]:
    """Equal for calls that may be one group; a seed of the client's own makes a call a group of its own."""
    body = call.body
    alone = call.body.sampling_params.seed is not None
    return (
        call.sampler.sampler_id,
        call.prompt,
        body.sampling_params.model_dump_json(),
        body.prompt_logprobs,
        body.topk_prompt_logprobs,
        body.topk_sample_logprobs,
        call.seq_id if alone else None,
    )


def wish(call: Call) -> PromptWish:
    """What the call wants to know beside its tokens."""
    body = call.body
    return PromptWish(
        len(call.prompt),
        logprobs=bool(body.prompt_logprobs),
        last=body.prompt_logprobs_last_n,
        top_prompt=body.topk_prompt_logprobs,
        top_samples=body.topk_sample_logprobs,
    )


def sampling_params(call: Call, max_context: int) -> common_pb2.SamplingParams:
    """How the gateway shall draw. Raises `InvalidRequest` for a prompt that leaves no room."""
    params, room = call.body.sampling_params, max_context - len(call.prompt)
    if room < 1:
        raise InvalidRequest(f"the prompt has {len(call.prompt)} tokens, the context {max_context}", field="prompt")
    message = common_pb2.SamplingParams(
        max_tokens=params.max_tokens or room,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(0, params.top_k),
        seed=call.seed & _MAX_SEED,
        ignore_eos=params.stop is not None,
        top_logprobs=call.body.topk_sample_logprobs,
    )
    stops = [params.stop] if isinstance(params.stop, str) else params.stop or []
    for stop in stops:
        if isinstance(stop, str):
            message.stops.append(stop)
        else:
            message.stop_token_ids.append(stop)
    if call.body.prompt_logprobs or call.body.topk_prompt_logprobs:
        message.prompt_logprobs = call.body.topk_prompt_logprobs
    return message
