"""Pulls offers: opens their regions, and owns one backend per transport. Free of gRPC and protos."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from reflux_transfer.arenas.header import Header, version_of
from reflux_transfer.backends.base import TransferBackend
from reflux_transfer.client.delta import pull_delta
from reflux_transfer.client.offer import Offer
from reflux_transfer.errors import ReadCancelled, ReadDeadlineExceeded, WrongHandle
from reflux_transfer.handles import Scope
from reflux_transfer.layout import Layout
from reflux_transfer.probe.paths import PathBook, peer_of
from reflux_transfer.pulling.report import PullReport
from reflux_transfer.pulling.source import ArenaReader, RemoteSource
from reflux_transfer.pulling.stream import follow
from reflux_transfer.regions import LocalRegion
from reflux_transfer.registry import open_backend

_NAP_SECONDS = 0.002


class Puller:
    """Blocks: call it in a thread, one pull at a time."""

    def __init__(
        self,
        scope: Scope | None = None,
        opened: Callable[[str], TransferBackend] = open_backend,
        paths: PathBook | None = None,
    ) -> None:
        """Handles have to lie in `scope` (None: any); `opened` makes a backend by name.

        `paths` are those of this process, each tested before its first pull; without them this puller tests its own.
        """
        self._scope, self._opened = scope, opened
        self._paths = PathBook() if paths is None else paths
        self._backends: dict[str, TransferBackend] = {}

    def backend(self, offer: Offer) -> TransferBackend:
        """The backend for an offer's regions. Raises `BackendUnavailable`, or `WrongHandle` for several transports."""
        transports = {region.transport for region in offer.regions}
        if len(transports) != 1:
            raise WrongHandle(f"the regions of a version have one transport, not {sorted(transports)}")
        (name,) = transports
        if name not in self._backends:
            self._backends[name] = self._opened(name)
        return self._backends[name]

    def pull(
        self,
        offer: Offer,
        local: LocalRegion,
        cancelled: Callable[[], bool],
        base: "tuple[Layout, memoryview, int] | None" = None,
    ) -> PullReport:
        """Pulls and verifies an offer into this rank's tensors area, which `backend(offer)` can read into.

        A delta needs the `base` that it stands on: its layout, its bytes (they may be those of `local`) and its
        fingerprint. Raises `PathTooSlow`, and what `follow` and `follow_delta` raise.
        """
        with self._sources(offer) as (backend, sources):
            if offer.kind == "delta" and base:
                return pull_delta(backend, offer, sources, local, *base, cancelled)
            left = max(0.0, offer.deadline - time.monotonic())
            return follow(backend, sources, local, offer.route.moves, deadline_seconds=left, cancelled=cancelled)

    def await_sealed(self, offer: Offer, cancelled: Callable[[], bool]) -> int:
        """Waits until all of an offer's regions are complete; returns the version's fingerprint, pulls nothing.

        Raises `GenerationGone`, `PeerGone`, `PathTooSlow`, `ReadCancelled` or `ReadDeadlineExceeded`.
        """
        with self._sources(offer) as (backend, sources):
            headers = [_sealed(backend, source, offer.deadline, cancelled) for source in sources]
        return version_of(headers)

    def close(self) -> None:
        """Closes the backends."""
        while self._backends:
            self._backends.popitem()[1].close()

    @contextmanager
    def _sources(self, offer: Offer) -> Iterator[tuple[TransferBackend, Sequence[RemoteSource]]]:
        backend, sources = self.backend(offer), list[RemoteSource]()
        try:
            for region in sorted(offer.regions, key=lambda region: region.rank):
                scope = replace(self._scope, generation=region.generation) if self._scope else None
                sources.append(RemoteSource(backend.open(region.handle, scope), region.generation, region.rank))
                left, peer = max(0.0, offer.deadline - time.monotonic()), peer_of(region.handle)
                self._paths.check(backend, region.handle, peer=peer, scope=scope, seconds=left)
            yield backend, sources
        finally:
            for source in sources:
                backend.release(source.region)


def _sealed(backend: TransferBackend, source: RemoteSource, end: float, cancelled: Callable[[], bool]) -> Header:
    reader = ArenaReader(backend, source, end)
    try:
        reader.refresh()
        while not reader.sealed:
            if cancelled():
                raise ReadCancelled(f"waiting for rank {source.rank} was cancelled")
            if time.monotonic() > end:
                raise ReadDeadlineExceeded(f"rank {source.rank} was not complete in time")
            time.sleep(_NAP_SECONDS)
            reader.refresh()
        return reader.header
    finally:
        reader.close()
