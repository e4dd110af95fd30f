"""READ through NIXL (extra `nixl`): its wheel carries a UCX with InfiniBand and EFA, which ours does not.

A handle carries NIXL's own description of one region and no pickle. The death of a peer on this host is noticed by
pidfd: over shared memory and cma NIXL reports success for a process that was killed meanwhile.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from reflux_transfer import handles, memory
from reflux_transfer.backends.base import TransferBackend
from reflux_transfer.backends.nixl_agent import Agent, Transfer
from reflux_transfer.errors import PeerGone, ReadDeadlineExceeded, RegionBusy, RegionClosed
from reflux_transfer.handles import ANYWHERE, Scope
from reflux_transfer.peer import PeerWatch, ProcessIdentity
from reflux_transfer.regions import LocalRegion, RemoteRegion, Run, check_range
from reflux_transfer.settings import TransferSettings

_BATCH = 4096
_SPINS = 200
_NAP_SECONDS = 50e-6


@dataclass(eq=False)
class _Remote:
    """An opened region. `failed` is set by the first error of its owner: NIXL then has to meet it anew."""

    address: int
    agent: str
    watch: PeerWatch | None
    reads: int = 0
    failed: bool = False
    closed: bool = False


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
        self._identity = ProcessIdentity.of_this_process()
        self._regions: set[LocalRegion] = set()
        self._remotes: set[RemoteRegion] = set()
        self._stuck: list[_Stuck] = []
        self._idle = threading.Condition()
        self._closed = False

    def allocate(self, length: int) -> LocalRegion:
        """Private memory, registered with NIXL."""
        if length < 1:
            raise ValueError(f"a region has at least one byte, not {length}")
        return self.register(memory.private(length))

    def register(self, buffer: Any) -> LocalRegion:
        """Existing memory, registered with NIXL."""
        region = LocalRegion(memoryview(buffer))
        with self._idle:
            self._check_open()
            region.resource = self._agent.register(region.address, region.length)
            self._regions.add(region)
        return region

    def describe(self, region: LocalRegion, scope: Scope = ANYWHERE) -> bytes:
        """NIXL's metadata of this one region and of how to reach its agent."""
        region.check_open()
        fields = {"owner": self._identity.to_json(), "address": region.address, "length": region.length}
        fields |= {"agent": self._agent.name, "metadata": self._agent.describe(region.resource).hex()}
        return handles.seal(self.name, fields, scope)

    def open(self, handle: bytes, scope: Scope | None = None) -> RemoteRegion:
        """Makes the owner's agent known to ours."""
        self._check_open()
        types = {"owner": dict, "address": int, "length": int, "agent": str, "metadata": str}
        envelope = handles.unseal(handle, self.name, scope=scope, **types)
        identity = ProcessIdentity.from_json(envelope["owner"])
        metadata = handles.hex_field(envelope, "metadata")
        watch = PeerWatch(identity) if identity.on_this_host() else None
        with ExitStack() as undo:
            if watch:
                undo.callback(watch.close)
            self._agent.meet(envelope["agent"], metadata)
            undo.pop_all()
        remote = RemoteRegion(envelope["length"], _Remote(envelope["address"], envelope["agent"], watch))
        with self._idle:
            self._remotes.add(remote)
        return remote

    def read(
        self,
        remote: RemoteRegion,
        remote_offset: int,
        local: LocalRegion,
        local_offset: int,
        length: int,
        deadline_seconds: float,
    ) -> None:
        """One READ."""
        self.read_runs(remote, local, [Run(remote_offset, local_offset, length)], deadline_seconds)

    def read_runs(self, remote: RemoteRegion, local: LocalRegion, runs: Sequence[Run], deadline_seconds: float) -> None:
        """A READ of up to 4096 ranges at a time."""
        end = time.monotonic() + deadline_seconds
        for run in runs:
            check_range("remote", remote.length, run.remote_offset, run.length)
            check_range("local", local.length, run.local_offset, run.length)
        path: _Remote = remote.resource
        wanted = [run for run in runs if run.length]
        with self._in_use(path), ExitStack() as hold:
            hold.enter_context(local.reading(0, 0))
            if path.watch:
                path.watch.check()
            for start in range(0, len(wanted), _BATCH):
                if time.monotonic() > end:
                    raise ReadDeadlineExceeded(f"{start} of {len(wanted)} ranges read in {deadline_seconds} s")
                self._transfer(path, local, wanted[start : start + _BATCH], end, hold)

    def _transfer(self, path: _Remote, local: LocalRegion, runs: Sequence[Run], end: float, hold: ExitStack) -> None:
        ours = [(local.address + run.local_offset, run.length, 0) for run in runs]
        theirs = [(path.address + run.remote_offset, run.length, 0) for run in runs]
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
        with self._idle:
            if remote not in self._remotes:
                return
            self._remotes.discard(remote)
            path: _Remote = remote.resource
            path.closed = True
            self._idle.wait_for(lambda: path.reads == 0)
            self._sweep()
            busy = any(each.agent == path.agent for each in self._stuck)
        if not busy:  # else NIXL keeps it to its end
            self._agent.part(path.agent)
        if path.watch:
            path.watch.close()

    def unregister(self, region: LocalRegion) -> None:
        """Withdraws it from NIXL. `RegionBusy` also while a transfer that missed its deadline may still write."""
        with self._idle:
            self._sweep()
            if not region.retire():
                return
            self._agent.unregister(region.resource)
            self._regions.discard(region)

    def close(self) -> None:
        """Remotes, then regions, then the agent, which ends what could not be cancelled."""
        if self._closed:
            return
        self._closed = True
        for remote in list(self._remotes):
            self.release(remote)
        for region in list(self._regions):
            try:
                self.unregister(region)
            except RegionBusy:
                continue
        self._agent.close()

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

    def _check_open(self) -> None:
        if self._closed:
            raise RegionClosed("the backend is closed")
