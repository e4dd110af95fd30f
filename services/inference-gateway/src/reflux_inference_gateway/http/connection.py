"""One client's connection: reads requests within bounds and has them answered one after the other, in their order."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections import deque
from typing import TYPE_CHECKING, cast

import httptools

from reflux_inference_gateway.http.exchange import Exchange, Request
from reflux_inference_gateway.openai_errors import ApiError

if TYPE_CHECKING:
    from reflux_inference_gateway.http.server import HttpServer

log = logging.getLogger(__name__)

_MAX_PENDING = 256
_DRAINED_BYTES = 64 << 10
"""A refused request's body up to this size is read and dropped, so that the connection lives on."""
_FRAMING_FACTOR = 8
"""Bytes on the wire per byte of body that are still taken for chunked encoding, of one-byte chunks even."""


class Stage(enum.Enum):
    """Which part of a request is awaited."""

    START = 1
    HEAD = 2
    BODY = 3


class ClientConnection(asyncio.Protocol):
    """Owns the parser's state, the request that is being answered and those that the client sent ahead.

    `deadline` says when the server's sweep ends what is awaited: a request, the rest of it, the answer, or that the
    client takes the last bytes and goes.
    """

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._limits = server.limits
        self._parser = httptools.HttpRequestParser(self)
        self._request = Request()
        self._stage = Stage.START
        self._received_bytes = 0
        self._pending: deque[Request] = deque()
        self._exchange: Exchange | None = None
        self._task: asyncio.Task[None] | None = None
        self._lost = self._expired = self._closing = self._clogged = self._stalled = False
        self.deadline = server.now() + self._limits.idle_seconds

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass of it
        self._server.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        for request in (*self._pending, self._request):
            self._server.release(request)
        self._pending.clear()
        if self._task is not None:
            self._task.cancel()
        else:
            self._server.closed(self)

    def pause_writing(self) -> None:
        self._clogged = True
        if self._exchange is not None and self._exchange.flow is not None:
            self._exchange.flow.pause()

    def resume_writing(self) -> None:
        self._clogged = False
        if self._exchange is not None and self._exchange.flow is not None:
            self._exchange.flow.resume()
        elif self._stalled:
            self._stalled = False
            self._next()

    def data_received(self, data: bytes) -> None:
        if self._closing:  # What a refused client still sends is not worth parsing.
            return
        before = self._stage
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._stop_parsing()  # It is answered as HTTP/1.1; what follows would be another protocol.
        except httptools.HttpParserError as error:
            self._cut_off(ApiError(400, f"not an HTTP/1.1 request: {type(error).__name__}", code="invalid_http"))
        if self._stage is not Stage.START and not self._closing:
            self._check_progress(before, len(data))

    def _check_progress(self, before: Stage, received: int) -> None:
        """Bounds a request that is not complete yet, by bytes here and by time in the sweep."""
        if before is self._stage:
            self._received_bytes += received
        else:
            self._received_bytes = 0  # Of these bytes some belong to what came before; one receive is bounded itself.
            if self._task is None:
                self._set_deadline()
        if self._stage is Stage.HEAD and self._received_bytes > self._limits.max_head_bytes:
            self._cut_off(self._head_too_large())
        elif self._received_bytes > _FRAMING_FACTOR * self._limits.max_body_bytes + self._limits.max_head_bytes:
            self._cut_off(ApiError(413, "the body is mostly framing", code="body_too_large"))

    def _set_deadline(self) -> None:
        seconds = {
            Stage.START: self._limits.idle_seconds,
            Stage.HEAD: self._limits.head_seconds,
            Stage.BODY: self._limits.body_seconds,
        }
        self.deadline = self._server.now() + seconds[self._stage]

    def _stop_parsing(self) -> None:
        """Takes no further request."""
        self._closing = True
        self._stage = Stage.START
        last = self._pending[-1] if self._pending else self._exchange.request if self._exchange else self._request
        last.keep_alive = False

    def _cut_off(self, error: ApiError) -> None:
        """Refuses the request that is being read, behind those that came before it, and takes no further one."""
        request = self._request
        self._server.release(request)
        request.refusal, request.keep_alive = error, False
        self._closing = True
        self._stage = Stage.START
        self._enqueue(request)

    def _head_too_large(self) -> ApiError:
        limits = f"{self._limits.max_head_bytes} bytes or {self._limits.max_headers} headers"
        return ApiError(431, f"the request's head exceeds {limits}", code="head_too_large")

    # Callbacks of the parser.

    def on_message_begin(self) -> None:
        """Part of httptools' protocol."""
        self._request = Request()
        self._stage = Stage.HEAD

    def on_url(self, url: bytes) -> None:
        """Part of httptools' protocol."""
        self._request.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Part of httptools' protocol; trailers are dropped."""
        if self._stage is Stage.HEAD and len(self._request.headers) <= self._limits.max_headers:
            self._request.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Part of httptools' protocol."""
        if self._closing:
            return
        request, parser = self._request, self._parser
        self._stage = Stage.BODY
        request.method = parser.get_method()
        request.keep_alive = parser.should_keep_alive() and not self._server.draining
        request.chunked_answers = parser.get_http_version() != "1.0"
        too_much = self._too_much(request)
        request.refusal = too_much or self._server.handler.screen(request)
        chunked = request.header(b"transfer-encoding") is not None
        if request.refusal is not None and (too_much or chunked or request.content_length > _DRAINED_BYTES):
            self._cut_off(request.refusal)
        elif request.header(b"expect") is not None and self._exchange is None and request.refusal is None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _too_much(self, request: Request) -> ApiError | None:
        if len(request.headers) > self._limits.max_headers:
            return self._head_too_large()
        if request.content_length > self._limits.max_body_bytes:
            return self._body_too_large()
        return None

    def _body_too_large(self) -> ApiError:
        return ApiError(413, f"the body exceeds {self._limits.max_body_bytes} bytes", code="body_too_large")

    def on_body(self, data: bytes) -> None:
        """Part of httptools' protocol."""
        request = self._request
        if self._closing or request.refusal is not None:
            return
        if len(request.body) + len(data) > self._limits.max_body_bytes:
            self._cut_off(self._body_too_large())
        elif not self._server.reserve(request, len(data)):
            message = "the gateway holds as many bytes of requests as it may"
            self._cut_off(ApiError(429, message, code="overloaded", retry_after_seconds=1))
        elif not request.body:
            request.body = data
        else:
            if not isinstance(request.body, bytearray):
                request.body = bytearray(request.body)
            request.body += data

    def on_message_complete(self) -> None:
        """Part of httptools' protocol."""
        if not self._closing:
            request, self._request = self._request, Request()
            self._stage = Stage.START
            self._enqueue(request)

    # Answers.

    def _enqueue(self, request: Request) -> None:
        if self._exchange is None and not self._stalled:
            self._start(request)
            return
        self._pending.append(request)
        self._transport.pause_reading()
        if len(self._pending) > _MAX_PENDING:
            self._transport.abort()

    def _start(self, request: Request) -> None:
        self._server.busy(self)
        self.deadline = self._server.now() + self._limits.request_seconds
        exchange = self._exchange = Exchange(self._transport, request)
        self._task = self._server.loop.create_task(self._server.handler.serve(exchange))
        self._task.add_done_callback(self._served)

    def _served(self, task: asyncio.Task[None]) -> None:
        exchange = self._exchange
        assert exchange is not None
        self._exchange = self._task = None
        self._server.release(exchange.request)
        if not task.cancelled() and task.exception() is not None:
            log.error("an HTTP request failed", exc_info=task.exception())
        if self._lost:
            self._server.closed(self)
            return
        if not exchange.ended:
            self._server.handler.fail(exchange, self._reason(task))
        self._go_on(exchange.request)

    def _reason(self, task: asyncio.Task[None]) -> ApiError:
        """Why a request was left without a complete answer."""
        if self._expired:
            return ApiError(504, f"no answer in {self._limits.request_seconds:g} s", code="deadline_exceeded")
        if task.cancelled():
            return ApiError(503, "the gateway stops", code="stopping", retry_after_seconds=1)
        return ApiError(500, "the gateway failed", code="internal")

    def _go_on(self, answered: Request) -> None:
        if not answered.keep_alive:
            self._leave(answered)
        elif self._clogged:  # answers that nobody reads would fill the memory
            self._stalled = True
            self._transport.pause_reading()
            self._set_deadline()
            self._server.idle(self)
        else:
            self._next()

    def _next(self) -> None:
        if self._pending:
            self._start(self._pending.popleft())
        else:
            self._transport.resume_reading()
            self._set_deadline()
            self._server.idle(self)

    def _leave(self, answered: Request) -> None:
        """Closes behind the last answer. A client that is still sending would lose the answer by a reset: it gets the
        end of our side first and some seconds to stop."""
        self._closing = True
        self.deadline = self._server.now() + self._limits.linger_seconds
        if answered.refusal is not None and self._transport.can_write_eof() and not self._transport.is_closing():
            self._transport.resume_reading()
            self._transport.write_eof()
        else:
            self._transport.close()

    # Called by the server.

    def expire(self) -> None:
        """The deadline has passed."""
        self.deadline = self._server.now() + self._limits.linger_seconds
        if self._task is not None and self._exchange is not None and not self._expired:
            self._expired, self._exchange.request.keep_alive = True, False
            self._task.cancel()
        elif self._closing or self._expired or self._transport.get_write_buffer_size():
            self._transport.abort()
        elif self._stage is Stage.START:
            self._transport.close()
        else:
            self._cut_off(ApiError(408, "the request did not arrive in time", code="request_timeout"))

    def drain(self) -> None:
        """The server stops: idle connections close at once, others behind their answer."""
        if self._exchange is not None:
            self._exchange.request.keep_alive = False
        else:
            self._transport.close()

    def abort(self) -> None:
        """Ends it at once."""
        self._transport.abort()
