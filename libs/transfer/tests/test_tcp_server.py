"""The owner's side of `tcp`: it goes on accepting whatever happens, and keeps few strangers for a short time."""

import errno
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from reflux_transfer.backends import tcp_server
from reflux_transfer.backends.tcp_server import GONE, OK, RANGE, REQUEST, RangeServer

BYTES = b"the bytes of the region"


def serving(**limits: float) -> Iterator[RangeServer]:
    server = RangeServer("127.0.0.1", 0, **limits)  # type: ignore[arg-type]
    yield server
    server.close()


@pytest.fixture
def server() -> Iterator[RangeServer]:
    yield from serving()


def request(offer: tcp_server.Offer, token: bytes = b"") -> bytes:
    return REQUEST.pack(offer.number, token or offer.token, 1) + RANGE.pack(0, len(BYTES))


def connected(server: RangeServer) -> socket.socket:
    return socket.create_connection(server.address, timeout=30)


def answer(sock: socket.socket, count: int) -> bytes:
    return sock.recv(count, socket.MSG_WAITALL)


def served(server: RangeServer) -> bytes:
    offer = server.offer(memoryview(bytearray(BYTES)))
    with connected(server) as sock:
        sock.sendall(request(offer))
        return answer(sock, 1 + len(BYTES))


def fails_once(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, error: Exception) -> threading.Event:
    real, failed = getattr(owner, name), threading.Event()

    def once(*arguments: object) -> object:
        if failed.is_set():
            return real(*arguments)
        failed.set()
        raise error

    monkeypatch.setattr(owner, name, once)
    return failed


@pytest.mark.parametrize("kind", [errno.EMFILE, errno.ECONNABORTED, errno.ENOBUFS])
def test_an_accept_that_fails_does_not_end_the_server(
    server: RangeServer, kind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = fails_once(monkeypatch, socket.socket, "accept", OSError(kind, "no"))
    assert served(server) == bytes([OK]) + BYTES  # its accept began before: the next one fails
    assert failed.wait(30)
    assert served(server) == bytes([OK]) + BYTES


def test_a_thread_that_does_not_start_costs_one_connection(
    server: RangeServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fails_once(monkeypatch, threading.Thread, "start", RuntimeError("can't start new thread"))
    with connected(server) as sock:
        assert answer(sock, 1) == b""
    assert served(server) == bytes([OK]) + BYTES
    assert "can't start new thread" in caplog.text


def test_the_eldest_strangers_make_room_and_readers_are_none() -> None:
    for server in serving(strangers=2):
        offer = server.offer(memoryview(bytearray(BYTES)))
        with ExitStack() as stack:
            reader = stack.enter_context(connected(server))
            reader.sendall(request(offer))
            assert answer(reader, 1 + len(BYTES)) == bytes([OK]) + BYTES
            strangers = []
            for _ in range(5):
                strangers.append(stack.enter_context(connected(server)))
                strangers[-1].sendall(request(offer, bytes(16)))
                assert answer(strangers[-1], 1) == bytes([GONE])
            assert [answer(each, 1) for each in strangers[:3]] == [b""] * 3
            for known, sock in ((True, reader), (False, strangers[3]), (False, strangers[4])):
                sock.sendall(request(offer) if known else request(offer, bytes(16)))
                assert answer(sock, 1) == bytes([OK if known else GONE])


def test_strangers_are_sent_away_in_time_and_readers_stay() -> None:
    for server in serving(stranger_seconds=0.2):
        offer = server.offer(memoryview(bytearray(BYTES)))
        with connected(server) as reader, connected(server) as silent, connected(server) as wordy:
            reader.sendall(request(offer))
            assert answer(reader, 1 + len(BYTES)) == bytes([OK]) + BYTES
            wordy.sendall(struct.pack("<Q", offer.number))
            assert answer(silent, 1) == answer(wordy, 1) == b""  # either is later than the reader's 0.2 s
            reader.sendall(request(offer))
            assert answer(reader, 1 + len(BYTES)) == bytes([OK]) + BYTES


def test_closing_ends_strangers_and_threads() -> None:
    before = threading.active_count()
    server = RangeServer("127.0.0.1", 0)
    with connected(server) as sock:
        sock.sendall(b"half")
        server.close()
        assert threading.active_count() == before
