"""READ through NIXL (extra `nixl`): its wheel carries a UCX with InfiniBand and EFA, which ours does not.

A handle carries NIXL's own description of one region and of its word on the owner's board (see `board`), and no pickle.
The word is read as the last range of a READ: one endpoint serves them in order, and RDMA refuses memory that is no
longer registered. The death of a peer on this host is noticed by
pidfd: over shared memory and cma NIXL reports success for a process that was killed meanwhile.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from reflux_transfer import handles, memory
from reflux_transfer.backends.base import TransferBackend, check_runs
from reflux_transfer.backends.board import WORD_BYTES, Board, Word, check_word
from reflux_transfer.backends.nixl_agent import Agent, Transfer
from reflux_transfer.errors import PeerGone, ReadDeadlineExceeded, RegionBusy, RegionClosed
from reflux_transfer.handles import ANYWHERE, Scope
from reflux_transfer.peer import PeerWatch, ProcessIdentity
from reflux_transfer.regions import LocalRegion, RemoteRegion, Run
from reflux_transfer.settings import TransferSettings

_BATCH = 4096
_SPINS = 200
_NAP_SECONDS = 50e-6


@dataclass(eq=False)
class _Remote:
    """An opened region. `failed` is set by the first error of its owner: NIXL then has to meet it anew."""

    address: int
    word: Word
    agent: str
    watch: PeerWatch | None
    reads: int = 0
    failed: bool = False
    closed: bool = False


@dataclass(eq=False)
class _Registered:
    """What belongs to a local region: NIXL's descriptor, and its word once it was described."""

    memory: Any
    word: Word | None = None


@dataclass(eq=False)
class _Stuck:
    """A transfer that NIXL could not cancel; its local region stays held until it ends."""

    agent: str
    transfer: Transfer
    hold: ExitStack


