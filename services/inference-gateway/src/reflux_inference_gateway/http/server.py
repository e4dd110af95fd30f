"""The HTTP/1.1 server of the door: its connections, their limits and deadlines."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from reflux_inference_gateway.http.connection import ClientConnection
from reflux_inference_gateway.http.exchange import Exchange, Request
from reflux_inference_gateway.openai_errors import ApiError

_SWEEP_SECONDS = 0.5
_BACKLOG = 4096


@dataclass(frozen=True, kw_only=True)
class HttpLimits:
    """What clients may use up."""

    max_connections: int = 16_384
    """Above it the connection that idles for longest is closed."""
    max_head_bytes: int = 64 << 10
    max_headers: int = 128
    max_body_bytes: int = 64 << 20
    max_held_bytes: int = 1 << 30
    """Bytes of all bodies together that are being read or answered."""
    idle_seconds: float = 75.0
    """A connection without a request is closed after it."""
    head_seconds: float = 10.0
    """In which a request's head must be complete."""
    body_seconds: float = 60.0
    """In which its body must be complete."""
    request_seconds: float = 1800.0
    """In which its answer must be complete."""
    linger_seconds: float = 2.0
    """For a client to take the last bytes of a connection that ends."""


class Handler(Protocol):
    """What the server serves. Every request is screened once its head is complete, then served."""

    def screen(self, request: Request) -> ApiError | None:
        """Says from the head alone why a request is refused, before its body is read; sets `request.caller`."""
        ...

    async def serve(self, exchange: Exchange) -> None:
        """Answers; refused requests come here too. Cancelled when the client has gone."""

    def fail(self, exchange: Exchange, error: ApiError) -> None:
        """Ends an answer that is not complete."""


class HttpServer:
    """Owns the connections. A connection is evictable while no request of it is being read or answered."""

    def __init__(self, handler: Handler, limits: HttpLimits, also_sweep: Callable[[float], None]) -> None:
        self.handler = handler
        self.limits = limits
        self.draining = False
        self.loop = asyncio.get_running_loop()
        self.now = self.loop.time
        self._also_sweep = also_sweep
        self._connections: set[ClientConnection] = set()
        self._evictable: dict[ClientConnection, None] = {}
        self._held_bytes = 0
        self._empty = asyncio.Event()

    @asynccontextmanager
    async def listening(
        self, host: str, port: int, drain_seconds: float, tls: ssl.SSLContext | None
    ) -> AsyncIterator[int]:
        """Serves until the block ends; yields the bound port. Raises OSError when it cannot be bound."""
        server = await self.loop.create_server(
            lambda: ClientConnection(self),
            host,
            port,
            backlog=_BACKLOG,
            ssl=tls,
            ssl_handshake_timeout=10 if tls else None,
        )
        sweeping = asyncio.create_task(self._sweep())
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            await self._drain(drain_seconds)
            sweeping.cancel()

    async def _drain(self, seconds: float) -> None:
        self.draining = True
        for connection in list(self._connections):
            connection.drain()
        try:
            async with asyncio.timeout(seconds):
                await self._none_left()
        except TimeoutError:
            for connection in list(self._connections):
                connection.abort()
            await self._none_left()

    async def _none_left(self) -> None:
        while self._connections:
            self._empty.clear()
            await self._empty.wait()

    async def _sweep(self) -> None:
        """Ends what is overdue. A round that comes late ends nothing: this process stood still itself, and what clients
        sent in time waits unread in its sockets.
        """
        limits = self.limits
        shortest = min(limits.idle_seconds, limits.head_seconds, limits.body_seconds, limits.request_seconds)
        period = min(_SWEEP_SECONDS, shortest / 4)
        while True:
            planned = self.now() + period
            await asyncio.sleep(period)
            now = self.now()
            if now > planned + period:
                continue
            for connection in [each for each in self._connections if each.deadline < now]:
                connection.expire()
            self._also_sweep(now)

    # Called by connections.

    def opened(self, connection: ClientConnection) -> None:
        """A client has come; above the limit the one that idles for longest has to go."""
        self._connections.add(connection)
        self._evictable[connection] = None
        if len(self._connections) > self.limits.max_connections:
            oldest = next(iter(self._evictable))
            del self._evictable[oldest]
            oldest.abort()

    def closed(self, connection: ClientConnection) -> None:
        """A client has gone and nothing of its requests runs any more."""
        self._connections.discard(connection)
        self._evictable.pop(connection, None)
        if not self._connections:
            self._empty.set()

    def busy(self, connection: ClientConnection) -> None:
        """A request of the connection is being answered."""
        self._evictable.pop(connection, None)

    def idle(self, connection: ClientConnection) -> None:
        """The connection waits for a request."""
        self._evictable[connection] = None

    def reserve(self, request: Request, num_bytes: int) -> bool:
        """Counts bytes of a body; False when too many are held."""
        if self._held_bytes + num_bytes > self.limits.max_held_bytes:
            return False
        self._held_bytes += num_bytes
        request.held_bytes += num_bytes
        return True

    def release(self, request: Request) -> None:
        """The request's body is not needed any more."""
        self._held_bytes -= request.held_bytes
        request.held_bytes = 0
