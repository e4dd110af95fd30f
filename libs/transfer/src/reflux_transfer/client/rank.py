"""One rank's part of a publisher: claims its arena, packed for the replicas that are there, and keeps it readable."""

import asyncio

from grpc.aio import Channel

from reflux.weight_broker.v1.weight_broker_service_pb2_grpc import WeightBrokerServiceStub
from reflux_transfer.arenas.publisher import PublisherArenas
from reflux_transfer.arenas.staging import Staging
from reflux_transfer.client import wire
from reflux_transfer.client.leases import keep_leases
from reflux_transfer.client.offer import SourceRegion
from reflux_transfer.client.targets import Targets
from reflux_weightplan.spec import SpecLayout

_SYNC = "sync"
_SLACK_SECONDS = 5.0


def patience(sync_timeout_seconds: float) -> float:
    """Longest time that a version may take: to prepare, again to commit, and to be told."""
    return 2 * sync_timeout_seconds + _SLACK_SECONDS


class PublisherRank:
    """The rank's arenas, for one version after the other: `claim`, write the staging, `settle`.

    Rank 0 is a `BrokerPublisher`, which announces what all ranks have claimed: they hand it the `region` of their
    staging, write while replicas follow, and settle what it tells them. How they tell each other is their own affair.
    """

    def __init__(
        self,
        channel: Channel,
        model_id: str,
        arenas: PublisherArenas,
        *,
        layout: SpecLayout,
        rank: int = 0,
        secret: str = "",
    ) -> None:
        """`layout` is that of all ranks, `arenas` hold the tensors of `rank`; `secret` as for `BrokerPublisher`."""
        self.arenas = arenas
        self._stub, self._model_id, self._rank = WeightBrokerServiceStub(channel), model_id, rank
        self._targets = Targets(self._stub, model_id, layout, rank, arenas)
        self._scope = wire.scope_of(model_id, secret)
        self._open: Staging | None = None
        self._leases: asyncio.Task[None] | None = None

    async def claim(self, sync_timeout_seconds: float) -> Staging:
        """Claims an arena for the next version; gives up one that was not settled. Raises `ArenasBusy`."""
        if self._open:
            self.settle(self._open, committed=False)
        packings = await self._targets.packings()
        staging = await asyncio.to_thread(self.arenas.begin, sync_timeout_seconds, packings)
        self.arenas.lease(staging.generation, _SYNC, patience(sync_timeout_seconds))
        self._open = staging
        if self._leases is None:
            self._leases = asyncio.create_task(keep_leases(self._stub, self._model_id, "", self.arenas))
        return staging

    def region(self, staging: Staging) -> SourceRegion:
        """What replicas read the rank's part from, as soon as it is claimed."""
        handle = staging.offer(self._scope)
        return SourceRegion(self._rank, handle, self.arenas.transport, staging.generation, staging.plans)

    def settle(self, staging: Staging, *, committed: bool) -> None:
        """The version's outcome: a committed one stays readable until the next, any other is given up."""
        if committed:
            self.arenas.pin(staging.generation)
        self.arenas.release(staging.generation, _SYNC)
        staging.fail("the publisher gave the version up")
        if self._open is staging:
            self._open = None

    async def close(self) -> None:
        """Stops listening to leases; the arenas stay."""
        if self._leases:
            self._leases.cancel()
            await asyncio.gather(self._leases, return_exceptions=True)
            self._leases = None
