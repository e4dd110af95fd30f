"""Keep-alive connections to replicas, and one request over them that the dispatcher can retry before it is out."""

import asyncio
import ssl
from collections.abc import Callable
from urllib.parse import urlsplit

from reflux_inference_gateway.http.answer import Answer, Broken, UpstreamConnection
from reflux_inference_gateway.http.headers import Body
from reflux_inference_gateway.share import ReplicaLost

CONNECT_SECONDS = 5.0
IDLE_SECONDS = 4.0
"""Below the 5 s after which uvicorn, hence vLLM and SGLang, closes an idle connection."""
MAX_IDLE = 512
"""Idle connections that are kept per replica."""
_JOINED_BYTES = 1 << 16


class Origin:
    """One replica's HTTP door and the idle connections to it, the most recently used one last."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.secure = parts.scheme == "https"
        self.host = parts.hostname or ""
        self.port = parts.port or (443 if self.secure else 80)
        self.path = parts.path.rstrip("/").encode()
        self.host_line = b"host: %b\r\n" % parts.netloc.rpartition("@")[2].encode()
        self.idle: list[UpstreamConnection] = []
        self.retired = False
        """True when nobody will take a connection from here any more."""

    def take(self) -> UpstreamConnection | None:
        """An idle connection, or None."""
        while self.idle:
            connection = self.idle.pop()
            if connection.usable:
                return connection
            connection.close()
        return None

    def give(self, connection: UpstreamConnection) -> None:
        """Takes a connection back whose answer is complete."""
        if len(self.idle) < MAX_IDLE and not self.retired:
            connection.idle_since = asyncio.get_running_loop().time()
            self.idle.append(connection)
        else:
            connection.close()

    async def connect(self) -> UpstreamConnection:
        """Opens a connection; raises OSError or TimeoutError."""
        context = ssl.create_default_context() if self.secure else None
        async with asyncio.timeout(CONNECT_SECONDS):
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: UpstreamConnection(self.give), self.host, self.port, ssl=context
            )
        return connection

    def sweep(self, now: float) -> None:
        """Closes connections that idle for too long: soon the replica would, perhaps just when a request is sent."""
        while self.idle and (self.idle[0].idle_since < now - IDLE_SECONDS or not self.idle[0].usable):
            self.idle.pop(0).close()


class Upstreams:
    """Owns the connections to all replicas."""

    def __init__(self) -> None:
        self._origins: dict[str, Origin] = {}

    def origin(self, url: str) -> Origin:
        """The replica's connections."""
        origin = self._origins.get(url)
        if origin is None:
            origin = self._origins[url] = Origin(url)
        return origin

    def sweep(self, now: float) -> None:
        """Closes what idles for too long and forgets replicas without an idle connection."""
        for url, origin in list(self._origins.items()):
            origin.sweep(now)
            if not origin.idle:
                origin.retired = True
                del self._origins[url]

    def close(self) -> None:
        """Closes what is idle; requests under way end with their own tasks."""
        for origin in self._origins.values():
            while origin.idle:
                origin.idle.pop().close()


async def relay(
    origin: Origin, method: bytes, target: bytes, lines: bytes, body: Body, begin: Callable[[Answer], None]
) -> None:
    """Sends a request, calls `begin` with the answer once it is whole, or a stream has begun, and waits for its end.

    An answer that is no stream is read to its end first: until then nothing is out and it may be replaced. A connection
    that was kept alive and turns out to be closed is replaced by a new one, unless a byte of the answer has come.
    Raises ReplicaLost when the connection breaks. Cancelling hangs up on the replica.
    """
    parts = (method, origin.path, target, origin.host_line, lines, len(body))
    head = b"%b %b%b HTTP/1.1\r\n%b%bcontent-length: %d\r\n\r\n" % parts
    answer: Answer | None = None
    try:
        connection = origin.take()
        if connection is not None:
            answer = _ask(connection, head, body)
            try:
                await answer.ready()
            except Broken:
                if answer.heard:
                    raise
                answer = None
        if answer is None:
            answer = _ask(await origin.connect(), head, body)
            await answer.ready()
        begin(answer)
        if not answer.complete:
            await answer.finished()
    except (Broken, OSError, TimeoutError) as error:
        raise ReplicaLost(f"{origin.host}:{origin.port}: {type(error).__name__} {error}") from error
    finally:
        if answer is not None:
            answer.hang_up()


def _ask(connection: UpstreamConnection, head: bytes, body: Body) -> Answer:
    if len(body) <= _JOINED_BYTES:
        return connection.ask(head + body)
    answer = connection.ask(head)
    connection.write(body)
    return answer
