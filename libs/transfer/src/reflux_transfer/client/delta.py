"""Takes a version as its difference to what the replica serves, where that is possible."""

import time
from collections.abc import Callable, Sequence

from reflux_transfer.backends.base import TransferBackend
from reflux_transfer.client.offer import Offer
from reflux_transfer.errors import BaseMismatch
from reflux_transfer.layout import Layout
from reflux_transfer.pulling.difference import follow_delta
from reflux_transfer.pulling.report import PullReport
from reflux_transfer.pulling.source import RemoteSource
from reflux_transfer.regions import LocalRegion


def pull_delta(
    backend: TransferBackend,
    offer: Offer,
    sources: Sequence[RemoteSource],
    local: LocalRegion,
    layout: Layout,
    base: memoryview,
    base_fingerprint: int,
    cancelled: Callable[[], bool],
) -> PullReport:
    """Applies an offer's delta to `base`, which has fingerprint `base_fingerprint`; the broker offers the whole version
    to those who answer `BaseMismatch`.

    A delta is between arenas of one layout: another layout, or a sharded one, is answered in the same way.
    """
    if not offer.route.same or len(sources) != 1:
        raise BaseMismatch("the delta is between arenas of another layout than this replica's")
    return follow_delta(
        backend,
        sources[0],
        local,
        layout,
        base=base,
        base_fingerprint=base_fingerprint,
        deadline_seconds=max(0.0, offer.deadline - time.monotonic()),
        cancelled=cancelled,
    )
