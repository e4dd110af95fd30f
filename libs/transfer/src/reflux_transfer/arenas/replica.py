"""Owns a replica's weights: the buffer that is served, the one that is pulled into, and what others may read of it."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from reflux_transfer import fingerprint
from reflux_transfer.arenas.geometry import Geometry
from reflux_transfer.arenas.header import OwnedHeader, State
from reflux_transfer.arenas.leases import Leases
from reflux_transfer.backends.base import TransferBackend
from reflux_transfer.handles import ANYWHERE, Scope
from reflux_transfer.layout import SLICE_BYTES, Layout
from reflux_transfer.pulling.report import PullReport
from reflux_transfer.regions import LocalRegion
from reflux_transfer.registrations import RegistrationCache


@dataclass(eq=False)
class _Buffer:
    region: LocalRegion
    header: OwnedHeader
    tensors: memoryview
    leases: Leases = field(default_factory=Leases)


class ReplicaArenas:
    """One or two buffers of one layout: `live` is served, `shadow` is pulled into; `swap` exchanges them.

    With one buffer they are the same (mode in_place). A buffer that was `offer`ed may be read by others, late joiners
    and relays, until somebody pulls into it. One task owns it; leases may come from any thread.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        buffers: Literal[1, 2] = 2,
        backend: TransferBackend,
        slice_bytes: int = SLICE_BYTES,
    ) -> None:
        self.layout, self.slice_bytes = layout, slice_bytes
        self.live_index = 0
        self._backend, self._geometry = backend, Geometry(layout, slice_bytes)
        self._changed = threading.Condition()
        self._generation = 0
        self._registered = RegistrationCache()
        self._buffers: list[_Buffer] = []
        for _ in range(buffers):
            region = backend.allocate(self._geometry.region_bytes)
            tensors = region.view[self._geometry.tensors_offset :]
            self._buffers.append(_Buffer(region, OwnedHeader(region.view, self._geometry), tensors))

    @property
    def shadow_index(self) -> int:
        """Index of the buffer that the next version goes to."""
        return (self.live_index + 1) % len(self._buffers)

    @property
    def transport(self) -> str:
        """Name of the backend that others open the offers with."""
        return self._backend.name

    @property
    def fingerprint(self) -> int:
        """Of the version that the live buffer holds, 0 while that is unknown: the base that deltas stand on."""
        return self._buffers[self.live_index].header.version

    def view(self, index: int) -> memoryview:
        """The tensors of a buffer; they stay where they are as long as the arenas exist."""
        return self._buffers[index].tensors

    def shadow_region(self, backend: TransferBackend, deadline_seconds: float = 0.0) -> LocalRegion:
        """The shadow's tensors as a region that `backend` may read into; registered once per backend, which owns that.

        What was offered of it is withdrawn first: leases are waited for up to `deadline_seconds`, later readers find
        the generation gone.
        """
        buffer = self._buffers[self.shadow_index]
        self._withdraw(buffer, time.monotonic() + deadline_seconds)
        return self._registered.get(backend, buffer.tensors)

    def swap(self) -> None:
        """Makes the shadow live."""
        self.live_index = self.shadow_index

    def offer(self, index: int, scope: Scope = ANYWHERE, *, report: PullReport | None = None) -> tuple[int, bytes]:
        """Generation and handle of a buffer that holds verified weights.

        Every offer is a generation of its own, also when a version is offered again: a reader of the first one that
        was still there when the buffer was filled anew finds it gone.

        `report` is that of the pull that filled it: it has the checksums already and the fingerprint of the whole
        version. Without them the buffer is hashed, so call it in a thread. Nobody may change the buffer until
        `shadow_region` asks for it.
        """
        buffer = self._buffers[index]
        self._generation = generation = self._generation + 1
        buffer.header.claim(generation)
        checksums: Sequence[int] = report.checksums if report and report.slice_bytes == self.slice_bytes else ()
        if not checksums:
            checksums = list(fingerprint.piece_checksums(buffer.tensors, self.layout, self.slice_bytes))
        buffer.header.all_ready(checksums)
        whole = fingerprint.tree(checksums)
        buffer.header.seal(whole, report.fingerprint if report else whole)
        return generation, self._backend.describe(buffer.region, replace(scope, generation=generation))

    def lease(self, generation: int, holder: str, seconds: float) -> None:
        """A reader is on its way: a pull into the buffer waits for it. Raises `KeyError` when it is gone."""
        with self._changed:
            self._find(generation).leases.grant(holder, time.monotonic() + seconds)

    def release(self, generation: int, holder: str) -> None:
        """Ends a lease; unknown ones are ignored."""
        with self._changed:
            for buffer in self._buffers:
                if buffer.header.generation == generation:
                    buffer.leases.release(holder)
            self._changed.notify_all()

    def close(self) -> None:
        """Withdraws what is offered and frees the buffers' registrations; views stay valid."""
        self._registered.clear()
        for buffer in self._buffers:
            self._withdraw(buffer, time.monotonic())
            self._backend.unregister(buffer.region)

    def _find(self, generation: int) -> _Buffer:
        for buffer in self._buffers:
            if buffer.header.generation == generation and buffer.header.state == State.SEALED:
                return buffer
        raise KeyError(f"generation {generation} is not offered")

    def _withdraw(self, buffer: _Buffer, end: float) -> None:
        with self._changed:
            while (now := time.monotonic()) < end and buffer.leases.holders(now):
                self._changed.wait(min(end, buffer.leases.next_end(now)) - now)
            buffer.leases.clear()
            if buffer.header.state == State.SEALED:
                buffer.header.withdraw("the replica takes the next version")
