"""The publisher of a rank that is not rank 0, in the thread of its "publish" lane."""

from grpc.aio import Channel

from reflux_kit.channel import open_channel
from reflux_trainer.learner.publish import Outlet
from reflux_trainer.learner.ranks.setup import RankSetup
from reflux_trainer.learner.ranks.works import ShardWorks
from reflux_transfer.arenas.publisher import PublisherArenas
from reflux_transfer.arenas.staging import Staging
from reflux_transfer.backends.base import TransferBackend
from reflux_transfer.client.offer import SourceRegion, layout_of_rank
from reflux_transfer.client.rank import PublisherRank
from reflux_transfer.client.wire import RETRY
from reflux_weightplan.spec import SpecLayout


class RankPublisher:
    """Owns the rank's arenas and its channel to the broker; `works` fills what is claimed here."""

    def __init__(self, works: ShardWorks, rank: int, setup: RankSetup) -> None:
        self._works, self._rank, self._setup = works, rank, setup
        self._channel: Channel | None = None
        self._open: tuple[TransferBackend, PublisherArenas, PublisherRank] | None = None
        self._staging: Staging | None = None

    async def open(self, model_id: str, outlet: Outlet, spread: SpecLayout) -> None:
        """Makes arenas for this rank's part of the layout; those of before are withdrawn."""
        await self.close()
        if self._channel is None:
            address, settings = self._setup.broker_address, self._setup.settings
            self._channel = open_channel(address, settings, retry=RETRY, subject="learner")
        backend = outlet.opened(outlet.transport)
        arenas = PublisherArenas(backend, layout_of_rank(spread, self._rank))
        client = PublisherRank(self._channel, model_id, arenas, layout=spread, rank=self._rank, secret=outlet.secret)
        self._open = backend, arenas, client

    async def claim(self, sync_timeout_seconds: float) -> SourceRegion:
        """Claims the rank's arena for the next version."""
        assert self._open, "rank 0 opens it first"
        self._staging = await self._open[2].claim(sync_timeout_seconds)
        self._works.staging = self._staging
        return self._open[2].region(self._staging)

    async def settle(self, committed: bool) -> None:
        """Takes note of the version's outcome."""
        if self._open and self._staging:
            self._open[2].settle(self._staging, committed=committed)
        self._staging = self._works.staging = None

    async def close(self) -> None:
        """Withdraws the arenas."""
        if self._open:
            backend, arenas, client = self._open
            self._open = None
            await client.close()
            arenas.close()
            backend.close()
