"""The envelope of a region handle: versioned JSON that names its backend and the run that it belongs to."""

import hashlib
import hmac
import json
from dataclasses import dataclass, field
from typing import Any

from reflux_transfer.errors import WrongHandle

_FORMAT = 1
_MAX_BYTES = 16384


@dataclass(frozen=True)
class Scope:
    """Where a handle is valid. An owner seals with it, a reader opens with the one that it expects.

    `generation` 0 means any. With a `key` (HMAC-SHA256, one per run) only processes of the run can make handles that
    the others accept; without one the scope protects against mistakes, not against a hostile process.
    """

    run: str = ""
    generation: int = 0
    key: bytes = field(default=b"", repr=False)


ANYWHERE = Scope()


def seal(backend: str, fields: dict[str, object], scope: Scope = ANYWHERE) -> bytes:
    """Handle bytes of `backend`; `fields` are JSON values."""
    envelope = {"format": _FORMAT, "backend": backend, "run": scope.run, "generation": scope.generation, **fields}
    if scope.key:
        envelope["mac"] = _mac(envelope, scope.key)
    return json.dumps(envelope, separators=(",", ":")).encode()


def unseal(handle: bytes, backend: str, *, scope: Scope | None = None, **types: type) -> dict[str, Any]:
    """Fields of a handle of `backend`, each of the given type; with a `scope` the handle must lie in it.

    Raises `WrongHandle`; for another run's handle it names both runs.
    """
    envelope = _parse(handle)
    if envelope["backend"] != backend:
        raise WrongHandle(f"the handle belongs to backend {envelope['backend']}, not {backend}")
    if scope is not None:
        _check_scope(envelope, scope)
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


def _check_scope(envelope: dict[str, Any], scope: Scope) -> None:
    run, generation = envelope["run"], envelope["generation"]
    if run != scope.run:
        raise WrongHandle(f"the handle belongs to run {run!r}, this process to run {scope.run!r}")
    if scope.key:
        mac = str(envelope.pop("mac", ""))
        if not hmac.compare_digest(mac.encode(), _mac(envelope, scope.key).encode()):
            raise WrongHandle(f"the handle claims run {run!r} and is not signed with that run's key")
    if scope.generation and generation != scope.generation:
        raise WrongHandle(f"the handle is of generation {generation}, expected is {scope.generation}")


def _mac(envelope: dict[str, Any], key: bytes) -> str:
    text = json.dumps(envelope, separators=(",", ":"), sort_keys=True)
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


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
        or type(envelope.get("run")) is not str
        or type(envelope.get("generation")) is not int
    ):
        raise WrongHandle(f"the bytes are no region handle of format {_FORMAT}")
    return envelope
