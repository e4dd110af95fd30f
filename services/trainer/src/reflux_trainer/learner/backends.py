"""Who computes: this process alone, or ranks of processes that share the model. The host knows the contract only."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, TypeAlias

from grpc.aio import Channel

from reflux_model.folder import load_config
from reflux_storage.stream import ObjectReceipt
from reflux_trainer.learner.core import Learner
from reflux_trainer.learner.folders import Source
from reflux_trainer.learner.journal import Journal
from reflux_trainer.learner.publish import Outlet, WeightPublisher
from reflux_trainer.learner.state import Restored, StateCapture, StoreAddress, restore

if TYPE_CHECKING:  # FSDP2 imports torch's compiler, which takes seconds of every start.
    from reflux_trainer.learner.ranks.learner import ShardedLearner

AnyLearner: TypeAlias = "Learner | ShardedLearner"


class Capture(ABC):
    """Copies of a state that stay still while training goes on."""

    @abstractmethod
    def take(self, learner: AnyLearner, journal: Journal, epoch: int) -> None:
        """Copies the state, in the torch thread."""

    @abstractmethod
    def write(self, address: StoreAddress, key: str) -> tuple[ObjectReceipt, ...]:
        """Writes the copy under `key`, that of the first object; in any thread."""


class Backend(ABC):
    """Makes models, and what reads or writes them. The torch thread calls `create`, `restore` and `close`."""

    @abstractmethod
    def create(self, source: Source) -> AnyLearner:
        """A model out of a folder; errors as in `reflux_model.folder.load_folder`."""

    @abstractmethod
    def restore(self, address: StoreAddress, key: str, source: Source) -> Restored[AnyLearner]:
        """A model as it was saved; the folder gives the shape. Errors as in `learner.state.restore`."""

    @abstractmethod
    def capture(self) -> Capture:
        """For a model that was made."""

    @abstractmethod
    def publisher(self, channel: Channel, model_id: str, learner: AnyLearner, outlet: Outlet) -> WeightPublisher:
        """For a model that was made; blocks while arenas are allocated."""

    @abstractmethod
    def close(self) -> None:
        """Frees what models have left."""


class OneRank(Backend):
    """The whole model in this process."""

    def create(self, source: Source) -> Learner:
        """See `Backend`."""
        return Learner.from_folder(source.folder, source.seed, source.numerics)

    def restore(self, address: StoreAddress, key: str, source: Source) -> Restored[AnyLearner]:
        """See `Backend`."""
        restored = restore(address.open(), key, load_config(source.folder), source.seed, source.numerics)
        return Restored[AnyLearner](restored.learner, restored.journal, restored.epoch)

    def capture(self) -> Capture:
        """See `Backend`."""
        return _WholeCapture()

    def publisher(self, channel: Channel, model_id: str, learner: AnyLearner, outlet: Outlet) -> WeightPublisher:
        """See `Backend`."""
        return WeightPublisher(channel, model_id, learner.params, outlet)

    def close(self) -> None:
        """See `Backend`."""


class _WholeCapture(Capture):
    def __init__(self) -> None:
        self._capture = StateCapture()

    def take(self, learner: AnyLearner, journal: Journal, epoch: int) -> None:
        assert isinstance(learner, Learner)
        self._capture.take(learner, journal, epoch)

    def write(self, address: StoreAddress, key: str) -> tuple[ObjectReceipt, ...]:
        return (self._capture.write(address.open(), key),)
