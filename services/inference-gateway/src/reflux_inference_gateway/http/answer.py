"""One connection to a replica, and the answer that comes over it: gathered whole, or relayed as it comes."""

import asyncio
from collections.abc import Callable
from typing import Protocol, cast

import httptools

from reflux_inference_gateway.http.headers import Body, Headers, find

WHOLE_BYTES = 4 << 20
"""An answer that is no event stream is relayed as it comes from here on instead of being gathered whole."""
_EVENT_STREAM = b"text/event-stream"
_AHEAD_BYTES = 256 << 10
"""Bytes of a stream that may wait for the client's side to begin."""


class Broken(Exception):
    """The connection ended, or spoke no HTTP, before the answer was complete."""


class Sink(Protocol):
    """Where an answer is relayed to."""

    def write(self, data: bytes) -> None:
        """Takes a piece of the body."""

    def end(self) -> None:
        """The body is complete."""


class Answer:
    """The answer to one request. Owns what came and is not relayed yet."""

    __slots__ = (
        "_connection",
        "_failure",
        "_parts",
        "_sink",
        "_size",
        "_waiter",
        "complete",
        "headers",
        "heard",
        "status",
        "streamed",
    )

    def __init__(self, connection: "UpstreamConnection") -> None:
        self._connection: UpstreamConnection | None = connection
        self._parts: list[bytes] = []
        self._size = 0
        self._sink: Sink | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._failure: Exception | None = None
        self.heard = False
        """True once a byte of it has come."""
        self.complete = False
        self.streamed = False
        """True when it is relayed as it comes."""
        self.status = 0
        self.headers: Headers = []

    @property
    def is_event_stream(self) -> bool:
        """True when its body is a stream of server-sent events."""
        return (find(self.headers, b"content-type") or b"").startswith(_EVENT_STREAM)

    async def ready(self) -> None:
        """Waits until it is whole, or begun if it is to be relayed; raises Broken."""
        if not (self.complete or self.streamed):
            await self._wait()

    async def finished(self) -> None:
        """Waits until it is complete; raises Broken."""
        while not self.complete:
            await self._wait()

    async def _wait(self) -> None:
        if self._failure is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._failure is not None:
            raise self._failure

    def body(self) -> bytes:
        """The body of a whole answer."""
        return self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)

    def relay(self, sink: Sink) -> None:
        """Relays what has come and all that comes."""
        self._sink = sink
        if self._connection is not None:
            self._connection.resume_reading()
        self._pass_on()

    def pause(self) -> None:
        """The client reads no more for now."""
        if self._connection is not None:
            self._connection.pause_reading()

    def resume(self) -> None:
        """The client reads again."""
        if self._connection is not None:
            self._connection.resume_reading()

    def hang_up(self) -> None:
        """Ends the request at the replica unless its answer is complete."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()

    # What follows is called by the connection.

    def begin(self, status: int, headers: Headers) -> None:
        """Status and headers have come."""
        self.status, self.headers = status, headers
        self.streamed = self.is_event_stream

    def add(self, data: bytes) -> None:
        """A piece of the body has come; it stays until the end of what was received together with it."""
        self._parts.append(data)
        self._size += len(data)

    def end(self) -> None:
        """All has come; the connection is free for the next request."""
        self.complete = True
        self._connection = None

    def fail(self, error: Exception) -> None:
        """The rest will not come."""
        self._failure = error
        self._connection = None
        self._wake()

    def advance(self) -> None:
        """Acts on what was received in one go: relays it in one piece, wakes who waits."""
        if self._sink is not None:
            self._pass_on()
        elif not self.complete:
            self.streamed = self.streamed or self._size > WHOLE_BYTES
            if self._size > _AHEAD_BYTES and self.streamed and self._connection is not None:
                self._connection.pause_reading()
        if self.complete or (self.streamed and self._sink is None):
            self._wake()

    def _pass_on(self) -> None:
        assert self._sink is not None
        if self._parts:
            data = self.body()
            self._parts.clear()
            self._sink.write(data)
        if self.complete:
            self._sink.end()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class UpstreamConnection(asyncio.Protocol):
    """One connection to a replica: one request at a time, kept alive between them."""

    __slots__ = (
        "_answer",
        "_give_back",
        "_headers",
        "_interim",
        "_parser",
        "_paused",
        "_transport",
        "_until_close",
        "idle_since",
        "usable",
    )

    def __init__(self, give_back: "Callable[[UpstreamConnection], None]") -> None:
        self._give_back = give_back
        self._answer: Answer | None = None
        self._headers: Headers = []
        self._parser = httptools.HttpResponseParser(self)
        self._interim = self._paused = self._until_close = False
        self.usable = True
        self.idle_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass of it

    def ask(self, data: bytes) -> Answer:
        """Sends a request, or its head; the answer follows."""
        answer = self._answer = Answer(self)
        self._transport.write(data)
        return answer

    def write(self, data: Body) -> None:
        """Sends a part of the request's body."""
        self._transport.write(data)

    def pause_reading(self) -> None:
        """Stops reading until `resume_reading`."""
        if not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Reads on."""
        if self._paused:
            self._paused = False
            self._transport.resume_reading()

    def close(self) -> None:
        """Closes an idle connection."""
        self.usable = False
        self._transport.close()

    def abort(self) -> None:
        """Hangs up in the middle of an answer, which then gets nothing more."""
        self.usable = False
        self._answer = None
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:  # nobody asked: whatever it is, the next request must not take it for its answer
            self.close()
            return
        answer.heard = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._break(Broken(f"not an HTTP answer: {error}"))
            return
        answer.advance()

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        answer = self._answer
        if answer is None:
            return
        if self._until_close and exc is None:
            self._end()
            answer.advance()
        else:
            self._break(Broken("connection closed"))

    def _break(self, error: Broken) -> None:
        answer = self._answer
        self.abort()
        if answer is not None:
            answer.fail(error)

    def _end(self) -> None:
        answer, self._answer = self._answer, None
        assert answer is not None
        answer.end()

    # Callbacks of the parser.

    def on_header(self, name: bytes, value: bytes) -> None:
        """Part of httptools' protocol."""
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Part of httptools' protocol."""
        status = self._parser.get_status_code()
        headers, self._headers = self._headers, []
        self._interim = status < 200
        if self._answer is None:  # an answer that nobody asked for, behind a complete one
            self.usable = False
        if self._interim or self._answer is None:
            return
        names = {name for name, _ in headers}
        self._until_close = not names & {b"content-length", b"transfer-encoding"} and status not in (204, 304)
        self._answer.begin(status, headers)

    def on_body(self, data: bytes) -> None:
        """Part of httptools' protocol."""
        if self._answer is not None:
            self._answer.add(data)

    def on_message_complete(self) -> None:
        """Part of httptools' protocol."""
        if self._interim or self._answer is None:
            return
        self._end()
        self.resume_reading()
        if self._parser.should_keep_alive():
            self._give_back(self)
        else:
            self.close()
