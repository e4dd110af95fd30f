"""A replica that stops at a named point of a sync and waits there, or gets a flipped bit there.

The points: `register` (registered, does not listen yet), `prepare` (before its first byte of a version), `mid-read`
(some bytes are here), `before-ack` (all bytes are verified, nobody knows it), `between-commits` (told to swap, the
others have).
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

import numpy as np
from broker_processes import LAYOUT, MODEL, served

from reflux_kit.channel import open_channel
from reflux_transfer.arenas.replica import ReplicaArenas
from reflux_transfer.backends.base import TransferBackend
from reflux_transfer.client.in_place import InPlaceReceiver
from reflux_transfer.client.layouts import single_rank
from reflux_transfer.client.offer import Offer, Prepared, Update
from reflux_transfer.client.puller import Puller
from reflux_transfer.client.receiver import Apply
from reflux_transfer.client.subscriber import BrokerSubscriber
from reflux_transfer.client.swap import SwapReceiver
from reflux_transfer.client.wire import RETRY
from reflux_transfer.handles import Scope
from reflux_transfer.probe.paths import PathBook
from reflux_transfer.registry import open_backend
from reflux_transfer.settings import TransferSettings

Phase = Literal["register", "prepare", "mid-read", "before-ack", "between-commits"]
PHASES: tuple[Phase, ...] = ("register", "prepare", "mid-read", "before-ack", "between-commits")
_HALF = LAYOUT.by_name["half"].offset
_FLIPS: dict[Phase, int] = {"register": 9, "prepare": 9, "mid-read": 5 << 20, "before-ack": _HALF, "between-commits": 9}
"""Which byte of the weights arrives damaged; the last tensor is read last."""


@dataclass(frozen=True)
class Hook:
    """At which point of which version a replica stops, or (`flip`) reads a flipped bit; once."""

    phase: Phase
    version: int
    flip: bool = False

    @property
    def in_place(self) -> bool:
        """Whether the replica has one buffer: only then bytes travel between the commits."""
        return self.flip and self.phase == "between-commits"


class Gate:
    """Carries out a hook inside the replica; the test sends anything to let it go on."""

    def __init__(self, hook: Hook | None, pipe: Connection, arenas: ReplicaArenas, buffers: int) -> None:
        self._hook, self._pipe = hook, pipe
        self._buffers = {_address(arenas.view(index)) for index in range(buffers)}
        self.version = 0
        """What is pulled now."""

    def holds_weights(self, view: memoryview) -> bool:
        """Whether it is a buffer of the replica, and no scratch memory for headers or tests of a path."""
        return _address(view) in self._buffers

    def reaches(self, phase: Phase) -> None:
        """Blocks here if this is the point."""
        hook = self._hook
        if hook and not hook.flip and hook.phase == phase and (phase == "register" or hook.version == self.version):
            self._hook = None
            self._pipe.send({"at": phase})
            self._pipe.recv()

    def damages(self, begin: int, place: memoryview) -> None:
        """Flips a bit of weights that were read to `begin`, if the point lies there."""
        hook = self._hook
        if hook and hook.flip and hook.version == self.version and begin <= _FLIPS[hook.phase] < begin + len(place):
            self._hook = None
            place[_FLIPS[hook.phase] - begin] ^= 4
            self._pipe.send({"at": hook.phase})


class _Swap(SwapReceiver):
    def __init__(self, arenas: ReplicaArenas, gate: Gate) -> None:
        super().__init__(arenas, scope=Scope(MODEL), puller=_puller(gate))
        self._gate = gate

    async def prepare(self, offer: Offer, cancelled: Callable[[], bool]) -> Prepared:
        self._gate.version = offer.version
        await asyncio.to_thread(self._gate.reaches, "prepare")
        prepared = await super().prepare(offer, cancelled)
        await asyncio.to_thread(self._gate.reaches, "before-ack")
        return prepared

    async def commit(self, prepared: Prepared, apply: Apply) -> tuple[Prepared, float]:
        await asyncio.to_thread(self._gate.reaches, "between-commits")
        return await super().commit(prepared, apply)


class _InPlace(InPlaceReceiver):
    def __init__(self, arenas: ReplicaArenas, gate: Gate) -> None:
        super().__init__(arenas, scope=Scope(MODEL), puller=_puller(gate))
        self._gate = gate

    async def prepare(self, offer: Offer, cancelled: Callable[[], bool]) -> Prepared:
        self._gate.version = offer.version
        return await super().prepare(offer, cancelled)


class _Subscriber(BrokerSubscriber):
    gate: Gate

    async def _register(self) -> None:
        await super()._register()
        await asyncio.to_thread(self.gate.reaches, "register")


def _address(view: memoryview) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data


def _puller(gate: Gate) -> Puller:
    paths = PathBook(TransferSettings(floor_gb_per_second=0.001))  # a busy machine is none of these faults
    return Puller(Scope(MODEL), opened=_opener(gate), paths=paths)


def _opener(gate: Gate) -> Callable[[str], TransferBackend]:
    def opened(name: str) -> TransferBackend:
        backend = open_backend(name)
        inner = backend.read

        def read(remote: Any, remote_offset: int, local: Any, local_offset: int, length: int, seconds: float) -> None:
            weights = gate.holds_weights(local.view)
            if weights and local_offset > 0:
                gate.reaches("mid-read")
            inner(remote, remote_offset, local, local_offset, length, seconds)
            if weights:
                gate.damages(local_offset, local.view[local_offset : local_offset + length])

        backend.read = read
        return backend

    return opened


def replica(pipe: Connection, address: str, name: str, hook: Hook | None) -> None:
    """Serves what the broker commits and says so; stops once where the hook says."""
    asyncio.run(_replica(pipe, address, name, hook))


async def _replica(pipe: Connection, address: str, name: str, hook: Hook | None) -> None:
    in_place = hook is not None and hook.in_place
    with contextlib.closing(open_backend("shm")) as backend:
        buffers: Literal[1, 2] = 1 if in_place else 2
        arenas = ReplicaArenas(LAYOUT, buffers=buffers, backend=backend)
        gate = Gate(hook, pipe, arenas, buffers)

        async def apply(update: Update) -> float:
            if update.fill:
                await asyncio.to_thread(update.fill)
            pipe.send({"version": update.version, "epoch": update.epoch, "digest": served(update.buffer)})
            return 0.5

        async with open_channel(address, retry=RETRY) as channel:
            receiver = (_InPlace if in_place else _Swap)(arenas, gate)
            subscriber = _Subscriber(
                channel, replica=name, model_id=MODEL, layout=single_rank(LAYOUT), receiver=receiver, apply=apply
            )
            subscriber.gate = gate
            await subscriber.run()
