"""Shared memory between processes of one host: a sealed memfd, opened through the owner's entry in /proc.

The segment has no name, so the kernel frees it when the last process that maps it ends, whatever killed the owner.
A header page carries a token and an open flag: a reader sees a withdrawn region at once, although its mapping stays
valid. Needs: same user (or root), same pid namespace.
"""

import contextlib
import fcntl
import mmap
import os
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from reflux_transfer import handles
from reflux_transfer.backends.base import TransferBackend, check_runs
from reflux_transfer.errors import PeerGone, ReadDeadlineExceeded, RegionClosed, UnshareableRegion, WrongHandle
from reflux_transfer.handles import ANYWHERE, Scope
from reflux_transfer.memory import copy, populate
from reflux_transfer.peer import PeerWatch, ProcessIdentity
from reflux_transfer.regions import LocalRegion, RemoteRegion, Run
from reflux_transfer.settings import TransferSettings

_HEADER = mmap.PAGESIZE
_TOKEN = slice(0, 16)
_OPEN = 16
_PIECE = 256 << 20
"""Bytes between two looks at owner and deadline. Large, because libc writes past the cache only in large copies (from
190 MB on where it was measured, with 1.4-1.8 times the rate).
"""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(eq=False)
class _Segment:
    """An owned segment; `header` is its first page."""

    fd: int
    header: memoryview
    token: bytes


@dataclass(eq=False)
class _Mapping:
    """Another process's segment, mapped read-only."""

    data: np.ndarray
    token: bytes
    watch: PeerWatch
    reads: int = 0
    closed: bool = False
    idle: threading.Condition = field(default_factory=threading.Condition)

    def check(self) -> None:
        """Raises `PeerGone` unless the owner lives and still offers the region."""
        self.watch.check()
        if not self.data[_OPEN] or self.data[_TOKEN].tobytes() != self.token:
            raise PeerGone(f"process {self.watch.identity.pid} has withdrawn the region")


