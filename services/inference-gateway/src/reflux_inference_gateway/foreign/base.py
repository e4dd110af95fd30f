"""The contract of every foreign engine: a place that weights are brought to."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from reflux_kit.errors import StartupError
from reflux_transfer.client.offer import Offer
from reflux_transfer.pulling.report import PullReport
from reflux_weightplan.spec import SpecLayout


class EngineUnfit(StartupError):
    """The engine runs, but not in a way that lets it take weights; the text names the flag that is missing."""


class EngineFailed(RuntimeError):
    """A call to the engine failed; the text is the engine's."""


class WeightSink(ABC):
    """One engine, one replica.

    - `open` once, then for each version `receive` and, when every replica has it, `commit`. A `receive` that is not
      followed by `commit` was aborted: the next one overwrites it.
    - Requests go on during `receive`. During `commit` they stand still, and none is lost: they go on under the new
      weights, their keys and values computed anew. Nothing that old weights computed is used after it.
    - A `commit` that raises leaves the engine stopped, its requests aborted: it may hold a mixture of two versions.
    """

    up_route: ClassVar[str]
    """Answers 200 as soon as the engine is up, paused or not."""

    @abstractmethod
    async def open(self, layout: SpecLayout) -> None:
        """Makes the engine ready for versions of a layout (one rank, Hugging Face names). Raises `EngineUnfit`."""

    @abstractmethod
    async def receive(self, offer: Offer, cancelled: Callable[[], bool]) -> PullReport:
        """Brings an offer's bytes, verified, into memory next to the engine; only those of the run are read.

        Raises `ReadCancelled` soon after `cancelled()` turns true, else `EngineFailed` or a `TransferError`.
        """

    @abstractmethod
    async def commit(self, version: int, epoch: int) -> float:
        """Serves what was received last; returns the milliseconds from pause to resume. Raises `EngineFailed`."""

    @abstractmethod
    async def version(self) -> str:
        """The version that the engine itself reports. Raises `EngineFailed`."""

    async def close(self) -> None:
        """Frees what `open` took; the engine goes on with what it serves."""
        return
