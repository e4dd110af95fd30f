"""Client channels with the platform's defaults: deadlines, named retries, keepalive, token and trace context."""

import json
import time
from collections.abc import Sequence
from typing import Any

import grpc

from reflux_kit import auth, deadline, telemetry
from reflux_kit.settings import ServiceSettings

_TOKEN_SECONDS = 3600.0
_RENEW_SECONDS = 600.0


def open_channel(
    target: str,
    settings: ServiceSettings | None = None,
    *,
    default_deadline_seconds: float = 30.0,
    retry: Sequence[str] = (),
    subject: str = "service",
    max_message_mib: int = 4,
) -> grpc.aio.Channel:
    """Opens a channel to `target`; share one per peer, never one per call.

    `retry` names the idempotent methods ("package.Service/Method") to repeat on UNAVAILABLE, at most 4 attempts.
    Streams get a deadline only when the caller names one. `max_message_mib` bounds answers; what a server takes is
    bounded by its own `ServiceSettings.max_message_mib`.
    """
    token = _Token(settings, subject)
    options = [
        ("grpc.service_config", json.dumps(_service_config(retry))),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.min_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.max_receive_message_length", max_message_mib << 20),
    ]
    # grpc.aio sorts interceptors by kind, so one object can serve one kind only.
    interceptors = [
        _Unary(default_deadline_seconds, token),
        _Stream(token),
        _Upload(default_deadline_seconds, token),
    ]
    return grpc.aio.insecure_channel(target, options, interceptors=interceptors)


def _service_config(retry: Sequence[str]) -> dict[str, Any]:
    names = [{"service": service, "method": method} for service, _, method in (name.partition("/") for name in retry)]
    if not names:
        return {}
    policy = {
        "maxAttempts": 4,
        "initialBackoff": "0.1s",
        "maxBackoff": "2s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    return {"methodConfig": [{"name": names, "retryPolicy": policy}]}


def _with_metadata(
    details: grpc.aio.ClientCallDetails, token: "_Token", timeout: float | None
) -> grpc.aio.ClientCallDetails:
    carrier: dict[str, str] = {}
    telemetry.inject(carrier)
    metadata = list(details.metadata or ()) + list(carrier.items())
    if current := token.current():
        metadata.append(("authorization", f"Bearer {current}"))
    return grpc.aio.ClientCallDetails(
        details.method, timeout, grpc.aio.Metadata(*metadata), details.credentials, details.wait_for_ready
    )


class _Token:
    """The token of a channel's calls: a fixed one, or one minted for an hour and renewed before that is over."""

    def __init__(self, settings: ServiceSettings | None, subject: str) -> None:
        self._secret = settings.stack_secret if settings else ""
        self._fixed = settings.token if settings else ""
        self._subject = subject
        self._minted = ""
        self._renew_at = 0.0

    def current(self) -> str:
        if self._fixed or not self._secret:
            return self._fixed
        if time.time() >= self._renew_at:
            self._renew_at = time.time() + _TOKEN_SECONDS - _RENEW_SECONDS
            self._minted = auth.mint(self._secret, self._subject, lifetime_seconds=_TOKEN_SECONDS)
        return self._minted


class _Unary(grpc.aio.UnaryUnaryClientInterceptor):
    """Gives every call a deadline (its own, the caller's remainder, or the default), the token and the trace."""

    def __init__(self, default_seconds: float, token: _Token) -> None:
        self._default = default_seconds
        self._token = token

    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        asked = self._default if client_call_details.timeout is None else client_call_details.timeout
        details = _with_metadata(client_call_details, self._token, deadline.budget(asked))
        return await continuation(details, request)


class _Stream(grpc.aio.UnaryStreamClientInterceptor):
    """The same for server streams, whose length only the caller knows."""

    def __init__(self, token: _Token) -> None:
        self._token = token

    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        asked = client_call_details.timeout
        timeout = None if asked is None else deadline.budget(asked)
        return await continuation(_with_metadata(client_call_details, self._token, timeout), request)


class _Upload(grpc.aio.StreamUnaryClientInterceptor):
    """The same as `_Unary` for calls that send several messages and get one answer."""

    def __init__(self, default_seconds: float, token: _Token) -> None:
        self._default = default_seconds
        self._token = token

    async def intercept_stream_unary(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        asked = self._default if client_call_details.timeout is None else client_call_details.timeout
        details = _with_metadata(client_call_details, self._token, deadline.budget(asked))
        return await continuation(details, request_iterator)
