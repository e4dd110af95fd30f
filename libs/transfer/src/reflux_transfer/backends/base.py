"""The contract of every transfer backend."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from reflux_transfer.errors import ReadDeadlineExceeded
from reflux_transfer.handles import ANYWHERE, Scope
from reflux_transfer.regions import LocalRegion, RemoteRegion, Run


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

    @abstractmethod
    def allocate(self, length: int) -> LocalRegion:
        """Zeroed memory of `length` >= 1 bytes that can be described, read into and written through its view."""

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

    @abstractmethod
    def read(
        self,
        remote: RemoteRegion,
        remote_offset: int,
        local: LocalRegion,
        local_offset: int,
        length: int,
        deadline_seconds: float,
    ) -> None:
        """Copies remote bytes into local ones.

        Raises `OutOfRange`, `PeerGone`, `ReadDeadlineExceeded` or `RegionClosed`.
        """

    def read_runs(self, remote: RemoteRegion, local: LocalRegion, runs: Sequence[Run], deadline_seconds: float) -> None:
        """Copies many ranges; for a backend that can, in few requests. Raises what `read` raises."""
        end = time.monotonic() + deadline_seconds
        for done, run in enumerate(runs):
            if time.monotonic() > end:
                raise ReadDeadlineExceeded(f"{done} of {len(runs)} ranges read in {deadline_seconds} s")
            rest = end - time.monotonic()
            self.read(remote, run.remote_offset, local, run.local_offset, run.length, rest)

    @abstractmethod
    def release(self, remote: RemoteRegion) -> None:
        """Ends the use of an opened region (idempotent); waits for reads in flight, later ones raise `RegionClosed`."""

    @abstractmethod
    def unregister(self, region: LocalRegion) -> None:
        """Withdraws a region (idempotent). Raises `RegionBusy` while this process reads into it."""

    @abstractmethod
    def close(self) -> None:
        """Frees everything that this backend holds (idempotent); waits for reads in flight."""
