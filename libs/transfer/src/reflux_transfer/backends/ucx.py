"""One-sided GET through libucp: shared segments or cma between processes of one host, tcp or RDMA otherwise.

Two error modes, by measurement (libucx 1.21 and 1.22): mode PEER disables cma, so it is used for peers that cma cannot
reach; they need the owner's progress thread unless the transport is RDMA. A peer in reach of cma is read in mode NONE,
which needs no help from the owner, and its death is noticed by pidfd, by the failing process_vm_readv and by the
checksums above.

Neither way looks at registrations, so a word on the owner's board is read behind the bytes, in the same flight: one
endpoint serves its reads in order, and where it does not (RDMA over several NICs) the NIC refuses unmapped memory.
Memory that was described keeps its place, so that a late emulated read does not end the owner by SIGSEGV.
"""

import logging
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
from reflux_transfer.backends.ucx_segments import Segments, SmallPages
from reflux_transfer.errors import BackendUnavailable, PeerGone, ReadDeadlineExceeded
from reflux_transfer.handles import ANYWHERE, Scope
from reflux_transfer.peer import PeerWatch, ProcessIdentity
from reflux_transfer.regions import LocalRegion, RemoteRegion, Run
from reflux_transfer.settings import TransferSettings

log = logging.getLogger(__name__)

_PIECE = 64 << 20
_ATTACHED_PIECE = 256 << 20
"""Larger where a read is a memcpy: libc writes past the cache only in large copies, at twice the rate."""


@dataclass(eq=False)
class _Remote:
    """An opened region: where it lies, and how its owner is reached."""

    address: int
    key: bytes
    word: RemoteWord
    watch: PeerWatch | None
    pool: ConnectionPool[Connection]
    attached: bool = False
    """Its memory is a segment that is mapped here."""


@dataclass(eq=False)
class _Mapped:
    """What belongs to a local region: UCX's memory handle, and its word once it was described."""

    memh: int
    segment: int | None = None
    """UCX's handle of the memory in the context of segments, when it is one."""
    word: Word | None = None
    """On the board of segments when it is one."""


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
        wanted = settings.ucx_segments != "off" and self._uses_cma and settings.ucx_net_devices == "lo"
        self._maps_segments = self._makes_segments = wanted
        self._least_segment = memory.HUGE_PAGE if settings.ucx_segments == "auto" else 1
        self._segments: Segments | None = None
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

    def allocate(self, length: int, *, for_readers: bool = False) -> LocalRegion:
        """Private memory; for readers on this host a shared segment, where UCX makes one."""
        wanted = for_readers and self._makes_segments and length >= self._least_segment
        segments = self._open_segments() if wanted else None
        if segments is None:
            return super().allocate(length)
        try:
            view, memh = segments.allocate(length)
        except SmallPages as reason:
            log.info("readers on this host read by cma: %s", reason)
            self._makes_segments = False
            return super().allocate(length)
        except (MemoryError, ucp.UcpError) as error:
            log.warning("readers on this host will be slower: no shared segment (%s)", error)
            return super().allocate(length)
        region = self.register(view)
        region.resource.segment = memh
        return region

    def _open_segments(self) -> Segments | None:
        with self._lock:
            self._check_open()
            if self._segments is None and self._maps_segments:
                try:
                    self._segments = Segments(
                        self._library, self._context, self._target.still, huge_only=self._least_segment > 1
                    )
                except BackendUnavailable as error:
                    log.warning("no shared segments between this process and others of this host: %s", error)
                    self._maps_segments = self._makes_segments = False
            return self._segments

    def describe(self, region: LocalRegion, scope: Scope = ANYWHERE) -> bytes:
        """Worker address, memory address, remote key, and the region's word."""
        with self._lock:
            region.check_open()
            mapped: _Mapped = region.resource
            segments = self._segments if mapped.segment else None
            board, board_memh = (segments.board, segments.board_memh) if segments else (self._board, self._board_memh)
            if mapped.word is None:
                mapped.word = board.offer()
                if not (segments or memory.keep_place(region.address)):
                    self._lent.append(region.view)
            fields: dict[str, object] = {
                "address": region.address,
                "length": region.length,
                "worker": self._target.address.hex(),
                "key": self._library.pack_key(self._context, mapped.memh).hex(),
                "word_address": mapped.word.address,
                "word_key": self._library.pack_key(self._context, board_memh).hex(),
                "word": mapped.word.value,
            }
            if segments and mapped.segment:
                fields |= segments.describe(mapped.segment)
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
            path = self._attached(envelope, word, watch) if watch and "segment_key" in envelope else None
            if path is None:
                pool = ConnectionPool(lambda _end: self._connect(worker, watch), self._max_connections)
                path = _Remote(envelope["address"], key, word, watch, pool)
            undo.callback(path.pool.close)
            remote = RemoteRegion(envelope["length"], identity, path)
            with self._lock:
                self._check_open()
                self._remotes.add(remote)
            undo.pop_all()
        return remote

    def _attached(self, envelope: dict[str, Any], word: RemoteWord, watch: PeerWatch) -> _Remote | None:
        """The way to a segment of this host, None where it cannot be mapped: cma reads it as any other memory."""
        segments = self._open_segments()
        if segments is None:
            return None
        names = "segment_worker", "segment_key", "segment_word_key"
        worker, key, word_key = (handles.hex_field(envelope, name) for name in names)

        def connect(_end: float) -> Connection:
            connection = Connection(self._library, segments.context, worker, watch)
            try:
                connection.attach(key)
            except ucp.UcpError as error:
                connection.close()
                watch.check()
                raise PeerGone(f"the region's owner has withdrawn it: {error}") from error
            return connection

        try:
            pool = ConnectionPool(connect, self._max_connections, connect(0.0))
        except PeerGone as error:
            watch.check()
            log.warning("reads by cma instead of a shared segment: %s", error)
            return None
        return _Remote(envelope["address"], key, RemoteWord(word.address, word_key, word.value), watch, pool, True)

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
        pieces = list(_pieces(runs, _ATTACHED_PIECE if path.attached else _PIECE))
        with path.pool.borrowed(end, local.reading(0, 0)) as connection:
            if path.watch:
                path.watch.check()
            for done, (source, destination, count) in enumerate(pieces, 1):
                if time.monotonic() > end:
                    raise ReadDeadlineExceeded(f"{done - 1} of {len(pieces)} pieces read in {deadline_seconds} s")
                word = path.word if done == len(pieces) else None
                place = path.address + source, local.address + destination, count
                memh = None if path.attached else local.resource.memh
                connection.get(path.key, *place, memh, end, word)

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
                board = self._segments.board if self._segments and mapped.segment else self._board
                board.withdraw(mapped.word)
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
            if self._segments:
                steps.callback(self._segments.close)
            steps.callback(self._target.close)
            for region in regions:
                steps.callback(self.unregister, region)
            for remote in remotes:
                steps.callback(self.release, remote)
        self._lent.clear()


def _pieces(runs: Sequence[Run], most: int) -> Iterator[tuple[int, int, int]]:
    """The runs without empty ones, cut where the deadline is looked at: remote offset, local offset, bytes."""
    for run in runs:
        for done in range(0, run.length, most):
            yield run.remote_offset + done, run.local_offset + done, min(most, run.length - done)
