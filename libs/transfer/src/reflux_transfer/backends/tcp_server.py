"""The owner's side of the `tcp` backend: answers requests for ranges of its regions, one thread per connection.

Wire format, little endian. Request: region number u64, token 16 bytes, n u32, n times (offset u64, length u64).
Answer: status u8, then, if it is `OK`, the bytes of all ranges one after the other.

A connection is a stranger until its first request with a region's token: strangers have 10 s, and when there are more
than 256 the eldest has to go. Readers send their first request as soon as they are connected.
"""

import contextlib
import itertools
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

log = logging.getLogger(__name__)

REQUEST, RANGE = struct.Struct("<Q16sI"), struct.Struct("<QQ")
OK, GONE, OUTSIDE = 0, 1, 2
TOKEN_BYTES = 16
MAX_RANGES = 512
"""Ranges in one request, and buffers in one system call (the kernel's limit is 1024)."""

_PIECE = 4 << 20
_STRANGERS = 256
_STRANGER_SECONDS = 10.0
_PAUSE_SECONDS = 0.1
_DEAD_HOST_MS = 60_000


@dataclass(eq=False)
class Offer:
    """A region that is served; `withdrawn` ends answers that are under way."""

    number: int
    view: memoryview
    token: bytes = field(default_factory=lambda: secrets.token_bytes(TOKEN_BYTES))
    withdrawn: bool = False


class RangeServer:
    """Listens from its first moment to `close`. `address` is what readers connect to."""

    def __init__(
        self, host: str, port: int, *, strangers: int = _STRANGERS, stranger_seconds: float = _STRANGER_SECONDS
    ) -> None:
        """`strangers` is how many connections without a valid token are kept, `stranger_seconds` for how long.

        Raises `OSError` when the address cannot be bound.
        """
        self._max_strangers, self._stranger_seconds = strangers, stranger_seconds
        self._listener = socket.create_server((host, port), backlog=128)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._numbers = itertools.count(1)
        self._offers: dict[int, Offer] = {}
        self._answering: dict[socket.socket, threading.Thread] = {}
        self._strangers: dict[socket.socket, float] = {}
        """Until when each may stay (a monotonic time), the eldest first."""
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._acceptor = threading.Thread(target=self._accept, name="reflux-tcp-accept", daemon=True)
        self._acceptor.start()

    def offer(self, view: memoryview) -> Offer:
        """Serves a region from now on."""
        with self._lock:
            offer = Offer(next(self._numbers), view)
            self._offers[offer.number] = offer
        return offer

    def withdraw(self, offer: Offer) -> None:
        """Ends serving it; an answer under way breaks off after its current piece."""
        with self._lock:
            self._offers.pop(offer.number, None)
        offer.withdrawn = True

    def close(self) -> None:
        """Breaks all connections off and waits for their threads."""
        with self._lock:
            self._closed.set()
            answering = dict(self._answering)
        for sock in [self._listener, *answering]:
            _break_off(sock)
        for thread in [self._acceptor, *answering.values()]:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        """Goes on after errors: they are of one connection, or pass (out of descriptors, threads or memory)."""
        failing = False
        while not self._closed.is_set():
            try:
                sock, _ = self._listener.accept()
                self._admit(sock)
                failing = False
            except (OSError, RuntimeError, MemoryError) as error:
                if not failing and not self._closed.is_set():
                    log.warning("no connection is accepted at %s:%s: %s", *self.address, error)
                failing = True
                self._closed.wait(_PAUSE_SECONDS)

    def _admit(self, sock: socket.socket) -> None:
        """Gives the connection a thread. Raises `RuntimeError` when there is none to be had."""
        with contextlib.ExitStack() as undo:
            undo.callback(sock.close)
            tune(sock)
            thread = threading.Thread(target=self._serve, args=(sock,), name="reflux-tcp-owner", daemon=True)
            with self._lock:
                if self._closed.is_set():
                    return
                thread.start()  # it waits for the lock when it ends
                self._answering[sock] = thread
                self._strangers[sock] = time.monotonic() + self._stranger_seconds
                if len(self._strangers) > self._max_strangers:
                    eldest = next(iter(self._strangers))
                    del self._strangers[eldest]
                    _break_off(eldest)
            undo.pop_all()

    def _serve(self, sock: socket.socket) -> None:
        try:
            while self._answer(sock):
                pass
        except OSError:
            pass  # the reader went away in the middle, or said nothing: its business
        finally:
            with self._lock:
                self._answering.pop(sock, None)
                self._strangers.pop(sock, None)
            sock.close()

    def _answer(self, sock: socket.socket) -> bool:
        """Serves one request; False when the connection is to end."""
        with self._lock:
            end = self._strangers.get(sock)

        def patience() -> None:
            if end is not None:
                limit(sock, end - time.monotonic())

        head = memoryview(bytearray(REQUEST.size))
        if not receive(sock, [head], patience):
            return False
        number, token, count = REQUEST.unpack(head)
        if not 0 < count <= MAX_RANGES:
            return False
        body = memoryview(bytearray(count * RANGE.size))
        if not receive(sock, [body], patience):
            return False
        with self._lock:
            offer = self._offers.get(number)
        if offer is None or not secrets.compare_digest(offer.token, token):
            sock.sendall(bytes([GONE]))
            return True
        if end is not None:
            self._trust(sock)
        ranges = list(RANGE.iter_unpack(body))
        if any(offset + length > len(offer.view) for offset, length in ranges):
            sock.sendall(bytes([OUTSIDE]))
            return True
        return self._send(sock, offer, ranges)

    def _trust(self, sock: socket.socket) -> None:
        with self._lock:
            self._strangers.pop(sock, None)
        limit(sock, None)

    def _send(self, sock: socket.socket, offer: Offer, ranges: Sequence[tuple[int, int]]) -> bool:
        """Sends in pieces of at most 4 MiB, so that a withdrawal is seen soon."""
        batch: list[memoryview] = [memoryview(bytes([OK]))]
        size = 0
        for offset, length in ranges:
            for start in range(offset, offset + length, _PIECE):
                piece = offer.view[start : min(start + _PIECE, offset + length)]
                batch.append(piece)
                size += len(piece)
                if size >= _PIECE or len(batch) >= MAX_RANGES:
                    if offer.withdrawn:
                        return False
                    send(sock, batch)
                    batch, size = [], 0
        if offer.withdrawn:
            return False
        send(sock, batch)
        return True