class NixlBackend(TransferBackend):
    """One NIXL agent with its UCX plug-in."""

    name: ClassVar[str] = "nixl"

    def __init__(self, settings: TransferSettings | None = None) -> None:
        settings = settings or TransferSettings()
        self._agent = Agent(settings.ucx_net_devices)
        self._board = Board()
        self._agent.register(self._board.address, len(self._board.view))
        self._identity = ProcessIdentity.of_this_process()
        self._regions: set[LocalRegion] = set()
        self._remotes: set[RemoteRegion] = set()
        self._stuck: list[_Stuck] = []
        self._lent: list[memoryview] = []
        self._idle = threading.Condition()

    def register(self, buffer: Any) -> LocalRegion:
        """Existing memory, registered with NIXL. Once described it stays referenced until `close`."""
        region = LocalRegion(memoryview(buffer))
        with self._idle:
            self._check_open()
            region.resource = _Registered(self._agent.register(region.address, region.length))
            self._regions.add(region)
        return region

    def describe(self, region: LocalRegion, scope: Scope = ANYWHERE) -> bytes:
        """NIXL's metadata of this one region and of how to reach its agent."""
        with self._idle:
            region.check_open()
            registered: _Registered = region.resource
            if registered.word is None:
                registered.word = self._board.offer()
                if not memory.keep_place(region.address):
                    self._lent.append(region.view)
            places = [(region.address, region.length), (self._board.address, len(self._board.view))]
            metadata = self._agent.describe(places)
        fields = {"owner": self._identity.to_json(), "address": region.address, "length": region.length}
        fields |= {"word_address": registered.word.address, "word": registered.word.value}
        fields |= {"agent": self._agent.name, "metadata": metadata.hex()}
        return handles.seal(self.name, fields, scope)

    def open(self, handle: bytes, scope: Scope | None = None) -> RemoteRegion:
        """Makes the owner's agent known to ours."""
        self._check_open()
        types = {"owner": dict, "address": int, "length": int, "agent": str, "metadata": str}
        types |= {"word_address": int, "word": int}
        envelope = handles.unseal(handle, self.name, scope=scope, **types)
        identity = ProcessIdentity.from_json(envelope["owner"])
        metadata = handles.hex_field(envelope, "metadata")
        word = Word(envelope["word_address"], envelope["word"])
        with ExitStack() as undo:
            watch = PeerWatch(identity) if identity.on_this_host() else None
            if watch:
                undo.callback(watch.close)
            path = _Remote(envelope["address"], word, envelope["agent"], watch)
            remote = RemoteRegion(envelope["length"], identity, path)
            with self._idle:
                self._check_open()
                self._agent.meet(envelope["agent"], metadata)
                self._remotes.add(remote)
            undo.pop_all()
        return remote

    def read_runs(self, remote: RemoteRegion, local: LocalRegion, runs: Sequence[Run], deadline_seconds: float) -> None:
        """A READ of up to 4096 ranges at a time."""
        end = time.monotonic() + deadline_seconds
        check_runs(remote, local, runs)
        path: _Remote = remote.resource
        wanted = [run for run in runs if run.length]
        with self._in_use(path), ExitStack() as hold:
            hold.enter_context(local.reading(0, 0))
            if path.watch:
                path.watch.check()
            # Words of our own board take what stands on the owner's: registered, and one for each read.
            found = hold.enter_context(self._board.lent())
            for start in range(0, len(wanted), _BATCH):
                if time.monotonic() > end:
                    raise ReadDeadlineExceeded(f"{start} of {len(wanted)} ranges read in {deadline_seconds} s")
                self._transfer(path, local, wanted[start : start + _BATCH], found, end, hold)
                check_word(path.word.value, self._board.read(found))

    def _transfer(
        self, path: _Remote, local: LocalRegion, runs: Sequence[Run], found: Word, end: float, hold: ExitStack
    ) -> None:
        ours = [(local.address + run.local_offset, run.length, 0) for run in runs]
        theirs = [(path.address + run.remote_offset, run.length, 0) for run in runs]
        ours.append((found.address, WORD_BYTES, 0))
        theirs.append((path.word.address, WORD_BYTES, 0))
        transfer = None
        try:
            transfer = self._agent.start_read(path.agent, ours, theirs)
            self._wait(transfer, path, end)
        except PeerGone:
            path.failed = True
            raise
        finally:
            if transfer is not None and not transfer.end():
                # NIXL may still write: the region is given free when it no longer does.
                with self._idle:
                    self._stuck.append(_Stuck(path.agent, transfer, hold.pop_all()))
        if path.watch:
            path.watch.check()

    def _wait(self, transfer: Transfer, path: _Remote, end: float) -> None:
        polls = 0
        while transfer.running():
            if time.monotonic() > end:
                raise ReadDeadlineExceeded("the region's owner did not answer in time")
            polls += 1
            if polls > _SPINS:
                if path.watch:
                    path.watch.check()
                time.sleep(_NAP_SECONDS)

    def release(self, remote: RemoteRegion) -> None:
        """Waits for the reads of the region; forgets its agent with the last region of it."""
        path: _Remote = remote.resource
        with self._idle:
            path.closed = True
            self._idle.wait_for(lambda: path.reads == 0)
            if remote not in self._remotes:
                return
            self._remotes.discard(remote)  # now only: a `close` meanwhile has to wait as well
            self._sweep()
            if not any(each.agent == path.agent for each in self._stuck):  # else NIXL keeps it to its end
                self._agent.part(path.agent)
            if path.watch:
                path.watch.close()

    def unregister(self, region: LocalRegion) -> None:
        """Withdraws it from NIXL. `RegionBusy` also while a transfer that missed its deadline may still write."""
        with self._idle:
            self._sweep()
            if not region.retire():
                return
            self._regions.discard(region)
            registered: _Registered = region.resource
            if registered.word:
                self._board.withdraw(registered.word)
            self._agent.unregister(registered.memory)

    def close(self) -> None:
        """Remotes, then regions, then the agent, which ends what could not be cancelled."""
        with self._idle:
            if self._closed:
                return
            self._closed = True
            remotes, regions = list(self._remotes), list(self._regions)
        with ExitStack() as steps:  # the last one first, each even if an earlier one fails
            steps.callback(self._agent.close)
            for region in regions:
                steps.callback(self._give_up, region)
            for remote in remotes:
                steps.callback(self.release, remote)
        self._lent.clear()

    def _give_up(self, region: LocalRegion) -> None:
        with suppress(RegionBusy):  # its transfer ends with the agent
            self.unregister(region)

    def _sweep(self) -> None:
        """Gives free what stuck transfers held, once they have ended."""
        stuck, self._stuck = self._stuck, []
        for each in stuck:
            if each.transfer.end():
                each.hold.close()
            else:
                self._stuck.append(each)

    @contextmanager
    def _in_use(self, path: _Remote) -> Iterator[None]:
        with self._idle:
            if path.closed:
                raise RegionClosed("the remote region was released")
            if path.failed:
                raise PeerGone("an earlier read from the region's owner failed: open the region again")
            path.reads += 1
        try:
            yield
        finally:
            with self._idle:
                path.reads -= 1
                self._idle.notify_all()
