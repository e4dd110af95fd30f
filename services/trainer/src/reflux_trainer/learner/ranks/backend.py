"""Models that are sharded over processes of their own."""

from collections.abc import Callable

from grpc.aio import Channel

from reflux_model.folder import load_config
from reflux_storage.stream import ObjectReceipt
from reflux_trainer.learner.backends import AnyLearner, Backend, Capture
from reflux_trainer.learner.folders import Source
from reflux_trainer.learner.journal import Journal
from reflux_trainer.learner.publish import Outlet, WeightPublisher
from reflux_trainer.learner.ranks.group import RankGroup
from reflux_trainer.learner.ranks.learner import ShardedLearner
from reflux_trainer.learner.ranks.publisher import ShardedPublisher
from reflux_trainer.learner.ranks.setup import RankSetup
from reflux_trainer.learner.ranks.state import key_of_rank, of_rank_zero, read_rank_zero
from reflux_trainer.learner.state import Restored, StoreAddress


class ManyRanks(Backend):
    """FSDP2's shards in processes of their own, which start with the first model. `on_loss` as of `RankGroup`."""

    def __init__(self, setup: RankSetup, on_loss: Callable[[str], None]) -> None:
        self._setup, self._on_loss = setup, on_loss
        self._group: RankGroup | None = None

    @property
    def group(self) -> RankGroup:
        """The processes; starts them."""
        if self._group is None:
            self._group = RankGroup(self._setup, self._on_loss)
        return self._group

    def create(self, source: Source) -> ShardedLearner:
        """See `Backend`."""
        load_config(source.folder)  # errors of the folder are the caller's, not a rank's
        self.group.everywhere("create", source)
        return ShardedLearner(self.group)

    def restore(self, address: StoreAddress, key: str, source: Source) -> Restored[AnyLearner]:
        """See `Backend`."""
        journal, epoch = read_rank_zero(address, key)
        self.group.everywhere("restore", source, address, key)
        return Restored[AnyLearner](ShardedLearner(self.group), journal, epoch)

    def capture(self) -> Capture:
        """See `Backend`."""
        return _ShardedCapture(self.group)

    def publisher(self, channel: Channel, model_id: str, learner: AnyLearner, outlet: Outlet) -> WeightPublisher:
        """See `Backend`."""
        return ShardedPublisher(channel, model_id, learner.config, outlet, self.group)

    def close(self) -> None:
        """See `Backend`."""
        if self._group is not None:
            self._group.close()
            self._group = None


class _ShardedCapture(Capture):
    def __init__(self, group: RankGroup) -> None:
        self._group = group

    def take(self, learner: AnyLearner, journal: Journal, epoch: int) -> None:
        self._group.everywhere("capture")
        self._group.works.copies += of_rank_zero(journal, epoch)

    def write(self, address: StoreAddress, key: str) -> tuple[ObjectReceipt, ...]:
        ranks = range(1, len(self._group.pids) + 1)
        own = self._group.works.write_state(address, key)
        others = self._group.others("state", "write_state", [(address, key_of_rank(key, rank)) for rank in ranks])
        return (own, *others)