class ShmBackend(TransferBackend):
    """memfd segments; a read is one memcpy."""

    name: ClassVar[str] = "shm"

    def __init__(self, _settings: TransferSettings | None = None) -> None:
        self._identity = ProcessIdentity.of_this_process()
        self._regions: set[LocalRegion] = set()
        self._remotes: set[RemoteRegion] = set()
        self._lock = threading.Lock()

    def allocate(self, length: int, *, for_readers: bool = False) -> LocalRegion:
        """A new segment, its pages reserved: a full /dev/shm is a MemoryError here, not a SIGBUS later."""
        if length < 1:
            raise ValueError(f"a region has at least one byte, not {length}")
        self._check_open()
        fd = os.memfd_create("reflux-transfer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, fd)
            try:
                os.posix_fallocate(fd, 0, _HEADER + length)
            except OSError as error:
                raise MemoryError(f"no {length} bytes of shared memory: {error.strerror}") from error
            # A sealed size spares every reader the SIGBUS of a segment that shrinks under it.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            mapping = mmap.mmap(fd, _HEADER + length)
            undo.pop_all()
        populate(np.frombuffer(mapping, np.uint8))
        view = memoryview(mapping)
        token = secrets.token_bytes(16)
        view[_TOKEN], view[_OPEN] = token, 1
        region = LocalRegion(view[_HEADER:], _Segment(fd, view[:_HEADER], token))
        with self._lock:
            self._regions.add(region)
        return region

    def register(self, buffer: Any) -> LocalRegion:
        """Existing memory can be read into; it cannot be offered to others."""
        self._check_open()
        region = LocalRegion(memoryview(buffer))
        with self._lock:
            self._regions.add(region)
        return region

    def describe(self, region: LocalRegion, scope: Scope = ANYWHERE) -> bytes:
        """Owner, descriptor number and token."""
        region.check_open()
        segment = region.resource
        if not isinstance(segment, _Segment):
            raise UnshareableRegion("shm can only describe memory that it allocated")
        fields = {"fd": segment.fd, "length": region.length, "token": segment.token.hex()}
        return handles.seal(self.name, {"owner": self._identity.to_json(), **fields}, scope)

    def open(self, handle: bytes, scope: Scope | None = None) -> RemoteRegion:
        """Maps the owner's segment read-only."""
        self._check_open()
        envelope = handles.unseal(handle, self.name, scope=scope, owner=dict, fd=int, length=int, token=str)
        identity = ProcessIdentity.from_json(envelope["owner"])
        if not identity.on_this_host():
            raise PeerGone("the region's owner is on another host or in another pid namespace; shm cannot reach it")
        watch = PeerWatch(identity)
        with contextlib.ExitStack() as undo:
            undo.callback(watch.close)
            data = _map(identity.pid, envelope["fd"], envelope["length"])
            mapping = _Mapping(data, handles.hex_field(envelope, "token"), watch)
            if data[_TOKEN].tobytes() != mapping.token:
                raise WrongHandle("the segment behind the handle is another one")
            mapping.check()
            remote = RemoteRegion(envelope["length"], identity, mapping)
            with self._lock:
                self._check_open()
                self._remotes.add(remote)
            undo.pop_all()
        return remote

    def read_runs(self, remote: RemoteRegion, local: LocalRegion, runs: Sequence[Run], deadline_seconds: float) -> None:
        """memcpy in pieces; owner and deadline are looked at around each."""
        check_runs(remote, local, runs)
        end = time.monotonic() + deadline_seconds
        mapping = remote.resource
        with mapping.idle:
            if mapping.closed:
                raise RegionClosed("the remote region was released")
            mapping.reads += 1
        try:
            with local.reading(0, 0) as address:
                mapping.check()
                source = mapping.data.ctypes.data + _HEADER
                for run in runs:
                    for done in range(0, run.length, _PIECE):
                        if time.monotonic() > end:
                            raise ReadDeadlineExceeded(f"not read in {deadline_seconds} s")
                        count = min(_PIECE, run.length - done)
                        copy(address + run.local_offset + done, source + run.remote_offset + done, count)
                mapping.check()
        finally:
            with mapping.idle:
                mapping.reads -= 1
                mapping.idle.notify_all()

    def release(self, remote: RemoteRegion) -> None:
        """Unmaps once the reads in flight have ended."""
        mapping = remote.resource
        with mapping.idle:
            mapping.closed = True
            mapping.idle.wait_for(lambda: mapping.reads == 0)
            mapping.watch.close()
            mapping.data = np.empty(0, np.uint8)
        with self._lock:  # now only: a `close` meanwhile has to wait as well
            self._remotes.discard(remote)

    def unregister(self, region: LocalRegion) -> None:
        """Withdraws the segment; its pages go when the last mapping of any process goes."""
        if not region.retire():
            return
        segment = region.resource
        if isinstance(segment, _Segment):
            segment.header[_OPEN] = 0
            os.close(segment.fd)
        with self._lock:
            self._regions.discard(region)

    def close(self) -> None:
        """Releases remotes first: they may be reading into local regions."""
        with self._lock:
            self._closed = True
            remotes, regions = list(self._remotes), list(self._regions)
        for remote in remotes:
            self.release(remote)
        for region in regions:
            self.unregister(region)


def _map(pid: int, fd: int, length: int) -> np.ndarray:
    path = f"/proc/{pid}/fd/{fd}"
    try:
        # A magic link whose target is no path; anything but our memfd would be a confused or hostile handle.
        if not os.readlink(path).startswith("/memfd:reflux-transfer"):  # noqa: PTH115
            raise WrongHandle(f"descriptor {fd} of process {pid} is no transfer segment")
        ours = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except PermissionError as error:
        raise PeerGone(f"memory of process {pid} may not be opened: other user, or ptrace is restricted") from error
    except OSError as error:
        raise PeerGone(f"process {pid} has withdrawn the region: {error.strerror}") from error
    try:
        if os.fstat(ours).st_size != _HEADER + length or fcntl.fcntl(ours, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise WrongHandle("the segment behind the handle is another one")
        return np.frombuffer(mmap.mmap(ours, _HEADER + length, prot=mmap.PROT_READ), np.uint8)
    finally:
        os.close(ours)
