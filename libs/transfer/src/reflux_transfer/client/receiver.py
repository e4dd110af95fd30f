"""The contract of every way to take new weights."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import ClassVar

from reflux_transfer.arenas.replica import ReplicaArenas
from reflux_transfer.client.offer import Offer, Prepared, Update
from reflux_transfer.modes import Mode

Apply = Callable[[Update], Awaitable[float]]
"""Serves an update from between two decode steps on; returns the milliseconds that decoding stood still.

When it returns nobody reads another buffer any more: the next version is pulled into it.
"""


class Receiver(ABC):
    """One rank's place for weights; a `BrokerSubscriber` drives it, one call at a time.

    - `prepare`, then `commit` or nothing: an epoch that was aborted is simply followed by the next `prepare`.
    - A `prepare` that raises leaves what is served untouched. So does a `commit`, unless the mode is in_place.
    - The same epoch may be prepared twice, from another source.
    """

    mode: ClassVar[Mode]

    arenas: ReplicaArenas | None = None
    """Memory that others may read and hold leases on; None where nobody can."""

    @abstractmethod
    async def prepare(self, offer: Offer, cancelled: Callable[[], bool]) -> Prepared:
        """Does all that can be done while the old version is served.

        Raises a `TransferError`, `ReadCancelled` soon after `cancelled()` turns true.
        """

    @abstractmethod
    async def commit(self, prepared: Prepared, apply: Apply) -> tuple[Prepared, float]:
        """Has the epoch served; returns what is served now and the milliseconds of visible pause.

        Raises what `apply` raises, and in mode in_place a `TransferError` after which the weights are a mixture.
        """

    @abstractmethod
    async def close(self) -> None:
        """Frees what the receiver opened; its arenas stay."""
