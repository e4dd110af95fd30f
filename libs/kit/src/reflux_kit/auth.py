"""Tokens: signed with the stack secret, checked on every call."""

import hashlib
import hmac
import time
from contextvars import ContextVar
from dataclasses import dataclass

import jwt

from reflux_kit.errors import Unauthenticated

_ALGORITHM = "HS256"
_STACK = "stack"
_TENANT = "tenant:"

tenant: ContextVar[str] = ContextVar("tenant", default="")
"""Tenant of the call that is being served; empty for operators and services."""


@dataclass(frozen=True)
class Claims:
    """Who calls: `run` and `tenant` are empty for the stack's own services and for operators."""

    subject: str
    run: str = ""
    tenant: str = ""


def mint(secret: str, subject: str, run: str = "", lifetime_seconds: float = 30 * 86400.0, *, tenant: str = "") -> str:
    """Signs a token for `subject`, restricted to `run`, or to the runs of `tenant`, unless both are empty."""
    scope = f"run:{run}" if run else f"{_TENANT}{tenant}" if tenant else _STACK
    claims = {"sub": subject, "scope": scope, "exp": int(time.time() + lifetime_seconds)}
    return jwt.encode(claims, _key(secret), algorithm=_ALGORITHM)


def verify(secret: str, token: str, *, tenants: bool = False) -> Claims:
    """Returns the claims of `token`. Raises `Unauthenticated` without repeating the token.

    A tenant's token is taken with `tenants` only: who does not know tenants must not take it for the stack's own.
    """
    try:
        claims = jwt.decode(token, _key(secret), algorithms=[_ALGORITHM], options={"require": ["sub", "exp", "scope"]})
    except jwt.PyJWTError as error:
        raise Unauthenticated(f"the token was refused: {type(error).__name__}") from None
    scope = str(claims["scope"])
    if scope.startswith(_TENANT):
        if not tenants:
            raise Unauthenticated("the token was refused: a tenant's opens the trainer's runs, nothing else")
        return Claims(subject=claims["sub"], tenant=scope.removeprefix(_TENANT))
    return Claims(subject=claims["sub"], run=scope.removeprefix("run:") if scope != _STACK else "")


def from_header(secret: str, header: str | None, *, tenants: bool = False) -> Claims:
    """Returns the claims of an `Authorization: Bearer` header; `tenants` as of `verify`."""
    if not header or not header.startswith("Bearer "):
        raise Unauthenticated("a token is required: send 'Authorization: Bearer <token>' (`reflux token` prints one)")
    return verify(secret, header.removeprefix("Bearer "), tenants=tenants)


def derived_key(secret: str, purpose: str) -> bytes:
    """32 bytes for one purpose that tell nothing about the secret (HMAC-SHA256); empty without a secret."""
    return hmac.digest(_key(secret), purpose.encode(), "sha256") if secret else b""


def _key(secret: str) -> bytes:
    # HS256 wants 32 bytes whatever people choose; a short secret stays as weak as it is.
    return hashlib.sha256(secret.encode()).digest()
