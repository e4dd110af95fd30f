"""Who calls, and what the caller may do: tokens of the stack and of runs, API keys of tenants."""

import time
from dataclasses import dataclass

from reflux_inference_gateway.http.keys import ApiKey
from reflux_inference_gateway.openai_errors import ApiError
from reflux_kit import auth, scope
from reflux_kit.errors import PermissionDenied, Unauthenticated
from reflux_kit.keys import KeyRing

_BEARER = b"Bearer "
_REMEMBERED_SECONDS = 30.0
_MAX_REMEMBERED = 4096
_OWN_SECONDS = 3600.0


@dataclass(frozen=True)
class Caller:
    """Who sent a request; `run` is empty unless a run's token was shown, `key` None unless a tenant's key was."""

    run: str = ""
    key: ApiKey | None = None

    @property
    def tenant(self) -> str:
        """By whom queues are shared: the key's name or the run."""
        return self.key.name if self.key else self.run

    def check_model(self, model: str) -> None:
        """Raises ApiError 403 when the caller may not use the model."""
        if self.key is not None and self.key.models and model not in self.key.models:
            raise ApiError(403, f"this key does not open the model {model[:200]!r}", code="permission_denied")
        if self.run:
            try:
                scope.check_run(model, self.run, "model")
            except PermissionDenied as error:
                raise ApiError(403, str(error), code="permission_denied") from None


_ANYBODY = Caller()


class Access:
    """Owns the keys, the recently verified tokens and the count of requests under way per key.

    A token that was verified within the last 30 s is not verified again: its signature costs more than the rest of a
    request. An expired one is refused up to 30 s late.
    """

    def __init__(self, stack_secret: str, keys: KeyRing[ApiKey]) -> None:
        self._secret = stack_secret
        self._keys = keys
        self._verified: dict[bytes, tuple[float, Caller]] = {}
        self._under_way: dict[str, int] = {}
        self._own = (0.0, b"")

    def caller(self, authorization: bytes | None) -> Caller:
        """The caller that an `Authorization` header shows; raises ApiError 401 without repeating it."""
        if not self._secret and not self._keys:
            return _ANYBODY
        if authorization is None or not authorization.startswith(_BEARER):
            raise ApiError(401, "send 'Authorization: Bearer <API key or token>'", code="invalid_api_key")
        secret = authorization.removeprefix(_BEARER).strip()
        if self._keys and (key := self._keys.find(secret)) is not None:
            return Caller(key=key)
        if not self._secret:
            raise ApiError(401, "the API key is not known", code="invalid_api_key")
        return self._by_token(secret)

    def enter(self, caller: Caller) -> None:
        """Counts a request of the caller's key as under way; raises ApiError 429 above the key's limit."""
        key = caller.key
        if key is None:
            return
        running = self._under_way.get(key.name, 0)
        if key.max_concurrent and running >= key.max_concurrent:
            message = f"the key {key.name!r} has {running} requests under way, which is its limit"
            raise ApiError(429, message, code="rate_limit_exceeded", retry_after_seconds=1)
        self._under_way[key.name] = running + 1

    def leave(self, caller: Caller) -> None:
        """Such a request has ended."""
        if caller.key is not None:
            self._under_way[caller.key.name] -= 1

    def own_authorization(self) -> bytes:
        """The header by which the gateway itself calls replicas on behalf of a tenant's key; empty without a secret."""
        if not self._secret:
            return b""
        if self._own[0] < time.monotonic():
            self._own = (time.monotonic() + _OWN_SECONDS, b"Bearer " + auth.mint(self._secret, "gateway").encode())
        return self._own[1]

    def _by_token(self, token: bytes) -> Caller:
        now = time.monotonic()
        remembered = self._verified.get(token)
        if remembered is not None and now < remembered[0]:
            return remembered[1]
        try:
            caller = Caller(run=auth.verify(self._secret, token.decode("latin-1")).run)
        except Unauthenticated as error:
            raise ApiError(401, str(error), code="invalid_api_key") from None
        if len(self._verified) >= _MAX_REMEMBERED:
            self._verified.clear()
        self._verified[token] = (now + _REMEMBERED_SECONDS, caller)
        return caller
