"""What the gateway reads of a request's body for routing; the body itself goes upstream as it came. Pure."""

from array import array
from dataclasses import dataclass
from typing import Any

import orjson

from reflux_inference_gateway.http.headers import Body
from reflux_inference_gateway.openai_errors import ApiError

MAX_SAMPLES = 1024
_DEFAULT_MAX_TOKENS = 256
_BYTES_PER_TOKEN = 4
_KEY_LENGTH = 1 << 16
_MAX_DEPTH = 16
"""Levels of lists and objects that are looked through for text."""
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens", "max_new_tokens")
_PROMPTS = ("prompt", "messages", "input", "token_ids", "input_ids", "text")


@dataclass(frozen=True, slots=True)
class Shadow:
    """The routing half of a request."""

    model: str
    """Empty where a body may leave it out."""

    num_samples: int
    """Per prompt, at least 1."""

    num_prompt_tokens: int
    """Estimate, of all prompts."""

    max_tokens: int
    """Upper bound per sample, or our guess where the body sets none."""

    prompt: object
    """Text, token ids or messages as the body has them; None when it has none."""

    fields: dict[str, Any]
    """The whole body, parsed."""

    @property
    def num_tokens(self) -> int:
        """Estimate of prompt and generated tokens; load only, never a limit."""
        return self.num_prompt_tokens + self.num_samples * self.max_tokens

    def prompt_key(self) -> bytes:
        """The beginning of the prompt in a form whose prefixes can be compared; token ids as 4 bytes each."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return prompt[:_KEY_LENGTH].encode()
        if isinstance(prompt, list) and prompt and type(prompt[0]) is int:
            try:
                return array("I", prompt[:_KEY_LENGTH]).tobytes()
            except (TypeError, OverflowError):
                return b""  # no token ids; the engine will say so
        try:
            return b"" if prompt is None else orjson.dumps(prompt)[:_KEY_LENGTH]
        except TypeError:
            return b""  # nested deeper than orjson writes; the engine will have something to say


def read_shadow(body: Body, *, model_required: bool = True) -> Shadow:
    """Parses a body as far as routing needs; raises ApiError 400 that names the field, before anything is sent.

    Values that only the engine understands are left to the engine; `n` and `temperature` are refused here where no
    engine could take them, since engines differ in how well they defend themselves.
    """
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    model = fields.get("model")
    if (model is not None or model_required) and not (isinstance(model, str) and model):
        raise ApiError(400, "model must be a non-empty string", param="model")
    stream = fields.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise ApiError(400, f"stream must be true or false, got {stream!r:.40}", param="stream")
    nested = fields.get("sampling_params")
    sampling = nested if isinstance(nested, dict) else fields
    prompt = next((fields[name] for name in _PROMPTS if fields.get(name) is not None), None)
    return Shadow(
        model=model or "",
        num_samples=_samples(sampling),
        num_prompt_tokens=_tokens(prompt),
        max_tokens=next((found for name in _LIMITS if (found := _count(sampling.get(name)))), _DEFAULT_MAX_TOKENS),
        prompt=prompt,
        fields=fields,
    )


def _samples(sampling: dict[str, Any]) -> int:
    temperature = sampling.get("temperature")
    if isinstance(temperature, int | float) and temperature < 0:
        raise ApiError(400, f"temperature must be >= 0, got {temperature}", param="temperature")
    number = sampling.get("n")
    if number is None:
        return 1
    if type(number) is not int or not 1 <= number <= MAX_SAMPLES:
        raise ApiError(400, f"n must be a whole number from 1 to {MAX_SAMPLES}, got {number!r:.40}", param="n")
    return number


def _count(value: object) -> int:
    """A plausible count of tokens, else 0."""
    return value if isinstance(value, int) and 0 < value < 1 << 20 else 0


def _tokens(prompt: object, depth: int = _MAX_DEPTH) -> int:
    """Estimate for a text, token ids, messages with text or parts, or a list of such prompts."""
    if isinstance(prompt, str):
        return len(prompt) // _BYTES_PER_TOKEN + 1
    if isinstance(prompt, dict):
        return _tokens(prompt.get("content", prompt.get("text")), depth - 1) if depth else 1
    if isinstance(prompt, list) and depth:
        if prompt and type(prompt[0]) is int:
            return len(prompt)
        return sum(_tokens(one, depth - 1) for one in prompt)
    return 0 if prompt is None else 1
