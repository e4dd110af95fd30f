"""One-sided GET through libucp: cma between processes of one host, tcp or RDMA otherwise.

Two error modes, by measurement (libucx 1.21 and 1.22): mode PEER disables cma, so it is used for peers that cma cannot
reach; they need the owner's progress thread unless the transport is RDMA. A peer in reach of cma is read in mode NONE,
which needs no help from the owner, and its death is noticed by pidfd, by the failing process_vm_readv and by the
checksums above.

Neither way looks at registrations, so a word on the owner's board is read behind the bytes, in the same flight: one
endpoint serves its reads in order, and where it does not (RDMA over several NICs) the NIC refuses unmapped memory.
Memory that was described keeps its place, so that a late emulated read does not end the owner by SIGSEGV.
"""

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

from reflux_transfer import handles, memory
from reflux_transfer.backends import ucp
from reflux_transfer.backends.base import TransferBackend, check_runs
from reflux_transfer.backends.board import WORD_BYTES, Board, Word, check_word
from reflux_transfer.backends.connections import ConnectionPool
from reflux_transfer.backends.ucx_lanes import Connection, RemoteWord, Target
from reflux_transfer.errors import BackendUnavailable, ReadDeadlineExceeded
from reflux_transfer.handles import ANYWHERE, Scope
from reflux_transfer.peer import PeerWatch, ProcessIdentity
from reflux_transfer.regions import LocalRegion, RemoteRegion, Run
from reflux_transfer.settings import TransferSettings

_PIECE = 64 << 20


@dataclass(eq=False)
class _Remote:
    """An opened region: where it lies, and how its owner is reached."""

    address: int
    key: bytes
    word: RemoteWord
    watch: PeerWatch | None
    pool: ConnectionPool[Connection]


