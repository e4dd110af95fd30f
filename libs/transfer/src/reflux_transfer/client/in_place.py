"""Mode in_place: pulls over the weights that are served, without a second copy; the pause is the transfer."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

from reflux_transfer.arenas.replica import ReplicaArenas
from reflux_transfer.client.offer import Offer, Prepared, SourceRegion, Update
from reflux_transfer.client.puller import Puller
from reflux_transfer.client.receiver import Apply, Receiver
from reflux_transfer.handles import ANYWHERE, Scope
from reflux_transfer.modes import Mode
from reflux_transfer.probe.paths import PathBook
from reflux_transfer.pulling.report import PullReport

_NOTHING = PullReport(0, 0, 0.0, 0)
_LEASE_SECONDS = 5.0


class InPlaceReceiver(Receiver):
    """Owns what the one buffer holds. PREPARE only makes sure that the version is complete and can be read."""

    mode: ClassVar[Mode] = "in_place"

    def __init__(
        self, arenas: ReplicaArenas, *, rank: int = 0, scope: Scope = ANYWHERE, paths: PathBook | None = None
    ) -> None:
        """`arenas` have one buffer; handles of others have to lie in `scope`, and own ones do.

        `paths` as for `Puller`.
        """
        self.arenas: ReplicaArenas = arenas
        self._rank, self._scope = rank, scope
        self._puller = Puller(scope if scope.run else None, paths=paths)
        self._offer: Offer | None = None
        self._fingerprint = 0
        """Of what the buffer holds, 0 while that is unknown."""

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
        self._fingerprint = report.fingerprint
        generation, handle = await asyncio.to_thread(arenas.offer, arenas.live_index, self._scope, report=report)
        region = SourceRegion(self._rank, handle, arenas.transport, generation)
        return replace(prepared, report=report, fingerprint=report.fingerprint, regions=(region,)), pause_ms

    def _pull(self, offer: Offer) -> PullReport:
        arenas, base_fingerprint = self.arenas, self._fingerprint
        # The time for COMMIT begins anew, as the broker counts it.
        late = replace(offer, deadline=time.monotonic() + offer.seconds)
        local = arenas.shadow_region(self._puller.backend(offer), _LEASE_SECONDS)
        self._fingerprint = 0
        base = (arenas.layout, arenas.view(arenas.live_index), base_fingerprint)
        return self._puller.pull(late, local, lambda: False, base)

    async def close(self) -> None:
        await asyncio.to_thread(self._puller.close)