def tune(sock: socket.socket) -> None:
    """No delay for requests, and an end for connections to hosts that went dark.

    The buffers are left to the kernel: a fixed SO_RCVBUF switches its tuning off.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_HOST_MS)


def limit(sock: socket.socket, seconds: float | None) -> None:
    """Bounds each later call by the kernel's timeout, None takes that away: Python's own would poll before each call.

    A call that waits longer raises `BlockingIOError`, and so does this one when no time is left.
    """
    if seconds is not None and seconds <= 0:
        raise BlockingIOError("the time is over")
    whole, micros = divmod(max(1, int(seconds * 1e6)), 1_000_000) if seconds is not None else (0, 0)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", whole, micros))


def _break_off(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the peer was faster
        sock.shutdown(socket.SHUT_RDWR)


def send(sock: socket.socket, buffers: list[memoryview]) -> None:
    """Sends all buffers (at most `MAX_RANGES`)."""
    while buffers:
        buffers = _rest(buffers, sock.sendmsg(buffers))


def receive(sock: socket.socket, buffers: list[memoryview], before_each: Callable[[], None] | None = None) -> bool:
    """Fills all buffers (at most `MAX_RANGES`); False when the peer has closed before the last byte.

    `before_each` is called before each system call. Raises `BlockingIOError` when the socket's receive timeout passes.
    """
    buffers = _rest(buffers, 0)
    while buffers:
        if before_each:
            before_each()
        count = sock.recvmsg_into(buffers, 0, socket.MSG_WAITALL)[0]
        if not count:
            return False
        buffers = _rest(buffers, count)
    return True


def _rest(buffers: list[memoryview], done: int) -> list[memoryview]:
    """The buffers without their first `done` bytes, and without empty ones."""
    for index, buffer in enumerate(buffers):
        if done < len(buffer):
            return [buffer[done:], *(each for each in buffers[index + 1 :] if len(each))]
        done -= len(buffer)
    return []
