"""Registrations that are made once per buffer and generation, and withdrawn when nothing reads into them."""

import threading
from collections import OrderedDict
from typing import Any

import numpy as np

from reflux_transfer.backends.base import TransferBackend
from reflux_transfer.errors import RegionBusy
from reflux_transfer.regions import LocalRegion

_Key = tuple[TransferBackend, int, int, int]


class RegistrationCache:
    """Registered buffers by backend and (address, length, generation).

    The address alone is not enough: memory that was freed and came back, or that grew in place, has the old address
    under another mapping. All methods may be called from any thread. A region that is being read into is never
    withdrawn: it retires at the next call after its reads have ended.
    """

    def __init__(self, capacity: int = 64) -> None:
        if capacity < 1:
            raise ValueError(f"a cache holds at least one registration, not {capacity}")
        self._capacity = capacity
        self._regions: OrderedDict[_Key, LocalRegion] = OrderedDict()
        self._retired: list[tuple[TransferBackend, LocalRegion]] = []
        self._lock = threading.Lock()

    def get(self, backend: TransferBackend, buffer: Any, generation: int = 0) -> LocalRegion:
        """The region of a writable buffer (contiguous, at least one byte), registered at most once.

        Another length or generation at the same address makes the older region retire. `generation` counts what was
        mapped at an address; it may stay 0 for memory that lives as long as the cache. Raises what `register` raises.
        """
        address, length = _place(buffer)
        key = (backend, address, length, generation)
        with self._lock:
            self._withdraw_retired()
            if key in self._regions:
                self._regions.move_to_end(key)
                return self._regions[key]
            for stale in [known for known in self._regions if known[:2] == key[:2]]:
                self._retire(stale)
            region = self._regions[key] = backend.register(buffer)
            while len(self._regions) > self._capacity:
                self._retire(next(iter(self._regions)))
            return region

    def drop(self, address: int) -> None:
        """Withdraws what is registered at an address; unknown ones are ignored.

        Raises `RegionBusy` while reads into it are in flight; the region then retires after them.
        """
        with self._lock:
            for key in [known for known in self._regions if known[1] == address]:
                self._retire(key)
            if any(region.address == address for _, region in self._retired):
                raise RegionBusy(f"reads into the memory at {address:#x} are in flight")

    def clear(self) -> None:
        """Withdraws everything that nothing reads into, as far as its backend has not done so."""
        with self._lock:
            while self._regions:
                self._retire(next(iter(self._regions)))

    def __len__(self) -> int:
        """How many regions backends hold for this cache, retired ones included."""
        with self._lock:
            return len(self._regions) + len(self._retired)

    def _retire(self, key: _Key) -> None:
        self._retired.append((key[0], self._regions.pop(key)))
        self._withdraw_retired()

    def _withdraw_retired(self) -> None:
        waiting = []
        for backend, region in self._retired:
            try:
                backend.unregister(region)
            except RegionBusy:
                waiting.append((backend, region))
        self._retired = waiting


def _place(buffer: Any) -> tuple[int, int]:
    view = memoryview(buffer).cast("B")
    return int(np.frombuffer(view, np.uint8).ctypes.data), len(view)
