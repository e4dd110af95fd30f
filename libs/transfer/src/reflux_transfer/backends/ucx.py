"""One-sided GET through libucp: cma between processes of one host, tcp or RDMA otherwise.

Two error modes, by measurement (libucx 1.21 and 1.22): mode PEER disables cma, so it is used for peers that cma cannot
reach; they need the owner's progress thread unless the transport is RDMA. A peer in reach of cma is read in mode NONE,
which needs no help from the owner, and its death is noticed by pidfd, by the failing process_vm_readv and by the
checksums above.
"""

import threading
import time
from dataclasses import dataclass
from typing import Any, ClassVar

from reflux_transfer import handles, memory
from reflux_transfer.backends import ucp
from reflux_transfer.backends.base import TransferBackend
from reflux_transfer.backends.connections import ConnectionPool
from reflux_transfer.backends.ucx_lanes import Connection, Target
from reflux_transfer.errors import BackendUnavailable, ReadDeadlineExceeded, RegionClosed
from reflux_transfer.handles import ANYWHERE, Scope
from reflux_transfer.peer import PeerWatch, ProcessIdentity
from reflux_transfer.regions import LocalRegion, RemoteRegion, check_range
from reflux_transfer.settings import TransferSettings

_PIECE = 64 << 20


@dataclass(eq=False)
class _Remote:
    """An opened region: where it lies, and how its owner is reached."""

    address: int
    key: bytes
    watch: PeerWatch | None
    pool: ConnectionPool[Connection]


def options_of(settings: TransferSettings) -> dict[str, str]:
    """The UCX variables of our context, without their prefix."""
    options = {"TLS": settings.ucx_transports, "NET_DEVICES": settings.ucx_net_devices}
    options |= {"MAX_RMA_RAILS": str(settings.ucx_rma_rails), "MAX_RNDV_RAILS": str(settings.ucx_rndv_rails)}
    return {name: value for name, value in options.items() if value}


class UcxBackend(TransferBackend):
    """ctypes on libucp."""

    name: ClassVar[str] = "ucx"

    def __init__(self, settings: TransferSettings | None = None) -> None:
        settings = settings or TransferSettings()
        self._library = ucp.Library(settings.ucx_library)
        options = options_of(settings)
        try:
            self._context = self._library.open_context(options)
            self._target = Target(self._library, self._context)
        except ucp.UcpError as error:
            raise BackendUnavailable(
                f"libucp {self._library.version} does not start with {options}: {error}"
            ) from error
        listed = settings.ucx_transports.split(",")
        self._uses_cma = settings.ucx_error_mode == "auto" and bool({"all", "cma", "sm", "shm", ""} & set(listed))
        self._max_connections = settings.ucx_connections_per_region
        self._identity = ProcessIdentity.of_this_process()
        self._regions: set[LocalRegion] = set()
        self._remotes: set[RemoteRegion] = set()
        self._lock = threading.Lock()
        self._closed = False

    def allocate(self, length: int) -> LocalRegion:
        """Private memory with its pages in place, mapped by UCX."""
        if length < 1:
            raise ValueError(f"a region has at least one byte, not {length}")
        return self.register(memory.private(length))

    def register(self, buffer: Any) -> LocalRegion:
        """Existing memory, mapped by UCX."""
        self._check_open()
        region = LocalRegion(memoryview(buffer))
        region.resource = self._library.map_memory(self._context, region.address, region.length)
        with self._lock:
            self._regions.add(region)
        return region

    def describe(self, region: LocalRegion, scope: Scope = ANYWHERE) -> bytes:
        """Worker address, memory address and remote key."""
        region.check_open()
        key = self._library.pack_key(self._context, region.resource)
        fields = {
            "address": region.address,
            "length": region.length,
            "key": key.hex(),
            "worker": self._target.address.hex(),
        }
        return handles.seal(self.name, {"owner": self._identity.to_json(), **fields}, scope)

    def open(self, handle: bytes, scope: Scope | None = None) -> RemoteRegion:
        """Decides how the owner is reached; connects at the first read."""
        self._check_open()
        envelope = handles.unseal(
            handle, self.name, scope=scope, owner=dict, address=int, length=int, key=str, worker=str
        )
        identity = ProcessIdentity.from_json(envelope["owner"])
        worker, key = (handles.hex_field(envelope, name) for name in ("worker", "key"))
        watch = PeerWatch(identity) if identity.on_this_host() else None
        if watch and not (self._uses_cma and memory.can_read_process(identity.pid, envelope["address"])):
            watch.close()
            watch = None
        pool = ConnectionPool(lambda _end: self._connect(worker, watch), self._max_connections)
        remote = RemoteRegion(envelope["length"], _Remote(envelope["address"], key, watch, pool))
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
            with path.pool.borrowed(end) as connection:
                for done in range(0, length, _PIECE):
                    source, count = path.address + remote_offset + done, min(_PIECE, length - done)
                    if time.monotonic() > end:
                        raise ReadDeadlineExceeded(f"{done} of {length} bytes read in {deadline_seconds} s")
                    connection.get(path.key, source, address + done, count, local.resource, end)

    def _connect(self, worker: bytes, watch: PeerWatch | None) -> Connection:
        return Connection(self._library, self._context, worker, watch)

    def release(self, remote: RemoteRegion) -> None:
        """Closes the connections once they are idle."""
        with self._lock:
            if remote not in self._remotes:
                return
            self._remotes.discard(remote)
        remote.resource.pool.close()
        if remote.resource.watch:
            remote.resource.watch.close()

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
