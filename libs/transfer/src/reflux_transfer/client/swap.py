"""Mode swap: pulls into the shadow while the live buffer is served; the pause is an exchange of pointers."""

import asyncio
import time
from collections.abc import Callable
from typing import ClassVar

from reflux_transfer.arenas.replica import ReplicaArenas
from reflux_transfer.client.offer import Offer, Prepared, SourceRegion, Update
from reflux_transfer.client.puller import Puller
from reflux_transfer.client.receiver import Apply, Receiver
from reflux_transfer.handles import ANYWHERE, Scope
from reflux_transfer.modes import Mode
from reflux_transfer.probe.paths import PathBook

_LEASE_SECONDS = 5.0
"""Longest wait for those who still read the shadow; the broker has told them to stop, or they are gone."""


class SwapReceiver(Receiver):
    """Owns what the two buffers hold. Others may read the shadow as soon as it is verified, and the live one."""

    mode: ClassVar[Mode] = "swap"

    def __init__(
        self, arenas: ReplicaArenas, *, rank: int = 0, scope: Scope = ANYWHERE, paths: PathBook | None = None
    ) -> None:
        """`arenas` have two buffers; handles of others have to lie in `scope`, and own ones do.

        `paths` as for `Puller`.
        """
        self.arenas: ReplicaArenas = arenas
        self._rank, self._scope = rank, scope
        self._puller = Puller(scope if scope.run else None, paths=paths)
        self._live_fingerprint = 0

    async def prepare(self, offer: Offer, cancelled: Callable[[], bool]) -> Prepared:
        return await asyncio.to_thread(self._prepare, offer, cancelled)

    def _prepare(self, offer: Offer, cancelled: Callable[[], bool]) -> Prepared:
        arenas = self.arenas
        backend = self._puller.backend(offer)
        patience = max(0.0, min(_LEASE_SECONDS, offer.deadline - time.monotonic()))
        local = arenas.shadow_region(backend, patience)
        base = (arenas.layout, arenas.view(arenas.live_index), self._live_fingerprint)
        report = self._puller.pull(offer, local, cancelled, base)
        generation, handle = arenas.offer(arenas.shadow_index, self._scope, report=report)
        region = SourceRegion(self._rank, handle, arenas.transport, generation)
        return Prepared(offer.version, offer.epoch, report, report.fingerprint, (region,))

    async def commit(self, prepared: Prepared, apply: Apply) -> tuple[Prepared, float]:
        index = self.arenas.shadow_index
        update = Update(prepared.version, prepared.epoch, index, self.arenas.view(index))
        pause_ms = await apply(update)
        self.arenas.swap()
        self._live_fingerprint = prepared.fingerprint
        return prepared, pause_ms

    async def close(self) -> None:
        await asyncio.to_thread(self._puller.close)
