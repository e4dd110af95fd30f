"""Weight arenas: a publisher's pair that readers may pull from, and a replica's pair of live and shadow weights."""

import mmap
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from reflux_transfer.backends.base import TransferBackend
from reflux_transfer.errors import ArenasBusy, LayoutError
from reflux_transfer.layout import SLICE_BYTES, Layout
from reflux_transfer.regions import LocalRegion


@dataclass(frozen=True)
class StagedWeights:
    """Weights that lie still in an arena. `checksums` has one xxh3_64 per slice in layout order."""

    generation: int
    handle: bytes
    checksums: tuple[int, ...]
    stage_seconds: float


@dataclass(eq=False)
class _Arena:
    region: LocalRegion
    handle: bytes
    generation: int = 0
    staging: bool = False
    leases: dict[str, float] = field(default_factory=dict)
    """Holder -> monotonic time at which its lease ends."""

    def holders(self, now: float) -> list[str]:
        return [holder for holder, end in self.leases.items() if end > now]


class PublisherArenas:
    """Two registered arenas. Training goes on while readers pull, because they only ever see a copy.

    An arena is free when nobody holds a lease on it. The generation that was pinned last (the committed one) stays
    readable for late joiners until another is pinned, so that at most one sync can be under way: stage, lease, pin or
    release. All methods may be called from any thread.
    """

    def __init__(self, backend: TransferBackend, layout: Layout, slice_bytes: int = SLICE_BYTES) -> None:
        self.layout, self.slice_bytes, self.transport = layout, slice_bytes, backend.name
        self._backend = backend
        self._arenas: list[_Arena] = []
        for _ in range(2):
            region = backend.allocate(layout.region_bytes)
            self._arenas.append(_Arena(region, backend.describe(region)))
        self._pieces = tuple(layout.pieces(slice_bytes))
        self._generation = 0
        self._changed = threading.Condition()

    def stage(self, tensors: Mapping[str, Any], deadline_seconds: float = 0.0) -> StagedWeights:
        """Copies tensors (name -> C-contiguous buffer) into the free arena and hashes every slice.

        Waits up to `deadline_seconds` for a free arena. Raises `ArenasBusy` naming the holders and `LayoutError` naming
        tensors.
        """
        start = time.monotonic()
        sources = self._sources(tensors)
        arena = self._claim(start + deadline_seconds)
        complete = False
        try:
            for slot in self.layout.slots:
                np.copyto(np.frombuffer(arena.region.view[slot.offset : slot.end], np.uint8), sources[slot.name])
            checksums = []
            for piece in self._pieces:
                begin = piece.slot.offset + piece.start
                checksums.append(xxhash.xxh3_64_intdigest(arena.region.view[begin : begin + piece.length]))
            complete = True
        finally:
            if not complete:  # Half a copy is no generation.
                arena.generation = 0
            with self._changed:
                arena.staging = False
                self._changed.notify_all()
        return StagedWeights(arena.generation, arena.handle, tuple(checksums), time.monotonic() - start)

    def lease(self, generation: int, holder: str, seconds: float) -> None:
        """Keeps a generation readable for `seconds`, or until `release`. Raises `KeyError` when it is gone."""
        with self._changed:
            self._find(generation).leases[holder] = time.monotonic() + seconds

    def release(self, generation: int, holder: str) -> None:
        """Ends a lease; unknown ones are ignored, they may have expired."""
        with self._changed:
            for arena in self._arenas:
                if arena.generation == generation:
                    arena.leases.pop(holder, None)
            self._changed.notify_all()

    def pin(self, generation: int) -> None:
        """Makes a generation the committed one and frees its predecessor. Raises `KeyError` when it is gone."""
        with self._changed:
            chosen = self._find(generation)
            for arena in self._arenas:
                arena.leases.pop(_COMMITTED, None)
            chosen.leases[_COMMITTED] = float("inf")
            self._changed.notify_all()

    def view(self, generation: int) -> memoryview:
        """The bytes of a generation. Raises `KeyError` when it is gone."""
        with self._changed:
            return self._find(generation).region.view

    def close(self) -> None:
        """Withdraws both arenas."""
        for arena in self._arenas:
            self._backend.unregister(arena.region)

    def _find(self, generation: int) -> _Arena:
        for arena in self._arenas:
            if arena.generation == generation and generation:
                return arena
        raise KeyError(f"generation {generation} is no longer in an arena")

    def _claim(self, end: float) -> _Arena:
        with self._changed:
            while not (
                free := [arena for arena in self._arenas if not arena.staging and not arena.holders(time.monotonic())]
            ):
                now = time.monotonic()
                if now >= end:
                    holders = sorted({holder for arena in self._arenas for holder in arena.holders(now)})
                    raise ArenasBusy(f"both arenas are in use by {', '.join(holders) or 'another stage'}")
                expiries = [expiry for arena in self._arenas for expiry in arena.leases.values()]
                self._changed.wait(min([end, *expiries]) - now)
            arena = min(free, key=lambda arena: arena.generation)
            self._generation += 1
            arena.generation, arena.staging = self._generation, True
            arena.leases.clear()
            return arena

    def _sources(self, tensors: Mapping[str, Any]) -> dict[str, np.ndarray]:
        missing = [slot.name for slot in self.layout.slots if slot.name not in tensors]
        extra = [name for name in tensors if name not in self.layout.by_name]
        if missing or extra:
            raise LayoutError(f"the tensors do not fit the layout: missing {missing}, unexpected {extra}")
        sources = {}
        for slot in self.layout.slots:
            view = memoryview(tensors[slot.name])
            if not view.c_contiguous or view.nbytes != slot.nbytes:
                raise LayoutError(
                    f"tensor {slot.name} has {view.nbytes} bytes; a contiguous one of {slot.nbytes} is expected"
                )
            sources[slot.name] = np.frombuffer(view.cast("B") if view.ndim else view, np.uint8)
        return sources


_COMMITTED = "committed version"


class ReplicaArenas:
    """Two buffers of one layout: `live` is served, `shadow` is pulled into; `swap` exchanges them.

    Owned by one task.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        size = layout.region_bytes
        self.buffers = tuple(
            memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)) for _ in range(2)
        )
        self.live_index = 0
        self._regions: dict[TransferBackend, tuple[LocalRegion, ...]] = {}

    @property
    def shadow_index(self) -> int:
        """Index of the buffer that nobody serves from."""
        return 1 - self.live_index

    def shadow_region(self, backend: TransferBackend) -> LocalRegion:
        """The shadow as a region of `backend`; registered once per backend, which owns the registration."""
        if backend not in self._regions:
            self._regions[backend] = tuple(backend.register(buffer) for buffer in self.buffers)
        return self._regions[backend][self.shadow_index]

    def swap(self) -> None:
        """Makes the shadow live."""
        self.live_index = self.shadow_index
