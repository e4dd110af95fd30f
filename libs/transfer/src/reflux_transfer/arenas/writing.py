"""Owns the threads that fill a staging: a piece is cast and hashed block by block, while a block is in the cache."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import xxhash

if TYPE_CHECKING:
    from reflux_transfer.arenas.staging import Cast

_THREADS = 2
_BLOCK_BYTES = 512 << 10


class Writers:
    """Takes pieces in their order and hands on (index, checksum) in that order, in the thread that puts them.

    Casting and hashing release the GIL. Leaving the context waits for the threads: after an exception without the
    pieces that none of them has begun.
    """

    def __init__(self, cast: "Cast", done: Callable[[int, int], None]) -> None:
        self._cast, self._done = cast, done
        self._pool = ThreadPoolExecutor(_THREADS, "reflux-staging")
        self._under_way: deque[tuple[int, Future[int]]] = deque()

    def put(self, index: int, part: Any, place: memoryview) -> None:
        """Writes `part`, a flat array, to `place`; waits while many are under way. Raises what writing one raised."""
        self._under_way.append((index, self._pool.submit(self._write, part, place)))
        while self._under_way and (len(self._under_way) > 2 * _THREADS or self._under_way[0][1].done()):
            self._hand_on()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            while self._under_way and kind is None:
                self._hand_on()
        finally:
            self._pool.shutdown(cancel_futures=True)

    def _hand_on(self) -> None:
        index, checksum = self._under_way.popleft()
        self._done(index, checksum.result())

    def _write(self, part: Any, place: memoryview) -> int:
        digest, elements = xxhash.xxh3_64(), len(part)
        item = len(place) // elements
        step = max(1, _BLOCK_BYTES // item)
        for begin in range(0, elements, step):
            block = place[begin * item : (begin + step) * item]
            self._cast(part[begin : begin + step], block)
            digest.update(block)
        return digest.intdigest()
