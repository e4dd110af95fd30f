"""Mode in_place: pulls over the weights that are served, without a second copy; the pause is the transfer."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

from reflux_transfer.client.arena_receiver import ArenaReceiver
from reflux_transfer.client.offer import Offer, Prepared, SourceRegion, Update
from reflux_transfer.client.receiver import Apply
from reflux_transfer.modes import Mode
from reflux_transfer.pulling.difference import Base
from reflux_transfer.pulling.report import PullReport

_NOTHING = PullReport(0, 0, 0.0, 0)
_LEASE_SECONDS = 5.0


class InPlaceReceiver(ArenaReceiver):
    """Owns what the one buffer holds. PREPARE only makes sure that the version is complete and can be read."""

    mode: ClassVar[Mode] = "in_place"

    _offer: Offer | None = None

    async def prepare(self, offer: Offer, cancelled: Callable[[], bool]) -> Prepared:
        fingerprint = await asyncio.to_thread(self._puller.await_sealed, offer, cancelled)
        self._offer = offer
        return Prepared(offer.version, offer.epoch, _NOTHING, fingerprint)

    async def commit(self, prepared: Prepared, apply: Apply) -> tuple[Prepared, float]:
        offer, arenas = self._offer, self.arenas
        assert offer is not None
        assert offer.epoch == prepared.epoch
        reports: list[PullReport] = []

        def fill() -> None:
            reports.append(self._pull(offer))

        update = Update(prepared.version, prepared.epoch, arenas.live_index, arenas.view(arenas.live_index), fill)
        pause_ms = await apply(update)
        assert reports, "the engine serves an update that it has not filled"
        (report,) = reports
        generation, handle = await asyncio.to_thread(arenas.offer, arenas.live_index, self._scope, report=report)
        region = SourceRegion(self._rank, handle, arenas.transport, generation)
        return replace(prepared, report=report, fingerprint=report.fingerprint, regions=(region,)), pause_ms

    def _pull(self, offer: Offer) -> PullReport:
        arenas = self.arenas
        base = Base(arenas.layout, arenas.view(arenas.live_index), arenas.fingerprint)
        # The time for COMMIT begins anew, as the broker counts it.
        late = replace(offer, deadline=time.monotonic() + offer.seconds)
        local = arenas.shadow_region(self._puller.backend(offer), _LEASE_SECONDS)
        return self._puller.pull(late, local, lambda: False, base)
