"""Pulls offers: opens their regions, and owns one backend per transport. Free of gRPC and protos."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from reflux_transfer.arenas.header import Header, version_of
from reflux_transfer.backends.base import TransferBackend
from reflux_transfer.client.offer import Offer
from reflux_transfer.errors import BaseMismatch, ReadCancelled, ReadDeadlineExceeded, WrongHandle
from reflux_transfer.handles import ANYWHERE, Scope
from reflux_transfer.probe.paths import PathBook
from reflux_transfer.pulling.difference import Base, follow_delta
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
        scope: Scope = ANYWHERE,
        opened: Callable[[str], TransferBackend] = open_backend,
        paths: PathBook | None = None,
    ) -> None:
        """Handles have to lie in `scope`, that of no run takes any; `opened` makes a backend by name.

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
        base: Base | None = None,
    ) -> PullReport:
        """Pulls and verifies an offer into this rank's tensors area, which `backend(offer)` can read into.

        A delta needs the `base` that it stands on, between arenas of one layout; the broker offers the whole version to
        those who answer `BaseMismatch`. Raises `PathTooSlow`, and what `follow` and `follow_delta` raise.
        """
        with self._sources(offer) as (backend, sources):
            left = max(0.0, offer.deadline - time.monotonic())
            if offer.kind == "delta" and base:
                if not offer.route.same or len(sources) != 1:
                    raise BaseMismatch("the delta is between arenas of another layout than this replica's")
                return follow_delta(backend, sources[0], local, base, deadline_seconds=left, cancelled=cancelled)
            moves, named = offer.route.moves, offer.route.plan_hash
            return follow(backend, sources, local, moves, deadline_seconds=left, cancelled=cancelled, plan_hash=named)

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
                scope = replace(self._scope, generation=region.generation) if self._scope.run else None
                sources.append(RemoteSource(backend.open(region.handle, scope), region.generation, region.rank))
                left = max(0.0, offer.deadline - time.monotonic())
                self._paths.check(backend, sources[-1].region, seconds=left)
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
