"""Plain blocking sockets: works between any two hosts, and is faster than UCX over tcp.

The owner's threads send, so it is one-sided for its caller only. Reads land in the registered memory directly, many
ranges by one request.
"""

import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

from reflux_transfer import handles
from reflux_transfer.backends import tcp_server as wire
from reflux_transfer.backends.base import TransferBackend, check_runs
from reflux_transfer.backends.connections import ConnectionPool
from reflux_transfer.errors import (
    BackendUnavailable,
    OutOfRange,
    PeerGone,
    ReadDeadlineExceeded,
    TransferError,
    WrongHandle,
)
from reflux_transfer.handles import ANYWHERE, Scope
from reflux_transfer.peer import PeerWatch, ProcessIdentity
from reflux_transfer.regions import LocalRegion, RemoteRegion, Run
from reflux_transfer.settings import TransferSettings

_BATCH = 64 << 20
"""Bytes after which a request ends; one longer range is one request."""


class _Connection:
    """A socket to an owner; one thread at a time."""

    def __init__(self, address: tuple[str, int], end: float) -> None:
        self.usable = True
        try:
            self._sock = socket.create_connection(address, timeout=max(0.001, end - time.monotonic()))
        except TimeoutError as error:
            raise ReadDeadlineExceeded(f"no connection to {address[0]}:{address[1]} in time") from error
        except OSError as error:
            raise PeerGone(f"the region's owner at {address[0]}:{address[1]} does not answer: {error}") from error
        self._sock.settimeout(None)
        wire.tune(self._sock)

    def fetch(self, offer: bytes, runs: Sequence[Run], local: memoryview, end: float) -> None:
        """Reads at most `MAX_RANGES` ranges by one request. `offer` is the packed region number and token."""
        self.usable = False  # until the last byte has arrived, the stream holds bytes of this answer
        request = offer + struct.pack("<I", len(runs))
        request += b"".join(wire.RANGE.pack(run.remote_offset, run.length) for run in runs)
        status = memoryview(bytearray(1))
        try:
            self._limit(end)
            self._sock.sendall(request)
            self._receive([status], end)
            if status[0] == wire.OK:
                self._receive([local[run.local_offset : run.local_offset + run.length] for run in runs], end)
        except TransferError:
            raise  # some are OSErrors, too
        except BlockingIOError as error:
            raise ReadDeadlineExceeded("the region's owner did not answer in time") from error
        except OSError as error:
            raise PeerGone(f"the region's owner is gone: {error}") from error
        self.usable = True
        if status[0] == wire.GONE:
            raise PeerGone("the region's owner has withdrawn it")
        if status[0] != wire.OK:
            raise OutOfRange("the region's owner says that the range is outside of the region")

    def _receive(self, buffers: list[memoryview], end: float) -> None:
        # The kernel's timeout counts from each call: set again before each, it ends the read at `end`.
        if not wire.receive(self._sock, buffers, lambda: self._limit(end)):
            raise PeerGone("the region's owner has closed the connection")

    def _limit(self, end: float) -> None:
        rest = end - time.monotonic()
        if rest <= 0:
            raise ReadDeadlineExceeded("the region's owner did not answer in time")
        wire.limit(self._sock, rest)

    def close(self) -> None:
        self._sock.close()


@dataclass(eq=False)
class _Remote:
    offer: bytes
    watch: PeerWatch | None
    pool: ConnectionPool[_Connection]


