"""A bounded set of connections to the owner of one remote region; each is used by one read at a time."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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


class ConnectionPool(Generic[_C]):
    """Opens connections on demand, at most `limit`; the reads beyond that wait for their turn."""

    def __init__(self, connect: Callable[[float], _C], limit: int) -> None:
        """`connect` gets the monotonic time by which it must be done."""
        self._connect, self._limit = connect, limit
        self._free: list[_C] = []
        self._opened = 0
        self._closed = False
        self._changed = threading.Condition()

    @contextmanager
    def borrowed(self, end: float) -> Iterator[_C]:
        """A connection for one read; `end` is a monotonic time.

        Raises `ReadDeadlineExceeded`, `RegionClosed`, and what connecting raises.
        """
        connection = self._borrow(end)
        try:
            yield connection
        finally:
            keep = connection.usable and not self._closed
            if keep:
                with self._changed:
                    self._free.append(connection)
                    self._changed.notify_all()
            else:
                with ExitStack() as undo:
                    undo.callback(self._forget_one)
                    connection.close()

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
