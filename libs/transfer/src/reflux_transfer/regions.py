"""Regions: local memory that reads may fill or others may read, and remote memory as this process sees it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from reflux_transfer.errors import OutOfRange, RegionBusy, RegionClosed
from reflux_transfer.peer import ProcessIdentity


def check_range(what: str, length: int, offset: int, count: int) -> None:
    """Raises `OutOfRange` unless [offset, offset + count) lies inside [0, length)."""
    if offset < 0 or count < 0 or offset + count > length:
        raise OutOfRange(f"{what} range [{offset}, {offset + count}) is outside of a region of {length} bytes")


@dataclass(frozen=True, slots=True)
class Run:
    """One contiguous range to copy; offsets and length are bytes inside the two regions."""

    remote_offset: int
    local_offset: int
    length: int


@dataclass(eq=False)
class LocalRegion:
    """Memory of this process that a backend knows. `view` is writable and stays valid until `unregister`."""

    view: memoryview
    resource: Any = None
    """What the backend attached to it: a segment, a memory handle."""

    address: int = field(init=False)
    length: int = field(init=False)
    _reads: int = field(default=0, init=False)
    _closed: bool = field(default=False, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def __post_init__(self) -> None:
        self.view = self.view.cast("B")
        if self.view.readonly or not len(self.view):
            raise ValueError("a region needs writable memory of at least one byte")
        self.address = int(np.frombuffer(self.view, np.uint8).ctypes.data)
        self.length = len(self.view)

    @contextmanager
    def reading(self, offset: int, count: int) -> Iterator[int]:
        """Holds the region for one read; yields the address of `offset`."""
        check_range("local", self.length, offset, count)
        with self._lock:
            if self._closed:
                raise RegionClosed("the local region was unregistered")
            self._reads += 1
        try:
            yield self.address + offset
        finally:
            with self._lock:
                self._reads -= 1

    def check_open(self) -> None:
        """Raises `RegionClosed` after `retire`."""
        if self._closed:
            raise RegionClosed("the local region was unregistered")

    def retire(self) -> bool:
        """Marks the region as unregistered; False if it already was. Raises `RegionBusy` while a read is in flight."""
        with self._lock:
            if self._reads:
                raise RegionBusy(f"{self._reads} reads into the region are in flight")
            first, self._closed = not self._closed, True
        return first


@dataclass(frozen=True, eq=False)
class RemoteRegion:
    """Memory of another process, opened from its handle. `resource` belongs to the backend."""

    length: int
    owner: ProcessIdentity
    resource: Any
