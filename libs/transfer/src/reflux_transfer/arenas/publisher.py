"""Owns a publisher's pair of arenas: which generation lies where, and who may still read it."""

import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from reflux_transfer.arenas.geometry import Geometry, Packing
from reflux_transfer.arenas.header import OwnedHeader
from reflux_transfer.arenas.leases import Leases
from reflux_transfer.arenas.staging import Staging
from reflux_transfer.backends.base import TransferBackend
from reflux_transfer.errors import ArenasBusy, LayoutError
from reflux_transfer.layout import SLICE_BYTES, Layout, aligned
from reflux_transfer.regions import LocalRegion

_COMMITTED = "committed version"


class _Memory:
    """A region in the shape of a geometry."""

    def __init__(self, region: LocalRegion, geometry: Geometry) -> None:
        self.region, self.geometry, self.header = region, geometry, OwnedHeader(region.view, geometry)


class _Arena:
    """A generation, or room for one."""

    def __init__(self, backend: TransferBackend, geometry: Geometry) -> None:
        self.generation, self.staging, self.leases = 0, False, Leases()
        self._backend = backend
        self._memory: _Memory | None = None
        self.fit(geometry)

    @property
    def memory(self) -> _Memory:
        """Where the generation lies."""
        assert self._memory, "an arena without memory has no generation"
        return self._memory

    def fit(self, geometry: Geometry) -> None:
        """Has memory of this geometry from now on.

        Other memory is given up first, so that there never are three copies of the weights; who reads there finds it
        withdrawn.
        """
        if self._memory is None or self._memory.geometry is not geometry:
            self.withdraw("the publisher packs its weights for other readers")
            self._memory = _Memory(self._backend.allocate(geometry.region_bytes, for_readers=True), geometry)

    def withdraw(self, reason: str) -> None:
        """Gives the memory up."""
        memory, self._memory, self.generation = self._memory, None, 0
        if memory:
            memory.header.withdraw(reason)
            self._backend.unregister(memory.region)


class PublisherArenas:
    """Two arenas. Training goes on while readers pull, because they only ever see a copy.

    An arena is free when nobody holds a lease on it. The generation that was pinned last (the committed one) stays
    readable for late joiners until another is pinned, so that at most one sync can be under way: begin, write, lease,
    pin or release. All methods may be called from any thread. `delta_share` and `pack_share` are the room for deltas
    and for pieces that are packed for readers of other layouts, in parts of the weights' size; memory for packed pieces
    is taken when they are.
    """

    def __init__(
        self,
        backend: TransferBackend,
        layout: Layout,
        slice_bytes: int = SLICE_BYTES,
        *,
        delta_share: float = 0.0,
        pack_share: float = 1.0,
    ) -> None:
        self.layout, self.slice_bytes, self.transport = layout, slice_bytes, backend.name
        self.pack_room = aligned(int(pack_share * layout.region_bytes))
        """Most bytes that are packed beside the weights."""

        self._geometry = Geometry(layout, slice_bytes, (), int(delta_share * layout.region_bytes))
        self._backend = backend
        self._arenas = [_Arena(backend, self._geometry) for _ in range(2)]
        self._generation = 0
        self._changed = threading.Condition()

    def begin(self, deadline_seconds: float = 0.0, packings: Sequence[Packing] = ()) -> Staging:
        """Claims the free arena for a new generation, which readers may follow while it is written.

        It is packed for the readers whose plans `packings` are made of (see `arenas.packing`); one without extras only
        says that its readers need none. An arena that was made for other extras gets new memory.

        Waits up to `deadline_seconds` for a free arena. Raises `ArenasBusy` naming the holders, `LayoutError` for
        packings that do not fit the layout or `pack_room`.
        """
        geometry = self._shaped(tuple(packing for packing in packings if packing.extras))
        arena = self._claim(time.monotonic() + deadline_seconds)
        with ExitStack() as undone:
            undone.callback(self._unclaim, arena)
            arena.fit(geometry)
            undone.pop_all()
        with self._changed:
            self._generation += 1
            arena.generation, memory = self._generation, arena.memory
            memory.header.claim(self._generation)
        describe = partial(self._backend.describe, memory.region)
        plans = tuple(packing.plan for packing in packings)
        return Staging(self, memory.header, geometry, memory.region.view, describe, plans)

    def staged(self, generation: int, complete: bool) -> None:
        """Called by `Staging`: the generation is complete, or is no generation after all."""
        with self._changed:
            for arena in self._arenas:
                if arena.generation == generation:
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
            memory = self._find(generation).memory
            return memory.region.view[memory.geometry.tensors_offset :]

    def fingerprint(self, generation: int) -> int:
        """Of a generation that was written. Raises `KeyError` when it is gone."""
        with self._changed:
            return self._find(generation).memory.header.fingerprint

    def close(self) -> None:
        """Withdraws both arenas. A staging that is being written ends with `GenerationGone`."""
        for arena in self._arenas:
            arena.withdraw("the publisher has closed its arenas")

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
            arena.generation, arena.staging = 0, True
            arena.leases.clear()
            return arena

    def _unclaim(self, arena: _Arena) -> None:
        with self._changed:
            arena.staging = False
            self._changed.notify_all()

    def _shaped(self, packings: tuple[Packing, ...]) -> Geometry:
        """The geometry with these packings, the one of before where they are the same."""
        if packings != self._geometry.packings:
            packed = sum(aligned(packing.pack_bytes) for packing in packings)
            if packed > self.pack_room:
                raise LayoutError(f"{packed} bytes are to be packed, there is room for {self.pack_room}")
            shaped = replace(self._geometry, packings=packings)
            assert shaped.region_bytes  # which refuses runs outside of tensors
            self._geometry = shaped
        return self._geometry
