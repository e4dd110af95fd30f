"""Tokens: signed with the stack secret, checked on every call."""

import hashlib
import hmac
import time
from dataclasses import dataclass

import jwt

from reflux_kit.errors import Unauthenticated

_ALGORITHM = "HS256"
_STACK = "stack"


@dataclass(frozen=True)
class Claims:
    """Who calls: `run` is empty for the stack's own services and for operators."""

    subject: str
    run: str


def mint(secret: str, subject: str, run: str = "", lifetime_seconds: float = 30 * 86400.0) -> str:
    """Signs a token for `subject`, restricted to `run` unless that is empty."""
    claims = {"sub": subject, "scope": f"run:{run}" if run else _STACK, "exp": int(time.time() + lifetime_seconds)}
    return jwt.encode(claims, _key(secret), algorithm=_ALGORITHM)


def verify(secret: str, token: str) -> Claims:
    """Returns the claims of `token`. Raises `Unauthenticated` without repeating the token."""
    try:
        claims = jwt.decode(token, _key(secret), algorithms=[_ALGORITHM], options={"require": ["sub", "exp", "scope"]})
    except jwt.PyJWTError as error:
        raise Unauthenticated(f"the token was refused: {type(error).__name__}") from None
    scope = str(claims["scope"])
    return Claims(subject=claims["sub"], run=scope.removeprefix("run:") if scope != _STACK else "")


def from_header(secret: str, header: str | None) -> Claims:
    """Returns the claims of an `Authorization: Bearer` header."""
    if not header or not header.startswith("Bearer "):
        raise Unauthenticated("a token is required: send 'Authorization: Bearer <token>' (`reflux token` prints one)")
    return verify(secret, header.removeprefix("Bearer "))


def derived_key(secret: str, purpose: str) -> bytes:
    """32 bytes for one purpose that tell nothing about the secret (HMAC-SHA256); empty without a secret."""
    return hmac.digest(_key(secret), purpose.encode(), "sha256") if secret else b""


def _key(secret: str) -> bytes:
    # HS256 wants 32 bytes whatever people choose; a short secret stays as weak as it is.
    return hashlib.sha256(secret.encode()).digest()
