"""Owns a publisher's pair of arenas: which generation lies where, and who may still read it."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from reflux_transfer.arenas.geometry import Geometry, Packing
from reflux_transfer.arenas.header import OwnedHeader
from reflux_transfer.arenas.leases import Leases
from reflux_transfer.arenas.staging import Staging
from reflux_transfer.backends.base import TransferBackend
from reflux_transfer.errors import ArenasBusy
from reflux_transfer.layout import SLICE_BYTES, Layout
from reflux_transfer.regions import LocalRegion

_COMMITTED = "committed version"


@dataclass(eq=False)
class _Arena:
    region: LocalRegion
    header: OwnedHeader
    generation: int = 0
    staging: bool = False
    leases: Leases = field(default_factory=Leases)


class PublisherArenas:
    """Two arenas. Training goes on while readers pull, because they only ever see a copy.

    An arena is free when nobody holds a lease on it. The generation that was pinned last (the committed one) stays
    readable for late joiners until another is pinned, so that at most one sync can be under way: begin, write, lease,
    pin or release. All methods may be called from any thread. `packings` are the plans of readers with other layouts
    (see `arenas.packing`); `delta_share` is the room for deltas beside the weights, in parts of their size.
    """

    def __init__(
        self,
        backend: TransferBackend,
        layout: Layout,
        slice_bytes: int = SLICE_BYTES,
        *,
        packings: Sequence[Packing] = (),
        delta_share: float = 0.0,
    ) -> None:
        self.layout, self.slice_bytes, self.transport = layout, slice_bytes, backend.name
        self._geometry = Geometry(layout, slice_bytes, tuple(packings), int(delta_share * layout.region_bytes))
        self._backend = backend
        regions = [backend.allocate(self._geometry.region_bytes) for _ in range(2)]
        self._arenas = [_Arena(region, OwnedHeader(region.view, self._geometry)) for region in regions]
        self._generation = 0
        self._changed = threading.Condition()

    def begin(self, deadline_seconds: float = 0.0) -> Staging:
        """Claims the free arena for a new generation, which readers may follow while it is written.

        Waits up to `deadline_seconds` for a free arena. Raises `ArenasBusy` naming the holders.
        """
        arena = self._claim(time.monotonic() + deadline_seconds)
        describe = partial(self._backend.describe, arena.region)
        return Staging(self, arena.header, self._geometry, arena.region.view, describe)

    def staged(self, generation: int, complete: bool) -> None:
        """Called by `Staging`: the generation is complete, or is no generation after all."""
        with self._changed:
            arena = self._find(generation)
            arena.staging = False
            if not complete:
                arena.generation = 0
                arena.leases.clear()  # nobody can read it, and its holders know it by a number that is gone
            self._changed.notify_all()

    def lease(self, generation: int, holder: str, seconds: float) -> None:
        """Keeps a generation readable for `seconds`, or until `release`. Raises `KeyError` when it is gone."""
        with self._changed:
            self._find(generation).leases.grant(holder, time.monotonic() + seconds)

    def release(self, generation: int, holder: str) -> None:
        """Ends a lease; unknown ones are ignored, they may have expired."""
        with self._changed:
            for arena in self._arenas:
                if arena.generation == generation:
                    arena.leases.release(holder)
            self._changed.notify_all()

    def pin(self, generation: int) -> None:
        """Makes a generation the committed one and frees its predecessor. Raises `KeyError` when it is gone."""
        with self._changed:
            chosen = self._find(generation)
            for arena in self._arenas:
                arena.leases.release(_COMMITTED)
            chosen.leases.grant(_COMMITTED, float("inf"))
            self._changed.notify_all()

    def view(self, generation: int) -> memoryview:
        """The tensors of a generation. Raises `KeyError` when it is gone."""
        with self._changed:
            return self._find(generation).region.view[self._geometry.tensors_offset :]

    def fingerprint(self, generation: int) -> int:
        """Of a generation that was written. Raises `KeyError` when it is gone."""
        with self._changed:
            return self._find(generation).header.fingerprint

    def close(self) -> None:
        """Withdraws both arenas. A staging that is being written ends with `GenerationGone`."""
        for arena in self._arenas:
            arena.header.withdraw("the publisher has closed its arenas")
            self._backend.unregister(arena.region)

    def _find(self, generation: int) -> _Arena:
        for arena in self._arenas:
            if arena.generation == generation and generation:
                return arena
        raise KeyError(f"generation {generation} is no longer in an arena")

    def _claim(self, end: float) -> _Arena:
        with self._changed:
            while True:
                now = time.monotonic()
                if free := [arena for arena in self._arenas if not arena.staging and not arena.leases.holders(now)]:
                    break
                if now >= end:
                    holders = sorted({holder for arena in self._arenas for holder in arena.leases.holders(now)})
                    raise ArenasBusy(f"both arenas are in use by {', '.join(holders) or 'another stage'}")
                self._changed.wait(min(end, *(arena.leases.next_end(now) for arena in self._arenas)) - now)
            arena = min(free, key=lambda arena: arena.generation)
            self._generation += 1
            arena.generation, arena.staging = self._generation, True
            arena.leases.clear()
            arena.header.claim(self._generation)
            return arena
