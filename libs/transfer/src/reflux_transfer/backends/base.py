"""The contract of every transfer backend."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from reflux_transfer import memory
from reflux_transfer.errors import RegionClosed
from reflux_transfer.handles import ANYWHERE, Scope
from reflux_transfer.regions import LocalRegion, RemoteRegion, Run, check_range


class TransferBackend(ABC):
    """Reads ranges of other processes' memory without their help.

    - The owner calls `allocate` (or `register`) and `describe`; the handle travels over gRPC to readers, who call
      `open` and `read`.
    - All methods may be called from any thread. `read` blocks with the GIL released: call it by `asyncio.to_thread`.
    - A read that returns has filled exactly [local_offset, local_offset + length). A read that raises leaves unknown
      bytes there.
    - The owner is not told about reads: who may still read a range is settled by leases above this interface, and
      whether the bytes are the published ones by checksums. A transport's success is no proof.
    - A read that returns has read before `unregister` began: later ones raise `PeerGone`, whatever the memory is used
      for by then. They do the owner no harm.
    - A dead owner ends a read with `PeerGone` and never with a hang; a slow one with `ReadDeadlineExceeded`.
    - Memory of a process that was killed is freed by the kernel.
    """

    name: ClassVar[str]
    _closed = False

    def allocate(self, length: int, *, for_readers: bool = False) -> LocalRegion:
        """Zeroed memory of `length` >= 1 bytes that can be described, read into and written through its view.

        `for_readers`: others read it more than this process computes with it; it lies where reads cost least.
        """
        if length < 1:
            raise ValueError(f"a region has at least one byte, not {length}")
        return self.register(memory.private(length))

    @abstractmethod
    def register(self, buffer: Any) -> LocalRegion:
        """Makes existing writable memory (buffer protocol, contiguous) known; the caller keeps it alive."""

    @abstractmethod
    def describe(self, region: LocalRegion, scope: Scope = ANYWHERE) -> bytes:
        """Opaque handle of at most 16 KiB, valid in `scope`.

        Raises `UnshareableRegion` where existing memory cannot be offered.
        """

    @abstractmethod
    def open(self, handle: bytes, scope: Scope | None = None) -> RemoteRegion:
        """The region behind a handle that lies in `scope` (None: of whatever run). Pair it with `release`.

        Raises `WrongHandle` or `PeerGone`; a region that was withdrawn may also show at the first read only.
        """

    def read(
        self,
        remote: RemoteRegion,
        remote_offset: int,
        local: LocalRegion,
        local_offset: int,
        length: int,
        deadline_seconds: float,
    ) -> None:
        """Copies remote bytes into local ones; raises what `read_runs` raises."""
        self.read_runs(remote, local, [Run(remote_offset, local_offset, length)], deadline_seconds)

    @abstractmethod
    def read_runs(self, remote: RemoteRegion, local: LocalRegion, runs: Sequence[Run], deadline_seconds: float) -> None:
        """Copies ranges, many by one request where the transport can.

        Raises `OutOfRange`, `PeerGone`, `ReadDeadlineExceeded` or `RegionClosed`.
        """

    @abstractmethod
    def release(self, remote: RemoteRegion) -> None:
        """Ends the use of an opened region (idempotent); waits for reads in flight, later ones raise `RegionClosed`."""

    @abstractmethod
    def unregister(self, region: LocalRegion) -> None:
        """Withdraws a region (idempotent). Raises `RegionBusy` while this process reads into it."""

    @abstractmethod
    def close(self) -> None:
        """Frees everything that this backend holds (idempotent); waits for reads in flight."""

    def _check_open(self) -> None:
        if self._closed:
            raise RegionClosed("the backend is closed")


def check_runs(remote: RemoteRegion, local: LocalRegion, runs: Sequence[Run]) -> None:
    """Raises `OutOfRange` unless all runs lie inside both regions."""
    for run in runs:
        check_range("remote", remote.length, run.remote_offset, run.length)
        check_range("local", local.length, run.local_offset, run.length)
