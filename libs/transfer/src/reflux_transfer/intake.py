"""One buffer that an engine's weights are pulled into, verified there, and loaded from. Free of gRPC and protos.

For engines that copy what they load: the buffer is free again as soon as a version is loaded, so that one is enough
where a replica that serves from its arenas needs two.
"""

import mmap
from collections.abc import Callable
from dataclasses import replace

from reflux_transfer.client.offer import Offer, layout_of_rank
from reflux_transfer.client.puller import Puller
from reflux_transfer.layout import Layout
from reflux_transfer.pulling.difference import Base
from reflux_transfer.pulling.report import PullReport
from reflux_transfer.registrations import RegistrationCache
from reflux_weightplan.spec import SpecLayout


class Intake:
    """Owns the buffer and the puller that fills it. One pull at a time, by any thread."""

    def __init__(self, layout: SpecLayout, puller: Puller | None = None) -> None:
        """Engines load whole tensors by name and cut them themselves, so the layout has one rank.

        Without a `puller` handles of every run are read. Raises `LayoutError` for a layout that cuts tensors.
        """
        shapes = {tensor.name: tensor.shape for tensor in layout.tensors}
        flat = layout_of_rank(layout, 0)
        self.layout = Layout(tuple(replace(slot, shape=shapes[slot.name]) for slot in flat.slots))
        self.view = memoryview(mmap.mmap(-1, self.layout.region_bytes))
        self._puller = Puller() if puller is None else puller
        self._registered = RegistrationCache()
        self._fingerprint = 0
        """Of what the buffer holds, 0 while that is unknown: the base that deltas stand on."""

    def pull(self, offer: Offer, cancelled: Callable[[], bool] = lambda: False) -> PullReport:
        """Follows, reads and verifies an offer. Blocks, so call it in a thread.

        Raises what `Puller.pull` raises; the buffer holds unknown bytes then.
        """
        local = self._registered.get(self._puller.backend(offer), self.view)
        base = Base(self.layout, self.view, self._fingerprint)
        self._fingerprint = 0
        report = self._puller.pull(offer, local, cancelled, base)
        self._fingerprint = report.fingerprint
        return report

    def close(self) -> None:
        """Ends the use of all transports (idempotent)."""
        self._registered.clear()
        self._puller.close()