class TcpBackend(TransferBackend):
    """Sockets in blocking mode."""

    name: ClassVar[str] = "tcp"

    def __init__(self, settings: TransferSettings | None = None) -> None:
        settings = settings or TransferSettings()
        self._host, _, port = settings.tcp_listen.rpartition(":")
        self._port = int(port)
        self._advertised = settings.tcp_advertise or self._host
        self._max_connections = settings.tcp_connections_per_region
        self._identity = ProcessIdentity.of_this_process()
        self._server: wire.RangeServer | None = None
        self._regions: set[LocalRegion] = set()
        self._remotes: set[RemoteRegion] = set()
        self._lock = threading.Lock()

    def register(self, buffer: Any) -> LocalRegion:
        """Existing memory; costs nothing."""
        region = LocalRegion(memoryview(buffer))
        with self._lock:
            self._check_open()
            self._regions.add(region)
        return region

    def describe(self, region: LocalRegion, scope: Scope = ANYWHERE) -> bytes:
        """Address of the owner, number and token of the region. The first call starts to listen."""
        region.check_open()
        with self._lock:
            self._check_open()
            if self._server is None:
                self._server = self._listen()
            if region.resource is None:
                region.resource = self._server.offer(region.view)
            offer, port = region.resource, self._server.address[1]
        fields = {"host": self._advertised, "port": port, "region": offer.number, "token": offer.token.hex()}
        fields |= {"owner": self._identity.to_json(), "length": region.length}
        return handles.seal(self.name, fields, scope)

    def open(self, handle: bytes, scope: Scope | None = None) -> RemoteRegion:
        """Connects at the first read."""
        self._check_open()
        types = {"owner": dict, "host": str, "port": int, "region": int, "token": str, "length": int}
        envelope = handles.unseal(handle, self.name, scope=scope, **types)
        identity = ProcessIdentity.from_json(envelope["owner"])
        token = handles.hex_field(envelope, "token")
        if len(token) != wire.TOKEN_BYTES:
            raise WrongHandle(f"the handle's token has {len(token)} bytes, not {wire.TOKEN_BYTES}")
        offer = struct.pack("<Q16s", envelope["region"], token)
        address = (envelope["host"], envelope["port"])
        pool = ConnectionPool(lambda end: _Connection(address, end), self._max_connections)
        with ExitStack() as undo:
            watch = PeerWatch(identity) if identity.on_this_host() else None
            if watch:
                undo.callback(watch.close)
            remote = RemoteRegion(envelope["length"], identity, _Remote(offer, watch, pool))
            with self._lock:
                self._check_open()
                self._remotes.add(remote)
            undo.pop_all()
        return remote

    def read_runs(self, remote: RemoteRegion, local: LocalRegion, runs: Sequence[Run], deadline_seconds: float) -> None:
        """A request for every 512 ranges or 64 MiB, whichever comes first."""
        end = time.monotonic() + deadline_seconds
        check_runs(remote, local, runs)
        path: _Remote = remote.resource
        with path.pool.borrowed(end, local.reading(0, 0)) as connection:
            if path.watch:
                path.watch.check()
            for batch in _batches([run for run in runs if run.length]):
                connection.fetch(path.offer, batch, local.view, end)

    def release(self, remote: RemoteRegion) -> None:
        """Closes the connections once they are idle."""
        path: _Remote = remote.resource
        path.pool.close()
        with self._lock:  # now only: a `close` meanwhile has to wait as well
            self._remotes.discard(remote)
            if path.watch:
                path.watch.close()

    def unregister(self, region: LocalRegion) -> None:
        """Readers of other processes see it withdrawn."""
        with self._lock:
            if not region.retire():
                return
            self._regions.discard(region)
            if region.resource is not None and self._server is not None:
                self._server.withdraw(region.resource)

    def close(self) -> None:
        """Releases remotes first: they may be reading into local regions. Each step even if an earlier one fails."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            remotes, regions, server = list(self._remotes), list(self._regions), self._server
        with ExitStack() as steps:  # the last one first
            if server:
                steps.callback(server.close)
            for region in regions:
                steps.callback(self.unregister, region)
            for remote in remotes:
                steps.callback(self.release, remote)

    def _listen(self) -> wire.RangeServer:
        if self._advertised in ("", "0.0.0.0", "::"):
            raise BackendUnavailable(
                f"readers cannot connect to {self._advertised!r}: set REFLUX_TRANSFER_TCP_ADVERTISE to this host's name"
            )
        try:
            return wire.RangeServer(self._host, self._port)
        except OSError as error:
            raise BackendUnavailable(f"tcp cannot listen on {self._host}:{self._port}: {error}") from error


def _batches(runs: Sequence[Run]) -> Iterator[list[Run]]:
    batch: list[Run] = []
    size = 0
    for run in runs:
        batch.append(run)
        size += run.length
        if size >= _BATCH or len(batch) == wire.MAX_RANGES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
