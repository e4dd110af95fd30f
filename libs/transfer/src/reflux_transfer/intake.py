"""One buffer that an engine's weights are pulled into, verified there, and loaded from. Free of gRPC and protos.

For engines that copy what they load: the buffer is free again as soon as a version is loaded, so that one is enough
where a replica that serves from its arenas needs two.
"""

import mmap
from collections.abc import Callable
from typing import Any

from reflux_transfer.backends.base import TransferBackend
from reflux_transfer.layout import Layout
from reflux_transfer.offers import Offer
from reflux_transfer.pull import PullReport, fingerprint, pull
from reflux_transfer.regions import LocalRegion
from reflux_transfer.registry import open_backend

_PULL_SECONDS = 3600.0


class Intake:
    """Owns the buffer and the backends that read into it. One pull at a time, by any thread."""

    def __init__(self, layout: Layout, buffer: Any = None) -> None:
        """`buffer` is writable memory of at least `layout.region_bytes`; without one, private memory is reserved."""
        self.layout = layout
        self.view = memoryview(mmap.mmap(-1, layout.region_bytes) if buffer is None else buffer)
        self._backends: dict[str, tuple[TransferBackend, LocalRegion]] = {}

    def pull(self, offer: Offer, cancelled: Callable[[], bool] = lambda: False) -> tuple[PullReport, int]:
        """Reads and verifies all slices; returns what it took and the fingerprint of the layout's bytes.

        Blocks, so call it in a thread. Raises what `pull.pull` and `open_backend` raise; the buffer holds unknown bytes
        then.
        """
        if offer.transport not in self._backends:
            backend = open_backend(offer.transport)
            self._backends[offer.transport] = backend, backend.register(self.view)
        backend, local = self._backends[offer.transport]
        remote = backend.open(offer.handle)
        try:
            report = pull(backend, remote, local, offer.slices, deadline_seconds=_PULL_SECONDS, cancelled=cancelled)
        finally:
            backend.release(remote)
        return report, fingerprint(self.view, self.layout)

    def close(self) -> None:
        """Ends the use of all transports (idempotent)."""
        while self._backends:
            self._backends.popitem()[1][0].close()
