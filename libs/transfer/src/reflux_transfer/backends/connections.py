"""A bounded set of connections to the owner of one remote region; each is used by one read at a time."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Generic, Protocol, TypeVar

from reflux_transfer.errors import ReadDeadlineExceeded, RegionClosed


class Connection(Protocol):
    """What the pool needs to know of a connection."""

    @property
    def usable(self) -> bool:
        """False once an error or a deadline has left it in an unknown state."""
        ...

    def close(self) -> None:
        """Nothing writes to local memory any more when it returns."""


_C = TypeVar("_C", bound=Connection)
_NOTHING = nullcontext()


class ConnectionPool(Generic[_C]):
    """Opens connections on demand, at most `limit`; the reads beyond that wait for their turn."""

    def __init__(self, connect: Callable[[float], _C], limit: int, first: _C | None = None) -> None:
        """`connect` gets the monotonic time by which it must be done; `first` is there already."""
        self._connect, self._limit = connect, limit
        self._free: list[_C] = [] if first is None else [first]
        self._opened = len(self._free)
        self._closed = False
        self._changed = threading.Condition()

    @contextmanager
    def borrowed(self, end: float, hold: AbstractContextManager[object] = _NOTHING) -> Iterator[_C]:
        """A connection for one read; `end` is a monotonic time. `close` waits for the read from here on.

        `hold` is entered for the read and left when its connection does not write any more. Raises
        `ReadDeadlineExceeded`, `RegionClosed`, and what connecting or `hold` raises.
        """
        connection = self._borrow(end)
        try:
            with hold:
                try:
                    yield connection
                finally:
                    if not connection.usable:
                        connection.close()
        finally:
            with self._changed:
                if connection.usable:
                    self._free.append(connection)
                else:
                    self._opened -= 1
                self._changed.notify_all()

    def _borrow(self, end: float) -> _C:
        with self._changed:
            ready = self._changed.wait_for(
                lambda: self._closed or self._free or self._opened < self._limit, max(0.0, end - time.monotonic())
            )
            if self._closed:
                raise RegionClosed("the remote region was released")
            if not ready:
                raise ReadDeadlineExceeded("all connections to the region's owner were busy")
            if self._free:
                return self._free.pop()
            self._opened += 1
        with ExitStack() as undo:
            undo.callback(self._forget_one)
            connection = self._connect(end)
            undo.pop_all()
        return connection

    def _forget_one(self) -> None:
        with self._changed:
            self._opened -= 1
            self._changed.notify_all()

    def close(self) -> None:
        """Closes the connections once the reads that use them have ended (idempotent, also by several threads)."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._opened == len(self._free))
            while self._free:
                self._opened -= 1
                self._free.pop().close()
