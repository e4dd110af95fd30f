"""One buffer that an engine's weights are pulled into, verified there, and loaded from. Free of gRPC and protos.

For engines that copy what they load: the buffer is free again as soon as a version is loaded, so that one is enough
where a replica that serves from its arenas needs two.
"""

import mmap
from collections.abc import Callable
from dataclasses import replace

from reflux_transfer.backends.base import TransferBackend
from reflux_transfer.client.offer import Offer, layout_of_rank
from reflux_transfer.client.puller import Puller
from reflux_transfer.layout import Layout
from reflux_transfer.probe.paths import PathBook
from reflux_transfer.pulling.report import PullReport
from reflux_transfer.regions import LocalRegion
from reflux_weightplan.spec import SpecLayout


class Intake:
    """Owns the buffer and the backends that read into it. One pull at a time, by any thread."""

    def __init__(self, layout: SpecLayout, paths: PathBook | None = None) -> None:
        """Engines load whole tensors by name and cut them themselves, so the layout has one rank.

        `paths` as for `Puller`. Raises `LayoutError` for a layout that cuts tensors.
        """
        shapes = {tensor.name: tensor.shape for tensor in layout.tensors}
        flat = layout_of_rank(layout, 0)
        self.layout = Layout(tuple(replace(slot, shape=shapes[slot.name]) for slot in flat.slots))
        self.view = memoryview(mmap.mmap(-1, self.layout.region_bytes))
        self._puller = Puller(paths=paths)
        self._regions: dict[TransferBackend, LocalRegion] = {}
        self._fingerprint = 0
        """Of what the buffer holds, 0 while that is unknown: the base that deltas stand on."""

    def pull(self, offer: Offer, cancelled: Callable[[], bool] = lambda: False) -> PullReport:
        """Follows, reads and verifies an offer. Blocks, so call it in a thread.

        Raises what `Puller.pull` raises; the buffer holds unknown bytes then.
        """
        backend = self._puller.backend(offer)
        if backend not in self._regions:
            self._regions[backend] = backend.register(self.view)
        base = self.layout, self.view, self._fingerprint
        self._fingerprint = 0
        report = self._puller.pull(offer, self._regions[backend], cancelled, base)
        self._fingerprint = report.fingerprint
        return report

    def close(self) -> None:
        """Ends the use of all transports (idempotent)."""
        self._regions.clear()
        self._puller.close()
