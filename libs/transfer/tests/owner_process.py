"""A process that offers one region filled with `pattern`, as it is known to a test."""

import multiprocessing
import os
from multiprocessing.connection import Connection

import numpy as np

from reflux_transfer.handles import Scope
from reflux_transfer.registry import open_backend
from reflux_transfer.settings import TransferEnvironment, TransferSettings

NIXL = ["nixl"] if os.environ.get("REFLUX_TEST_NIXL") == "1" else []
"""In an environment of its own, see deploy/bench/peers.sh; test_nixl.py says when it is left out."""

MIB = 1 << 20
SIZE = 17 * MIB + 11
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["numpy", "reflux_transfer.registry"])
_ROW = MIB // 4
_STEP = 2654435761
_BASE = np.arange(_ROW, dtype=np.uint32) * np.uint32(_STEP)


def fill(view: memoryview) -> None:
    """Writes bytes in which no range of 8 or more equals a neighbouring one, without a copy of them elsewhere."""
    for start, row in _rows(len(view)):
        np.frombuffer(view, np.uint8)[start : start + MIB] = row.view(np.uint8)[: len(view) - start]


def pattern(length: int) -> np.ndarray:
    """The bytes that `fill` writes."""
    data = np.empty(length, np.uint8)
    fill(memoryview(data))
    return data


def first_difference(view: memoryview) -> int | None:
    """Start of the first MiB that is not what `fill` writes."""
    data = np.frombuffer(view, np.uint8)
    for start, row in _rows(len(view)):
        if not np.array_equal(data[start : start + MIB], row.view(np.uint8)[: len(view) - start]):
            return start
    return None


def _rows(length: int):
    for index in range(-(-length // MIB)):
        yield index * MIB, _BASE + np.uint32(index * _ROW * _STEP % (1 << 32))


class Owner:
    """The other process."""

    def __init__(self, backend: str, length: int, scope: Scope | None = None) -> None:
        self.pipe, theirs = FORKS.Pipe()
        arguments = (theirs, backend, TransferEnvironment(), length, scope or Scope())
        self.process = FORKS.Process(target=_offer, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        assert self.pipe.poll(60), "the owner did not start"
        self.handle = self.pipe.recv()

    def withdraw(self) -> None:
        """Withdraws the region and gives its memory free."""
        self.pipe.send("withdraw")
        assert self.pipe.recv() == "withdrawn"

    def close_backend(self) -> None:
        """Closes the backend and lives on."""
        self.pipe.send("close")
        assert self.pipe.recv() == "closed"

    def reuse(self) -> bytes:
        """Withdraws, gives the memory free and takes it for something else. Handle of a second region, of `pattern`."""
        self.pipe.send("reuse")
        return self.pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def close(self) -> None:
        self.kill()
        self.pipe.close()


class OwnerByAll:
    """Another process that offers the same memory by several backends."""

    def __init__(self, backends: list[str], length: int) -> None:
        self._pipe, theirs = FORKS.Pipe()
        self._process = FORKS.Process(target=_offer_by_all, args=(theirs, backends, length), daemon=True)
        self._process.start()
        theirs.close()
        assert self._pipe.poll(60), "the owner did not start"
        self.handles: dict[str, bytes] = self._pipe.recv()

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _offer(pipe: Connection, backend_name: str, settings: TransferSettings, length: int, scope: Scope) -> None:
    """Sends the handle, then obeys until it is killed or the pipe closes."""
    backend = open_backend(backend_name, settings)
    region = backend.allocate(length, for_readers=True)
    fill(region.view)
    pipe.send(backend.describe(region, scope))
    others = []
    while command := pipe.recv():
        backend.unregister(region)
        region = None
        if command == "withdraw":
            pipe.send("withdrawn")
        elif command == "close":
            backend.close()
            pipe.send("closed")
        else:
            others += [np.full(length, 0xEE, np.uint8) for _ in range(4)]
            region = backend.allocate(length, for_readers=True)
            fill(region.view)
            pipe.send(backend.describe(region, scope))


def _offer_by_all(pipe: Connection, names: list[str], length: int) -> None:
    first, *others = [open_backend(name, TransferEnvironment()) for name in names]
    region = first.allocate(length, for_readers=True)
    fill(region.view)
    found = {first.name: first.describe(region)}
    pipe.send(found | {each.name: each.describe(each.register(region.view)) for each in others})
    pipe.recv()
