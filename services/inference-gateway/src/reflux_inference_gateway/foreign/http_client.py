"""Calls to an engine's HTTP routes: a deadline on each, failures as `EngineFailed` with the engine's own words."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from reflux_inference_gateway.foreign.base import EngineFailed, EngineUnfit

log = logging.getLogger(__name__)

CALL_SECONDS = 10.0
LOAD_SECONDS = 600.0
"""For calls that move weights: large models take minutes."""

_POLL_SECONDS = 0.5
_SHOWN = 500


class NoSuchRoute(EngineFailed):
    """The engine has no such route (404 or 405)."""


class EngineHttp:
    """One engine's base URL and the connections to it."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url.rstrip("/")

    async def get(self, route: str) -> dict[str, Any]:
        """The JSON object that a GET answers; empty when the answer is none."""
        return await self._call("GET", route, CALL_SECONDS)

    async def post(
        self,
        route: str,
        body: Mapping[str, Any] | None = None,
        params: Mapping[str, str] | None = None,
        seconds: float = CALL_SECONDS,
    ) -> dict[str, Any]:
        """The JSON object that a POST answers; empty when the answer is none. Raises `EngineFailed`."""
        return await self._call("POST", route, seconds, json=dict(body or {}), params=dict(params or {}))

    async def open_session(self, begin: str, end: str, seconds: float = CALL_SECONDS) -> None:
        """POSTs to the route `begin`; a session that an adapter left open when it died is ended by `end` first."""
        try:
            await self.post(begin, seconds=seconds)
        except EngineFailed as error:
            log.warning("the engine did not begin (%s), ending the session before", error)
            await self.post(end, seconds=seconds)
            await self.post(begin, seconds=seconds)

    async def stop(
        self, route: str, body: Mapping[str, Any] | None = None, params: Mapping[str, str] | None = None
    ) -> None:
        """A POST that has the engine drop its requests after a failed commit; that it fails too is only logged."""
        try:
            await self.post(route, body, params)
        except EngineFailed as error:
            log.error("the engine could not be stopped after a failed commit: %s", error)

    async def until_up(self, route: str, seconds: float) -> None:
        """Waits for a route. Raises `EngineUnfit` when it does not answer 200 in time."""
        end = time.monotonic() + seconds
        while True:
            try:
                await self.get(route)
                return
            except EngineFailed as error:
                if time.monotonic() > end:
                    raise EngineUnfit(f"no engine at {self._url} after {seconds:.0f} s: {error}") from error
                await asyncio.sleep(_POLL_SECONDS)

    async def _call(self, method: str, route: str, seconds: float, **body: Any) -> dict[str, Any]:
        timeout = aiohttp.ClientTimeout(total=seconds)
        try:
            async with self._session.request(method, self._url + route, timeout=timeout, **body) as answer:
                text = await answer.text()
                if answer.status in (404, 405):
                    raise NoSuchRoute(f"{route}: {answer.status}")
                if answer.status != 200:
                    raise EngineFailed(f"{route}: {answer.status} {text[:_SHOWN]}")
                content = await answer.json() if text.startswith("{") else {}
        except TimeoutError as error:
            raise EngineFailed(f"{route}: no answer in {seconds:.0f} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineFailed(f"{route}: {type(error).__name__}: {error}") from error
        return content


@asynccontextmanager
async def engine_http(url: str, api_key: str) -> AsyncIterator[EngineHttp]:
    """Owns the connections; `api_key` is empty where the engine asks for none."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    # A connection for each call: uvicorn hangs up after an unhandled exception, and after 5 s of silence; a call that
    # goes out at that moment would fail without having been heard.
    connector = aiohttp.TCPConnector(force_close=True)
    cookies = aiohttp.DummyCookieJar()
    async with aiohttp.ClientSession(headers=headers, connector=connector, cookie_jar=cookies) as session:
        yield EngineHttp(session, url)
