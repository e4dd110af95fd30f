"""Owns the connection to the API server: addresses, credentials, deadlines, and what failures mean.

The official client (its maintained async half, `kubernetes.aio`) does configuration, TLS and authentication. Objects
stay plain JSON: its models cost ten times the time and memory on a cluster of thousands of nodes.
"""

import asyncio
import contextlib
import importlib
import json
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from reflux_kit.errors import StartupError
from reflux_scheduler.backends.base import BackendAway
from reflux_scheduler.backends.kubernetes.settings import KubernetesSettings

Object = dict[str, Any]

_MERGE_PATCH = "application/merge-patch+json"
_PAGE = 500
_WATCH_SECONDS = 240
_SILENCE_SECONDS = 300.0
"""The server ends a watch before that by itself: a stream that stays silent for longer has lost its peer."""

_TOKEN_SECONDS = 60.0


class ApiFailure(RuntimeError):
    """The API server refused a call; `status` is the HTTP status, the message is the server's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Expired(RuntimeError):
    """The resource version of a watch is too old (410 Gone): list again."""


class KubernetesApi:
    """Calls with a deadline each. Raises BackendAway when nobody answers, ApiFailure when the answer is no."""

    def __init__(self, client: Any, call_seconds: float) -> None:
        self._client = client
        self._call_seconds = call_seconds

    async def get(self, where: str, **query: str) -> Object:
        """One object."""
        return await self._call("GET", where, query)

    async def create(self, where: str, body: Object) -> Object:
        """Creates an object in a collection; ApiFailure 409 when there is one of that name."""
        return await self._call("POST", where, {}, body)

    async def patch(self, where: str, body: Object) -> Object:
        """JSON merge patch of an object."""
        return await self._call("PATCH", where, {}, body, _MERGE_PATCH)

    async def delete(self, where: str) -> None:
        """Deletes an object after all that it owns; one that is gone already is no error."""
        try:
            await self._call("DELETE", where, {"propagationPolicy": "Foreground"})
        except ApiFailure as failure:
            if failure.status != 404:
                raise

    async def list(self, where: str, selector: str = "") -> tuple[list[Object], str]:
        """All objects of a collection, page by page, and the resource version to watch from."""
        found: list[Object] = []
        query = {"limit": str(_PAGE)} | ({"labelSelector": selector} if selector else {})
        while True:
            page = await self._call("GET", where, query)
            found += page.get("items") or []
            metadata = page.get("metadata") or {}
            if not metadata.get("continue"):
                return found, metadata.get("resourceVersion", "")
            query["continue"] = metadata["continue"]

    async def watch(self, where: str, version: str, selector: str = "") -> AsyncGenerator[Object]:
        """Events after a resource version, until the server ends the stream. Raises Expired."""
        query = {
            "watch": "true",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(_WATCH_SECONDS),
        } | ({"labelSelector": selector} if selector else {})
        timeout = aiohttp.ClientTimeout(
            total=None, connect=self._call_seconds, sock_connect=self._call_seconds, sock_read=_SILENCE_SECONDS
        )
        with self._away_when_silent():
            response = await self._send("GET", where, query, None, "", timeout)
            async with response:
                if response.status == 410:
                    raise Expired
                if response.status >= 300:
                    raise _failure(response.status, await response.read())
                async for line in _lines(response):
                    event: Object = json.loads(line)
                    if event.get("type") == "ERROR":
                        raise _stream_error(event.get("object") or {})
                    yield event

    async def _call(
        self, method: str, where: str, query: Mapping[str, str], body: Object | None = None, content_type: str = ""
    ) -> Object:
        timeout = aiohttp.ClientTimeout(total=self._call_seconds)
        with self._away_when_silent():
            response = await self._send(method, where, query, body, content_type, timeout)
            async with response:
                content = await response.read()
        if response.status >= 300:
            raise _failure(response.status, content)
        return json.loads(content) if content else {}

    async def _send(
        self,
        method: str,
        where: str,
        query: Mapping[str, str],
        body: Object | None,
        content_type: str,
        timeout: aiohttp.ClientTimeout,
    ) -> aiohttp.ClientResponse:
        headers = {"Accept": "application/json", "Content-Type": content_type or "application/json"}
        return await self._client.call_api(
            where,
            method,
            query_params=list(query.items()),
            header_params=headers,
            body=body,
            auth_settings=["BearerToken"],
            _preload_content=False,
            _request_timeout=timeout,
        )

    @contextlib.contextmanager
    def _away_when_silent(self) -> Any:
        try:
            yield
        except (aiohttp.ClientError, TimeoutError, OSError, json.JSONDecodeError) as error:
            what = str(error) or type(error).__name__
            raise BackendAway(f"the API server {self._client.configuration.host} does not answer: {what}") from None


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Lines of a stream, of any length."""
    rest = b""
    async for chunk in response.content.iter_any():
        *complete, rest = (rest + chunk).split(b"\n")
        for line in complete:
            if line.strip():
                yield line


def _failure(status: int, content: bytes) -> Exception:
    """What a refusal means. 401 is away, not refused: credentials are renewed from outside."""
    try:
        message = json.loads(content).get("message") or content.decode(errors="replace")
    except (ValueError, AttributeError):
        message = content.decode(errors="replace")
    text = f"HTTP {status}: {message[:500].strip()}"
    if status in (401, 408, 429) or status >= 500:
        return BackendAway(f"the API server does not serve: {text}")
    return ApiFailure(status, text)


def _stream_error(status: Mapping[str, Any]) -> Exception:
    if status.get("code") == 410:
        return Expired()
    return BackendAway(f"the API server ended a watch: {status.get('message') or status.get('reason') or status}")


@asynccontextmanager
async def open_api(settings: KubernetesSettings) -> AsyncIterator[KubernetesApi]:
    """Connects as the settings say; the connection is closed with the block. Raises StartupError for bad settings."""
    try:
        client = await asyncio.to_thread(importlib.import_module, "kubernetes.aio.client")
        config = await asyncio.to_thread(importlib.import_module, "kubernetes.aio.config")
    except ImportError as error:
        raise StartupError(f"{error}: pip install 'reflux-scheduler[kubernetes]'") from None
    configuration = client.Configuration()
    loader = None
    try:
        if settings.url:
            _configure_url(configuration, settings)
        elif settings.kubeconfig or os.environ.get("KUBECONFIG"):
            loader = await config.load_kube_config(
                settings.kubeconfig or None, settings.context or None, configuration, persist_config=False
            )
        else:
            config.load_incluster_config(configuration)
    except (config.ConfigException, OSError) as error:
        raise StartupError(f"no way to reach Kubernetes: {error}") from None
    async with client.ApiClient(configuration) as api_client:
        refresh = asyncio.create_task(config.refresh_token(loader, configuration)) if loader is not None else None
        try:
            yield KubernetesApi(api_client, settings.call_seconds)
        finally:
            if refresh is not None:
                refresh.cancel()
                await asyncio.gather(refresh, return_exceptions=True)


def _configure_url(configuration: Any, settings: KubernetesSettings) -> None:
    configuration.host = settings.url.rstrip("/")
    configuration.ssl_ca_cert = settings.ca_file or None
    if not settings.token_file:
        return
    read_at = 0.0

    def refresh(configuration: Any) -> None:
        nonlocal read_at
        if not read_at or time.monotonic() - read_at > _TOKEN_SECONDS:
            configuration.api_key["BearerToken"] = "Bearer " + Path(settings.token_file).read_text().strip()
            read_at = time.monotonic()

    refresh(configuration)
    configuration.refresh_api_key_hook = refresh
