"""One HTTP request to a replica, as an iterator of parts that the dispatcher can retry before the first one is out."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
from yarl import URL

from reflux_inference_gateway.dispatch import ReplicaLost
from reflux_inference_gateway.http.headers import end_to_end

_EVENT_STREAM = "text/event-stream"


@dataclass(frozen=True)
class Head:
    """Status and headers of the replica's answer; `body` holds all of it unless the answer is a stream."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes
    streamed: bool


Part = Head | bytes


@asynccontextmanager
async def upstream_session() -> AsyncIterator[aiohttp.ClientSession]:
    """The keep-alive pool; idle connections end here before a replica ends them (75 s in aiohttp)."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=15.0)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
    ) as session:
        yield session


async def send(
    session: aiohttp.ClientSession, method: str, url: str, headers: list[tuple[str, str]], body: bytes
) -> AsyncGenerator[Part, None]:
    """Yields a Head, then the chunks of a stream as they come; raises ReplicaLost when the connection breaks.

    An answer that is no event stream is read to its end first: until then nothing is out and it may be replaced.
    """
    try:
        async with session.request(
            method, URL(url, encoded=True), headers=headers, data=body or None, allow_redirects=False
        ) as response:
            streamed = response.headers.get("Content-Type", "").startswith(_EVENT_STREAM)
            whole = b"" if streamed else await response.read()
            yield Head(response.status, end_to_end(response.headers), whole, streamed)
            if streamed:
                async for chunk in response.content.iter_any():
                    yield chunk
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise ReplicaLost(f"{url}: {type(error).__name__}") from error
