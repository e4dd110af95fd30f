"""The two ends of a UCX path: the target's progress thread and a reader's connection."""

import ctypes
import os
import select
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass

from reflux_transfer.backends import ucp
from reflux_transfer.backends.board import WORD_BYTES, check_word
from reflux_transfer.errors import PeerGone, ReadDeadlineExceeded
from reflux_transfer.peer import PeerWatch

_SPINS = 200
_NAP_SECONDS = 50e-6
_POLL_MS = 500
_CLOSE_SECONDS = 1.0
_LAST_STEPS = 100


class Target:
    """A worker that answers other processes where the transport needs the owner's help (tcp); asleep otherwise."""

    def __init__(self, library: ucp.Library, context: int) -> None:
        self._library = library
        self.still = threading.RLock()
        """Held by the thread while it may read memory of this process for others."""
        with ExitStack() as undo:
            self._worker = library.open_worker(context)
            undo.callback(library.calls.ucp_worker_destroy, self._worker)
            self.address = library.worker_address(self._worker)
            self._events = library.event_descriptor(self._worker)
            self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            undo.callback(os.close, self._wake_read)
            undo.callback(os.close, self._wake_write)
            self._thread = threading.Thread(target=self._run, name="reflux-ucx-progress", daemon=True)
            self._thread.start()
            undo.pop_all()

    def _run(self) -> None:
        calls = self._library.calls
        poll = select.poll()
        poll.register(self._events, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        while not self._woken():
            with self.still:
                while calls.ucp_worker_progress(self._worker):
                    pass
            if calls.ucp_worker_arm(self._worker) != ucp.ERR_BUSY:
                poll.poll(_POLL_MS)

    def _woken(self) -> bool:
        try:
            return bool(os.read(self._wake_read, 1))
        except BlockingIOError:
            return False

    def close(self) -> None:
        """Stops the thread and frees the worker."""
        os.write(self._wake_write, b"x")
        self._thread.join()
        self._library.calls.ucp_worker_destroy(self._worker)
        os.close(self._wake_read)
        os.close(self._wake_write)


@dataclass(frozen=True)
class RemoteWord:
    """A word on the owner's board, see `board`: where it lies, the key of the board, what stands there."""

    address: int
    key: bytes
    value: int


class Connection:
    """A worker with one endpoint to one peer; one thread at a time.

    `watch` is set for a peer on this host that is read by cma: UCX's own error handling would switch cma off (it then
    emulates a GET by messages over tcp, 2-3x slower and with the owner's help), so the peer's life is watched through
    its pidfd instead.
    """

    def __init__(self, library: ucp.Library, context: int, address: bytes, watch: PeerWatch | None) -> None:
        self._library, self._watch = library, watch
        self._failure = ucp.OK
        self._handler = ucp.ErrorHandler(self._on_error)
        self._keys: dict[bytes, int] = {}
        self._word = ctypes.c_uint64()
        self._worker = library.open_worker(context)
        mode = ucp.ERROR_MODE_NONE if watch else ucp.ERROR_MODE_PEER
        self._forced = mode == ucp.ERROR_MODE_PEER
        try:
            self._endpoint = library.connect(self._worker, address, mode, self._handler)
        except ucp.UcpError as error:
            library.calls.ucp_worker_destroy(self._worker)
            raise PeerGone(f"no UCX path to the region's owner: {error}") from error

    @property
    def usable(self) -> bool:
        """False once an error or a deadline has left it in an unknown state."""
        return self._failure == ucp.OK

    def attach(self, key: bytes) -> None:
        """Makes ready for reads with a key. Raises `UcpError` where its memory is out of reach."""
        self._keys[key] = self._library.unpack_key(self._endpoint, key)

    def get(
        self,
        key: bytes,
        remote: int,
        local: int,
        length: int,
        memh: int | None,
        deadline: float,
        word: RemoteWord | None,
    ) -> None:
        """Reads `length` bytes; `deadline` is a monotonic time. After an error the connection is unusable.

        `memh`: handle of the local memory in the connection's context. With a `word` that is read, too, behind the
        bytes and without a further round trip.
        """
        try:
            param = ucp.RequestParam.with_memory(memh) if memh else ucp.RequestParam()
            requests = [self._start(key, remote, local, length, param)]
            if word:
                place = word.address, ctypes.addressof(self._word), WORD_BYTES
                requests.append(self._start(word.key, *place, ucp.RequestParam()))
            for request in requests:
                if request:
                    self._wait(request, deadline)
            if self._watch:
                # A transport may report success for a peer that was killed while it was being read.
                self._watch.check()
            if word:
                check_word(word.value, self._word.value)
        except ucp.UcpError as error:
            self._failure = error.status
            raise PeerGone(f"the region's owner does not answer: {error}") from error
        except (PeerGone, ReadDeadlineExceeded):
            self._failure = self._failure or ucp.IN_PROGRESS
            raise

    def _start(self, key: bytes, remote: int, local: int, length: int, param: ucp.RequestParam) -> int | None:
        """Posts a GET; the request to wait for, None when it is done already."""
        if key not in self._keys:
            self.attach(key)
        request = self._library.calls.ucp_get_nbx(
            self._endpoint, local, length, remote, self._keys[key], ucp.byref(param)
        )
        return request if self._library.pending(request) else None

    def _wait(self, request: int, deadline: float) -> None:
        calls, idle = self._library.calls, 0
        while (status := calls.ucp_request_check_status(request)) == ucp.IN_PROGRESS:
            if calls.ucp_worker_progress(self._worker):
                idle = 0
                continue
            if self._failure != ucp.OK:
                raise PeerGone(f"the region's owner is gone: {self._library.status_text(self._failure)}")
            if time.monotonic() > deadline:
                raise ReadDeadlineExceeded("the region's owner did not answer in time")
            idle += 1
            if idle > _SPINS:
                self._check_peer()
                time.sleep(_NAP_SECONDS)
        calls.ucp_request_free(request)
        self._library.check(status)

    def _check_peer(self) -> None:
        if self._watch:
            self._watch.check()

    def _on_error(self, _argument: int, _endpoint: int, status: int) -> None:
        self._failure = status

    def close(self) -> None:
        """Frees keys, endpoint and worker. Nothing writes to local memory any more when it returns."""
        calls = self._library.calls
        if self._forced:
            # Error mode NONE knows no forced close, and a flushing one would wait for a dead peer: the worker's end
            # does it.
            request = calls.ucp_ep_close_nbx(self._endpoint, ucp.byref(ucp.RequestParam.forced_close()))
            end = time.monotonic() + _CLOSE_SECONDS
            if request and request < ucp.FIRST_ERROR_POINTER:
                while calls.ucp_request_check_status(request) == ucp.IN_PROGRESS and time.monotonic() < end:
                    calls.ucp_worker_progress(self._worker)
                calls.ucp_request_free(request)
        # An owner that closed its backend and lives on fails the endpoint's own tcp connection. UCX (1.21, 1.22) puts
        # that away while it progresses, and aborts the process when the worker ends before that is done.
        for _ in range(_LAST_STEPS):
            calls.ucp_worker_progress(self._worker)
        # After the endpoint, whose outstanding requests may still use them; before the worker, whose pool holds them.
        for key in self._keys.values():
            calls.ucp_rkey_destroy(key)
        self._keys.clear()
        calls.ucp_worker_destroy(self._worker)
