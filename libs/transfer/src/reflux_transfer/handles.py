"""The envelope of a region handle: versioned JSON with the backend's name, so that a reader can pick its backend."""

import json
from typing import Any

from reflux_transfer.errors import WrongHandle

_FORMAT = 1
_MAX_BYTES = 16384


def seal(backend: str, fields: dict[str, object]) -> bytes:
    """Handle bytes of `backend`; `fields` are JSON values."""
    return json.dumps({"format": _FORMAT, "backend": backend, **fields}, separators=(",", ":")).encode()


def unseal(handle: bytes, backend: str, **types: type) -> dict[str, Any]:
    """Fields of a handle of `backend`, each of the given type. Raises `WrongHandle`."""
    envelope = _parse(handle)
    if envelope["backend"] != backend:
        raise WrongHandle(f"the handle belongs to backend {envelope['backend']}, not {backend}")
    for name, kind in types.items():
        if type(envelope.get(name)) is not kind or (kind is int and envelope[name] < 0):
            raise WrongHandle(f"the handle's field {name} is missing or not of type {kind.__name__}")
    return envelope


def backend_of(handle: bytes) -> str:
    """Name of the backend that can open the handle. Raises `WrongHandle`."""
    return _parse(handle)["backend"]


def hex_field(envelope: dict[str, Any], name: str) -> bytes:
    """A bytes field that travels as hexadecimal text. Raises `WrongHandle`."""
    try:
        return bytes.fromhex(str(envelope[name]))
    except ValueError as error:
        raise WrongHandle(f"the handle's field {name} is not hexadecimal") from error


def _parse(handle: bytes) -> dict:
    if len(handle) > _MAX_BYTES:
        raise WrongHandle(f"a handle has at most {_MAX_BYTES} bytes, not {len(handle)}")
    try:
        envelope = json.loads(handle)
    except (ValueError, RecursionError) as error:
        raise WrongHandle("the bytes are no region handle") from error
    if (
        not isinstance(envelope, dict)
        or envelope.get("format") != _FORMAT
        or not isinstance(envelope.get("backend"), str)
    ):
        raise WrongHandle(f"the bytes are no region handle of format {_FORMAT}")
    return envelope
