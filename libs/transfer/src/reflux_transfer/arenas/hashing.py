"""Owns the thread that hashes what a staging has written, so that casting and hashing take two processors."""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from types import TracebackType
from typing import Self

import xxhash


class Hasher:
    """Hashes places in the order in which they are put and hands on (index, checksum), all in one thread of its own.

    Hashing and casting release the GIL. Leaving the context waits for the thread: after an exception without hashing
    what is left, else it raises what the thread raised.
    """

    def __init__(self, done: Callable[[int, int], None]) -> None:
        self._done = done
        self._places: SimpleQueue[tuple[int, memoryview] | None] = SimpleQueue()
        self._failure: Exception | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="reflux-staging-hash", daemon=True)

    def put(self, index: int, place: memoryview) -> None:
        """The bytes of a place are final. Raises what the thread raised for an earlier one."""
        if self._failure:
            raise self._failure
        self._places.put((index, place))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped = kind is not None
        self._places.put(None)
        self._thread.join()
        if self._failure and kind is None:
            raise self._failure

    def _run(self) -> None:
        try:
            while (entry := self._places.get()) and not self._stopped:
                index, place = entry
                self._done(index, xxhash.xxh3_64_intdigest(place))
        except Exception as failure:  # thread boundary: raised again where the staging is
            self._failure = failure