@dataclass(eq=False)
class _Mapped:
    """What belongs to a local region: UCX's memory handle, and its word once it was described."""

    memh: int
    word: Word | None = None


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
        with ExitStack() as undo:
            try:
                self._context = self._library.open_context(options)
                undo.callback(self._library.calls.ucp_cleanup, self._context)
                self._board = Board()
                self._board_memh = self._library.map_memory(self._context, self._board.address, len(self._board.view))
                undo.callback(self._library.unmap_memory, self._context, self._board_memh)
                self._target = Target(self._library, self._context)
            except ucp.UcpError as error:
                raise BackendUnavailable(
                    f"libucp {self._library.version} does not start with {options}: {error}"
                ) from error
            undo.pop_all()
        listed = settings.ucx_transports.split(",")
        self._uses_cma = settings.ucx_error_mode == "auto" and bool({"all", "cma", "sm", "shm", ""} & set(listed))
        self._max_connections = settings.ucx_connections_per_region
        self._identity = ProcessIdentity.of_this_process()
        self._regions: set[LocalRegion] = set()
        self._remotes: set[RemoteRegion] = set()
        self._lent: list[memoryview] = []
        self._lock = threading.Lock()

    def register(self, buffer: Any) -> LocalRegion:
        """Existing memory, mapped by UCX. Once described it stays referenced until `close`."""
        region = LocalRegion(memoryview(buffer))
        with self._lock:
            self._check_open()
            region.resource = _Mapped(self._library.map_memory(self._context, region.address, region.length))
            self._regions.add(region)
        return region

    def describe(self, region: LocalRegion, scope: Scope = ANYWHERE) -> bytes:
        """Worker address, memory address, remote key, and the region's word."""
        with self._lock:
            region.check_open()
            mapped: _Mapped = region.resource
            if mapped.word is None:
                mapped.word = self._board.offer()
                if not memory.keep_place(region.address):
                    self._lent.append(region.view)
            keys = [self._library.pack_key(self._context, memh) for memh in (mapped.memh, self._board_memh)]
        fields = {
            "address": region.address,
            "length": region.length,
            "key": keys[0].hex(),
            "worker": self._target.address.hex(),
            "word_address": mapped.word.address,
            "word_key": keys[1].hex(),
            "word": mapped.word.value,
        }
        return handles.seal(self.name, {"owner": self._identity.to_json(), **fields}, scope)

    def open(self, handle: bytes, scope: Scope | None = None) -> RemoteRegion:
        """Decides how the owner is reached; connects at the first read."""
        self._check_open()
        types = {"owner": dict, "address": int, "length": int, "key": str, "worker": str}
        types |= {"word_address": int, "word_key": str, "word": int}
        envelope = handles.unseal(handle, self.name, scope=scope, **types)
        identity = ProcessIdentity.from_json(envelope["owner"])
        worker, key, word_key = (handles.hex_field(envelope, name) for name in ("worker", "key", "word_key"))
        word = RemoteWord(envelope["word_address"], word_key, envelope["word"])
        with ExitStack() as undo:
            watch = self._watch(identity, word, undo)
            pool = ConnectionPool(lambda _end: self._connect(worker, watch), self._max_connections)
            remote = RemoteRegion(envelope["length"], identity, _Remote(envelope["address"], key, word, watch, pool))
            with self._lock:
                self._check_open()
                self._remotes.add(remote)
            undo.pop_all()
        return remote

    def _watch(self, identity: ProcessIdentity, word: RemoteWord, undo: ExitStack) -> PeerWatch | None:
        """The watch of a peer that cma reaches, None for others. Raises `PeerGone`, also for a withdrawn region."""
        if not identity.on_this_host():
            return None
        watch = PeerWatch(identity)
        undo.callback(watch.close)
        found = memory.read_process(identity.pid, word.address, WORD_BYTES) if self._uses_cma else None
        if found is None:
            watch.close()
            return None
        check_word(word.value, int.from_bytes(found, sys.byteorder))
        return watch

    def read_runs(self, remote: RemoteRegion, local: LocalRegion, runs: Sequence[Run], deadline_seconds: float) -> None:
        """One GET after the other on one connection; the region's word comes with the last one."""
        end = time.monotonic() + deadline_seconds
        check_runs(remote, local, runs)
        path: _Remote = remote.resource
        pieces = list(_pieces(runs))
        with path.pool.borrowed(end, local.reading(0, 0)) as connection:
            if path.watch:
                path.watch.check()
            for done, (source, destination, count) in enumerate(pieces, 1):
                if time.monotonic() > end:
                    raise ReadDeadlineExceeded(f"{done - 1} of {len(pieces)} pieces read in {deadline_seconds} s")
                word = path.word if done == len(pieces) else None
                place = path.address + source, local.address + destination, count
                connection.get(path.key, *place, local.resource.memh, end, word)

    def _connect(self, worker: bytes, watch: PeerWatch | None) -> Connection:
        return Connection(self._library, self._context, worker, watch)

    def release(self, remote: RemoteRegion) -> None:
        """Closes the connections once they are idle."""
        path: _Remote = remote.resource
        path.pool.close()
        with self._lock:  # now only: a `close` meanwhile has to wait as well
            self._remotes.discard(remote)
            if path.watch:
                path.watch.close()

    def unregister(self, region: LocalRegion) -> None:
        """Readers see it withdrawn, UCX unmaps it; the memory goes with its last reference."""
        with self._lock:
            if not region.retire():
                return
            self._regions.discard(region)
            mapped: _Mapped = region.resource
            if mapped.word:
                self._board.withdraw(mapped.word)
            self._library.unmap_memory(self._context, mapped.memh)

    def close(self) -> None:
        """Remotes, then regions, then the target's worker, then the context; each even if an earlier one fails."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            remotes, regions = list(self._remotes), list(self._regions)
        with ExitStack() as steps:  # the last one first
            steps.callback(self._library.calls.ucp_cleanup, self._context)
            steps.callback(self._library.unmap_memory, self._context, self._board_memh)
            steps.callback(self._target.close)
            for region in regions:
                steps.callback(self.unregister, region)
            for remote in remotes:
                steps.callback(self.release, remote)
        self._lent.clear()


def _pieces(runs: Sequence[Run]) -> Iterator[tuple[int, int, int]]:
    """The runs without empty ones, cut where the deadline is looked at: remote offset, local offset, bytes."""
    for run in runs:
        for done in range(0, run.length, _PIECE):
            yield run.remote_offset + done, run.local_offset + done, min(_PIECE, run.length - done)
