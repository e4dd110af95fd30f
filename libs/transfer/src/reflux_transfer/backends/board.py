"""Words that say whether a region is still offered, for transports whose own reads go on after a withdrawal.

cma needs no registration, and UCX's emulated reads do not look at it: both hand out whatever lies at an address. So
every offered region has a word on its owner's board, and readers fetch it after the bytes: a word that still stands
means that the region was offered when the bytes were read.
"""

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from reflux_transfer import memory
from reflux_transfer.errors import PeerGone, TransferError

WORD_BYTES = 8
WORDS = 8192


@dataclass(frozen=True)
class Word:
    """One word: where it lies in its process, and what stands there as long as the region is offered."""

    address: int
    value: int


class Board:
    """Owns `WORDS` words, all zero but those in use. They can be read as long as the process lives, even after it."""

    def __init__(self, view: memoryview | None = None) -> None:
        """In memory of its own, or in the zeroed one that is given."""
        self.view = memory.private(WORDS * WORD_BYTES) if view is None else view
        self._words = np.frombuffer(self.view, np.uint64)
        self.address = int(self._words.ctypes.data)
        memory.keep_place(self.address)
        self._free = list(range(WORDS))
        self._lock = threading.Lock()

    def offer(self) -> Word:
        """A word for one more region. Raises `TransferError` when all are in use."""
        with self._lock:
            if not self._free:
                raise TransferError(f"{WORDS} regions are offered: unregister some")
            index = self._free.pop()
        # Never zero, and never what stood here before: a stale handle does not fit the next region.
        value = secrets.randbits(64) | 1
        self._words[index] = value
        return Word(self.address + index * WORD_BYTES, value)

    @contextmanager
    def lent(self) -> Iterator[Word]:
        """A word that one read of somebody else's board may write to."""
        word = self.offer()
        try:
            yield word
        finally:
            self.withdraw(word)

    def read(self, word: Word) -> int:
        """What stands there now."""
        return int(self._words[(word.address - self.address) // WORD_BYTES])

    def withdraw(self, word: Word) -> None:
        """From now on readers see the region withdrawn. Call it before the memory changes."""
        index = (word.address - self.address) // WORD_BYTES
        self._words[index] = 0
        with self._lock:
            self._free.append(index)


def check_word(expected: int, found: int) -> None:
    """Raises `PeerGone` when the word that was read is not the region's."""
    if expected != found:
        raise PeerGone("the region's owner has withdrawn it")
