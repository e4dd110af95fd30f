"""Mode swap: pulls into the shadow while the live buffer is served; the pause is an exchange of pointers."""

import asyncio
import time
from collections.abc import Callable
from typing import ClassVar

from reflux_transfer.client.arena_receiver import ArenaReceiver
from reflux_transfer.client.offer import Offer, Prepared, SourceRegion, Update
from reflux_transfer.client.receiver import Apply
from reflux_transfer.modes import Mode
from reflux_transfer.pulling.difference import Base

_LEASE_SECONDS = 5.0
"""Longest wait for those who still read the shadow; the broker has told them to stop, or they are gone."""


class SwapReceiver(ArenaReceiver):
    """Owns what the two buffers hold. Others may read the shadow as soon as it is verified, and the live one."""

    mode: ClassVar[Mode] = "swap"

    async def prepare(self, offer: Offer, cancelled: Callable[[], bool]) -> Prepared:
        return await asyncio.to_thread(self._prepare, offer, cancelled)

    def _prepare(self, offer: Offer, cancelled: Callable[[], bool]) -> Prepared:
        arenas = self.arenas
        backend = self._puller.backend(offer)
        patience = max(0.0, min(_LEASE_SECONDS, offer.deadline - time.monotonic()))
        local = arenas.shadow_region(backend, patience)
        base = Base(arenas.layout, arenas.view(arenas.live_index), arenas.fingerprint)
        report = self._puller.pull(offer, local, cancelled, base)
        generation, handle = arenas.offer(arenas.shadow_index, self._scope, report=report)
        region = SourceRegion(self._rank, handle, arenas.transport, generation)
        return Prepared(offer.version, offer.epoch, report, report.fingerprint, (region,))

    async def commit(self, prepared: Prepared, apply: Apply) -> tuple[Prepared, float]:
        index = self.arenas.shadow_index
        update = Update(prepared.version, prepared.epoch, index, self.arenas.view(index))
        pause_ms = await apply(update)
        self.arenas.swap()
        return prepared, pause_ms
