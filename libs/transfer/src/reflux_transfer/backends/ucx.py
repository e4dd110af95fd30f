"""One-sided GET through libucp: cma between processes of one host, tcp or RDMA otherwise.

Two error modes, by measurement (libucx 1.21 and 1.22): mode PEER disables cma, so it is used for peers that cma cannot
reach; they need the owner's progress thread unless the transport is RDMA. A peer in reach of cma is read in mode NONE,
which needs no help from the owner, and its death is noticed by pidfd, by the failing process_vm_readv and by the
checksums above.
"""

import mmap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from reflux_transfer import handles
from reflux_transfer.backends import ucp
from reflux_transfer.backends.base import TransferBackend
from reflux_transfer.backends.ucx_lanes import Connection, Target
from reflux_transfer.errors import BackendUnavailable, PeerGone, ReadDeadlineExceeded, RegionClosed
from reflux_transfer.memory import can_read_process
from reflux_transfer.peer import PeerWatch, ProcessIdentity
from reflux_transfer.regions import LocalRegion, RemoteRegion, check_range
from reflux_transfer.settings import TransferSettings

_PIECE = 16 << 20


@dataclass(eq=False)
class _Remote:
    """An opened region: how to reach its owner, and the connections to it that are free or in use."""

    worker_address: bytes
    address: int
    key: bytes
    watch: PeerWatch | None
    free: list[Connection] = field(default_factory=list)
    opened: int = 0
    closed: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)


class UcxBackend(TransferBackend):
    """ctypes on libucp."""

    name: ClassVar[str] = "ucx"

    def __init__(self, settings: TransferSettings | None = None) -> None:
        settings = settings or TransferSettings()
        self._library = ucp.Library(settings.ucx_library)
        options = {"TLS": settings.ucx_transports, "NET_DEVICES": settings.ucx_net_devices}
        try:
            self._context = self._library.open_context({name: value for name, value in options.items() if value})
            self._target = Target(self._library, self._context)
        except ucp.UcpError as error:
            raise BackendUnavailable(
                f"libucp {self._library.version} does not start with {options}: {error}"
            ) from error
        self._uses_cma = any(name in settings.ucx_transports.split(",") for name in ("all", "cma", "sm", "shm", ""))
        self._max_connections = settings.ucx_connections_per_region
        self._identity = ProcessIdentity.of_this_process()
        self._regions: set[LocalRegion] = set()
        self._remotes: set[RemoteRegion] = set()
        self._lock = threading.Lock()
        self._closed = False

    def allocate(self, length: int) -> LocalRegion:
        """Anonymous memory, mapped by UCX."""
        if length < 1:
            raise ValueError(f"a region has at least one byte, not {length}")
        return self.register(mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))

    def register(self, buffer: Any) -> LocalRegion:
        """Existing memory, mapped by UCX."""
        self._check_open()
        region = LocalRegion(memoryview(buffer))
        region.resource = self._library.map_memory(self._context, region.address, region.length)
        with self._lock:
            self._regions.add(region)
        return region

    def describe(self, region: LocalRegion) -> bytes:
        """Worker address, memory address and remote key."""
        region.check_open()
        key = self._library.pack_key(self._context, region.resource)
        fields = {
            "address": region.address,
            "length": region.length,
            "key": key.hex(),
            "worker": self._target.address.hex(),
        }
        return handles.seal(self.name, {"owner": self._identity.to_json(), **fields})

    def open(self, handle: bytes) -> RemoteRegion:
        """Decides how the owner is reached; connects at the first read."""
        self._check_open()
        envelope = handles.unseal(handle, self.name, owner=dict, address=int, length=int, key=str, worker=str)
        identity = ProcessIdentity.from_json(envelope["owner"])
        worker, key = (handles.hex_field(envelope, name) for name in ("worker", "key"))
        watch = PeerWatch(identity) if identity.on_this_host() else None
        if watch and not (self._uses_cma and can_read_process(identity.pid, envelope["address"])):
            watch.close()
            watch = None
        remote = RemoteRegion(envelope["length"], _Remote(worker, envelope["address"], key, watch))
        with self._lock:
            self._remotes.add(remote)
        return remote

    def read(
        self,
        remote: RemoteRegion,
        remote_offset: int,
        local: LocalRegion,
        local_offset: int,
        length: int,
        deadline_seconds: float,
    ) -> None:
        """GETs in pieces on one of the region's connections."""
        check_range("remote", remote.length, remote_offset, length)
        end = time.monotonic() + deadline_seconds
        path = remote.resource
        with local.reading(local_offset, length) as address:
            if path.watch:
                path.watch.check()
            if not length:
                return
            with self._connection(path, end) as connection:
                for done in range(0, length, _PIECE):
                    source, count = path.address + remote_offset + done, min(_PIECE, length - done)
                    if time.monotonic() > end:
                        raise ReadDeadlineExceeded(f"{done} of {length} bytes read in {deadline_seconds} s")
                    connection.get(path.key, source, address + done, count, local.resource, end)

    @contextmanager
    def _connection(self, path: _Remote, end: float) -> Iterator[Connection]:
        connection = self._borrow(path, end)
        try:
            yield connection
        finally:
            keep = connection.usable and not path.closed
            if not keep:
                connection.close()
            with path.changed:
                if keep:
                    path.free.append(connection)
                else:
                    path.opened -= 1
                path.changed.notify_all()

    def _borrow(self, path: _Remote, end: float) -> Connection:
        with path.changed:
            ready = path.changed.wait_for(
                lambda: path.closed or path.free or path.opened < self._max_connections,
                max(0.0, end - time.monotonic()),
            )
            if path.closed:
                raise RegionClosed("the remote region was released")
            if not ready:
                raise ReadDeadlineExceeded("all connections to the region's owner were busy")
            if path.free:
                return path.free.pop()
            path.opened += 1
        try:
            return Connection(self._library, self._context, path.worker_address, path.watch)
        except PeerGone:
            with path.changed:
                path.opened -= 1
                path.changed.notify_all()
            raise

    def release(self, remote: RemoteRegion) -> None:
        """Closes the connections once they are idle."""
        with self._lock:
            if remote not in self._remotes:
                return
            self._remotes.discard(remote)
        path = remote.resource
        with path.changed:
            path.closed = True
            path.changed.notify_all()
            path.changed.wait_for(lambda: path.opened == len(path.free))
        for connection in path.free:
            connection.close()
        path.free.clear()
        if path.watch:
            path.watch.close()

    def unregister(self, region: LocalRegion) -> None:
        """Unmaps it from UCX; the memory goes with its last reference."""
        if not region.retire():
            return
        self._library.check(self._library.calls.ucp_mem_unmap(self._context, region.resource))
        with self._lock:
            self._regions.discard(region)

    def close(self) -> None:
        """Remotes, then regions, then the target's worker, then the context."""
        if self._closed:
            return
        self._closed = True
        for remote in list(self._remotes):
            self.release(remote)
        for region in list(self._regions):
            self.unregister(region)
        self._target.close()
        self._library.calls.ucp_cleanup(self._context)

    def _check_open(self) -> None:
        if self._closed:
            raise RegionClosed("the backend is closed")
