"""What a client asks of the gateway in `X-Reflux-*` headers. Pure."""

from dataclasses import dataclass

from reflux_inference_gateway.http.headers import Headers
from reflux_inference_gateway.openai_errors import ApiError

_PREFIX = b"x-reflux-"
_MAX_DIGITS = 18
_MAX_SESSION_BYTES = 256


@dataclass(frozen=True)
class Hints:
    """Versions count optimizer steps of the model."""

    min_version: int = 0
    max_lag: int | None = None
    version: int | None = None
    session: str = ""


NO_HINTS = Hints()
_NUMBERS = {
    b"x-reflux-min-version": ("min_version", "X-Reflux-Min-Version"),
    b"x-reflux-max-lag": ("max_lag", "X-Reflux-Max-Lag"),
    b"x-reflux-version": ("version", "X-Reflux-Version"),
}


def read_hints(headers: Headers) -> Hints:
    """Reads `X-Reflux-Min-Version`, `-Max-Lag`, `-Version` and `-Session`; raises ApiError 400 naming the header."""
    found: dict[str, int | str] = {}
    for name, value in headers:
        if not name.startswith(_PREFIX):
            continue
        if name in _NUMBERS:
            field, shown = _NUMBERS[name]
            found[field] = _number(value, shown)
        elif name == b"x-reflux-session":
            found["session"] = _session(value)
    return Hints(**found) if found else NO_HINTS  # pyright: ignore[reportArgumentType]


def _number(value: bytes, header: str) -> int:
    if not value.isdigit() or len(value) > _MAX_DIGITS:
        raise ApiError(400, f"{header} must be a whole number, got {value[:40]!r}", param=header)
    return int(value)


def _session(value: bytes) -> str:
    text = value.decode("latin-1")
    if not text.isprintable() or not 0 < len(text) <= _MAX_SESSION_BYTES:
        raise ApiError(
            400, f"X-Reflux-Session must be 1 to {_MAX_SESSION_BYTES} printable characters", param="X-Reflux-Session"
        )
    return text
