"""One request of a client and the answer to it, as far as HTTP/1.1 is concerned."""

from __future__ import annotations

from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Protocol

from reflux_inference_gateway.http.headers import Body, Headers, find, lines

if TYPE_CHECKING:
    import asyncio

    from reflux_inference_gateway.http.access import Caller
    from reflux_inference_gateway.openai_errors import ApiError

_STATUS_LINES = {
    int(status): f"HTTP/1.1 {int(status)} {status.phrase}\r\n".encode() for status in HTTPStatus if status >= 200
}
_EVENT_ENDS = (b"\n\n", b"\r\n")
_JSON: Headers = [(b"content-type", b"application/json")]


@dataclass(slots=True)
class Request:
    """One request; header names are in lower case."""

    method: bytes = b""
    target: bytes = b""
    headers: Headers = field(default_factory=list)
    body: Body = b""
    keep_alive: bool = True
    chunked_answers: bool = True
    """False for HTTP/1.0, where a body of unknown length ends with the connection."""
    caller: Caller | None = None
    """Set by the screening."""
    refusal: ApiError | None = None
    """Why it is not served, when that is clear from the head."""
    held_bytes: int = 0
    """Bytes of the body that the server counts as held."""

    def header(self, name: bytes) -> bytes | None:
        """The first value of a header, or None."""
        return find(self.headers, name)

    @property
    def content_length(self) -> int:
        """Bytes of the body as announced; 0 without an announcement. The parser has checked that it is a number."""
        return int(self.header(b"content-length") or 0)

    @property
    def path(self) -> bytes:
        """The target without its query."""
        return self.target.partition(b"?")[0]


class Flow(Protocol):
    """Where the bytes of a relayed answer come from."""

    def pause(self) -> None:
        """The client reads no more for now."""

    def resume(self) -> None:
        """The client reads again."""


class Exchange:
    """Owns the answer to one request: either `respond`, or `open`, `write`..., `end`."""

    __slots__ = ("_chunked", "_tail", "_transport", "ended", "event_stream", "flow", "opened", "request", "status")

    def __init__(self, transport: asyncio.Transport, request: Request) -> None:
        self._transport = transport
        self._chunked = False
        self._tail = b"\n\n"
        self.request = request
        self.status = 0
        self.event_stream = False
        """True when the opened answer is a stream of server-sent events."""
        self.opened = False
        """True once a byte of the answer is out."""
        self.ended = False
        """True once the answer is complete."""
        self.flow: Flow | None = None

    def respond(self, status: int, headers: Headers, body: bytes) -> None:
        """Sends a whole answer."""
        length = b"content-length: %d\r\n" % len(body)
        shown = b"" if self.request.method == b"HEAD" else body
        self.status = status
        self._transport.write(b"".join((_status(status), lines(headers), length, self._closing(), b"\r\n", shown)))
        self.opened = self.ended = True

    def refuse(self, error: ApiError) -> None:
        """Sends an error as a whole answer."""
        headers = list(_JSON)
        if error.retry_after_seconds is not None:
            headers.append((b"retry-after", b"%d" % error.retry_after_seconds))
        if error.allow:
            headers.append((b"allow", error.allow.encode()))
        self.respond(error.status, headers, error.encoded())

    def open(self, status: int, headers: Headers, *, event_stream: bool) -> None:
        """Sends the head of an answer that comes piece by piece."""
        self.status, self.event_stream = status, event_stream
        self._chunked = self.request.chunked_answers
        if not self._chunked:
            self.request.keep_alive = False
        framing = b"transfer-encoding: chunked\r\n" if self._chunked else b""
        self._transport.write(b"".join((_status(status), lines(headers), framing, self._closing(), b"\r\n")))
        self.opened = True

    def write(self, data: bytes) -> None:
        """Sends a piece of the body; an empty one would end it, so none is sent."""
        if data:
            self._tail = data[-2:]
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def end(self) -> None:
        """Ends an answer that came piece by piece."""
        if self._chunked:
            self._transport.write(b"0\r\n\r\n")
        self.ended = True

    def fail(self, error: ApiError) -> None:
        """Ends the answer with an error, as far as that can still be said."""
        if not self.opened:
            self.refuse(error)
        elif self.event_stream:
            self.write((b"" if self._tail in _EVENT_ENDS else b"\n\n") + b"data: " + error.encoded() + b"\n\n")
            self.end()
        else:
            self._break_off()

    def _break_off(self) -> None:
        """Lets the client see that the answer is not complete: the connection ends in the middle of it."""
        self.request.keep_alive = False
        self._transport.abort()
        self.ended = True

    def _closing(self) -> bytes:
        if self.request.keep_alive:
            return b"" if self.request.chunked_answers else b"connection: keep-alive\r\n"
        return b"connection: close\r\n"


def _status(status: int) -> bytes:
    return _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
