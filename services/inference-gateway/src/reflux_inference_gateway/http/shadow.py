"""What the gateway reads of a request's body for routing; the body itself goes upstream as it came. Pure."""

import json
from dataclasses import dataclass
from typing import Any

from reflux_inference_gateway.openai_errors import ApiError

_DEFAULT_MAX_TOKENS = 256
_BYTES_PER_TOKEN = 4


@dataclass(frozen=True)
class Shadow:
    """The routing half of an OpenAI request."""

    model: str
    stream: bool
    num_tokens: int
    """Estimate of prompt and generated tokens; load only, never a limit."""


def read_shadow(body: bytes) -> Shadow:
    """Parses a body as far as routing needs; raises ApiError 400 that names the field, before anything is sent.

    Values that only the engine understands are left to the engine.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    model = fields.get("model")
    if not isinstance(model, str) or not model:
        raise ApiError(400, "model must be a non-empty string", param="model")
    stream = fields.get("stream", False)
    if not isinstance(stream, bool | None):
        raise ApiError(400, f"stream must be true or false, got {stream!r:.40}", param="stream")
    generated = _number(fields.get("n"), 1) * _number(_max_tokens(fields), _DEFAULT_MAX_TOKENS)
    return Shadow(model, bool(stream), _prompt_tokens(fields) + generated)


def _max_tokens(fields: dict[str, Any]) -> object:
    return fields.get("max_completion_tokens") or fields.get("max_tokens")


def _number(value: object, default: int) -> int:
    return value if isinstance(value, int) and 0 < value < 1 << 20 else default


def _prompt_tokens(fields: dict[str, Any]) -> int:
    prompt = fields.get("prompt")
    if isinstance(prompt, list):
        return sum(_piece_tokens(piece) for piece in prompt)
    if prompt is None:
        messages = fields.get("messages")
        pieces = messages if isinstance(messages, list) else []
        return sum(_piece_tokens(piece.get("content")) for piece in pieces if isinstance(piece, dict))
    return _piece_tokens(prompt)


def _piece_tokens(piece: object) -> int:
    if isinstance(piece, str):
        return len(piece) // _BYTES_PER_TOKEN + 1
    return len(piece) if isinstance(piece, list) else 1
