import errno
import socket
import struct
from collections.abc import Iterator

import pytest
from owner_process import MIB, SIZE, Owner, first_difference

from reflux_transfer import handles
from reflux_transfer.backends import tcp_server
from reflux_transfer.backends.tcp import TcpBackend
from reflux_transfer.errors import BackendUnavailable, PeerGone, WrongHandle
from reflux_transfer.settings import TransferSettings


@pytest.fixture
def backend() -> Iterator[TcpBackend]:
    opened = TcpBackend()
    yield opened
    opened.close()


@pytest.fixture
def owner() -> Iterator[Owner]:
    process = Owner("tcp", SIZE)
    yield process
    process.close()


def envelope_of(owner: Owner) -> dict:
    return {k: v for k, v in handles.unseal(owner.handle, "tcp").items() if k not in ("format", "backend")}


def test_a_wrong_token_reads_nothing(backend: TcpBackend, owner: Owner) -> None:
    fields = envelope_of(owner)
    fields["token"] = "00" * 16
    remote, local = backend.open(handles.seal("tcp", fields)), backend.allocate(1000)
    with pytest.raises(PeerGone):
        backend.read(remote, 0, local, 0, 1000, 30.0)
    assert not any(local.view)
    for token in ("00" * 15, "zz"):
        with pytest.raises(WrongHandle):
            backend.open(handles.seal("tcp", {**fields, "token": token}))


def test_requests_that_are_no_requests_end_only_their_connection(backend: TcpBackend, owner: Owner) -> None:
    fields = envelope_of(owner)
    head = struct.pack("<Q16s", fields["region"], bytes.fromhex(fields["token"]))
    outside = head + struct.pack("<IQQ", 1, SIZE - 1, 2)
    huge = head + struct.pack("<IQQ", 1, (1 << 64) - 1, (1 << 64) - 1)
    for request, answer in (
        (outside, bytes([tcp_server.OUTSIDE])),
        (huge, bytes([tcp_server.OUTSIDE])),
        (head + struct.pack("<I", 0), b""),
        (head + struct.pack("<I", 1 << 31), b""),
        (b"GET / HTTP/1.1\r\nHost: owner\r\n\r\n", b""),
        (b"short", b""),
    ):
        with socket.create_connection((fields["host"], fields["port"]), timeout=30) as sock:
            sock.sendall(request)
            try:
                sock.shutdown(socket.SHUT_WR)
                assert sock.recv(10) == answer
            except OSError as error:  # it left before it had read everything
                if error.errno not in (errno.ECONNRESET, errno.ENOTCONN) or answer:
                    raise
    remote, local = backend.open(owner.handle), backend.allocate(MIB)
    backend.read(remote, 0, local, 0, MIB, 30.0)
    assert first_difference(local.view) is None


def test_readers_need_an_address_to_connect_to() -> None:
    backend = TcpBackend(TransferSettings(tcp_listen="0.0.0.0:0"))
    with pytest.raises(BackendUnavailable, match="TCP_ADVERTISE"):
        backend.describe(backend.allocate(1))
    backend.close()
    backend = TcpBackend(TransferSettings(tcp_listen="0.0.0.0:0", tcp_advertise="127.0.0.1"))
    source, local = backend.allocate(3), backend.allocate(3)
    source.view[:] = b"abc"
    backend.read(backend.open(backend.describe(source)), 0, local, 0, 3, 30.0)
    assert bytes(local.view) == b"abc"
    backend.close()
