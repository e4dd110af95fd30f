"""Memory that UCX allocates in shared segments, and the UCX context in which processes of one host read it.

A GET of such memory is a memcpy by the reader; cma has the kernel copy private memory, which took twice the time for
269 MB. UCX's present protocols emulate reads of shared memory by messages, so this context asks for the older ones
(`PROTO_ENABLE=n`), and is one of its own to leave cma and RDMA theirs. UCX unlinks a segment when it is made: the
kernel frees it with the last process that has it mapped.
"""

import ctypes
import os
import weakref
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from reflux_transfer import memory
from reflux_transfer.backends import ucp
from reflux_transfer.backends.board import WORD_BYTES, WORDS, Board
from reflux_transfer.errors import BackendUnavailable

Lock = AbstractContextManager[Any]
"""A reentrant one."""

OPTIONS = {"TLS": "posix,self", "PROTO_ENABLE": "n"}
_OLDEST = 1, 19  # before it UCX ends the reader's process when a segment's owner is gone (openucx/ucx#10380)
_HUGE_SHARE = 0.9
_SEGMENT_FOLDER = Path("/dev/shm")  # where UCX's posix transport puts them; its setting POSIX_DIR stays as it is


class SmallPages(Exception):
    """A segment would be read more slowly than private memory."""


class Segments:
    """The context, and a board of its own in a segment. Freed when closed and the last view of a segment has ended."""

    def __init__(self, library: ucp.Library, main_context: int, still: Lock, *, huge_only: bool) -> None:
        """The board is also mapped in the main context, for readers that cannot map segments.

        With `huge_only` memory whose pages are small is not given out.

        While `still` is held nothing of this process reads memory for others: it is held when memory goes.
        """
        if library.release < _OLDEST:
            raise BackendUnavailable(
                f"UCX {library.version} is too old for shared segments: it takes {_OLDEST[0]}.{_OLDEST[1]}"
            )
        self._library, self._main_context = library, main_context
        self._huge_only = huge_only
        self._still = still  # the only lock: a finalizer runs in whatever thread drops the last view
        self._held, self._closed = 0, False
        self._offered: set[int] = set()
        with ExitStack() as undo:
            try:
                self.context = library.open_context(OPTIONS)
                undo.callback(library.calls.ucp_cleanup, self.context)
                self._worker = library.open_worker(self.context)
                undo.callback(library.calls.ucp_worker_destroy, self._worker)
                self._worker_address = library.worker_address(self._worker)
                view, self._own_board_memh = self._allocate(WORDS * WORD_BYTES)
                self._board = Board(view)
                self.board_memh = library.map_memory(main_context, self._board.address, len(view))
            except (ucp.UcpError, MemoryError) as error:
                raise BackendUnavailable(f"UCX makes no shared segments here: {error}") from error
            undo.pop_all()
        self._offered.add(self._own_board_memh)

    @property
    def board(self) -> Board:
        """The words of regions that are segments."""
        return self._board

    def allocate(self, length: int) -> tuple[memoryview, int]:
        """Zeroed memory whose pages exist, and UCX's handle of it. Raises `MemoryError`, `SmallPages`, `UcpError`."""
        view, memh = self._allocate(length)
        if self._huge_only and memory.huge_share(np.frombuffer(view, np.uint8).ctypes.data) < _HUGE_SHARE:
            raise SmallPages(f"{_SEGMENT_FOLDER} has small pages (mount -o remount,huge=always {_SEGMENT_FOLDER})")
        return view, memh

    def _allocate(self, length: int) -> tuple[memoryview, int]:
        folder = os.statvfs(_SEGMENT_FOLDER) if _SEGMENT_FOLDER.is_dir() else None
        if folder and folder.f_bavail * folder.f_frsize < length:
            raise MemoryError(f"{_SEGMENT_FOLDER} has no room for {length} bytes")
        memh, address = self._library.allocate_memory(self.context, length)
        owner = (ctypes.c_ubyte * length).from_address(address)
        with self._still:
            self._held += 1
        weakref.finalize(owner, self._free, memh, address, length).atexit = False
        data = np.frombuffer(memoryview(owner), np.uint8)
        memory.populate(data)
        return data.data, memh

    def describe(self, memh: int) -> dict[str, object]:
        """Fields of a handle for readers that map the segment, which is offered from now on."""
        self._offered.add(memh)
        keys = [self._library.pack_key(self.context, each).hex() for each in (memh, self._own_board_memh)]
        return {"segment_worker": self._worker_address.hex(), "segment_key": keys[0], "segment_word_key": keys[1]}

    def _free(self, memh: int, address: int, length: int) -> None:
        with self._still:
            self._library.unmap_memory(self.context, memh)
            if memh in self._offered:  # who still reads there by its address finds zeros
                self._offered.discard(memh)
                memory.block_place(address, length)
            self._held -= 1
            self._end_if_unused()

    def _end_if_unused(self) -> None:
        if self._closed and not self._held:
            self._library.calls.ucp_worker_destroy(self._worker)
            self._library.calls.ucp_cleanup(self.context)

    def close(self) -> None:
        """No new segments; the context goes with the last view of one, so that no view ever points to nothing."""
        self._library.unmap_memory(self._main_context, self.board_memh)
        with self._still:
            self._closed = True
            del self._board  # it holds its own segment until here, so that the end comes once
