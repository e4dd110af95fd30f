"""Small weights, a backend that tells about its reads, and a process that stages piece by piece on command."""

import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from reflux_transfer.arenas.geometry import Geometry
from reflux_transfer.arenas.publisher import PublisherArenas
from reflux_transfer.arenas.staging import copy
from reflux_transfer.backends.shm import ShmBackend
from reflux_transfer.layout import Layout
from reflux_transfer.registry import open_backend

SLICE = 4096
LAYOUT = Layout.from_shapes(
    {"big": ([1000, 3], "float32"), "scalar": ([], "float32"), "half": ([5], "bfloat16"), "last": ([4100], "uint8")}
)

GEOMETRY = Geometry(LAYOUT, SLICE)


def tensors(seed: int) -> dict[str, np.ndarray]:
    """bfloat16 as numpy has it: uint16."""
    rng = np.random.default_rng(seed)
    return {
        "big": rng.standard_normal((1000, 3), np.float32),
        "scalar": np.full((), seed, np.float32),
        "half": rng.integers(0, 1 << 16, 5).astype(np.uint16),
        "last": rng.integers(0, 256, 4100).astype(np.uint8),
    }


def assert_holds(view: memoryview, weights: dict[str, np.ndarray]) -> None:
    """The tensors area has exactly these weights."""
    for slot in LAYOUT.slots:
        assert bytes(view[slot.offset : slot.end]) == weights[slot.name].tobytes(), slot.name


class WatchedShm(ShmBackend):
    """Calls `before(offset, length)` ahead of every read; `data_read` is set after one of tensors."""

    def __init__(self, before: Callable[[int, int], None] = lambda offset, length: None) -> None:
        super().__init__()
        self.before, self.data_read, self.data_bytes = before, threading.Event(), 0

    def read(self, remote: Any, remote_offset: int, local: Any, local_offset: int, length: int, seconds: float) -> None:
        self.before(remote_offset, length)
        super().read(remote, remote_offset, local, local_offset, length, seconds)
        if remote_offset >= GEOMETRY.tensors_offset:
            self.data_bytes += length
            self.data_read.set()


class LastingShm(ShmBackend):
    """A segment that stays readable after its owner withdrew it, as memory behind a network card may."""

    def unregister(self, region: Any) -> None:
        pass


def publish(pipe: Connection, backend_name: str) -> None:
    """Sends (handle, generation), then writes a piece per "go"; ends by "end"."""
    arenas = PublisherArenas(open_backend(backend_name), LAYOUT, SLICE)
    begins = [piece.slot.offset + piece.start for piece in GEOMETRY.pieces]
    allowed = {begin: threading.Event() for begin in begins}

    def listen() -> None:
        for begin in begins:
            assert pipe.recv() == "go"
            allowed[begin].set()

    with arenas.begin() as staging:
        base = _address(arenas.view(staging.generation))

        def cast(part: Any, place: memoryview) -> None:
            allowed[_address(place) - base].wait()
            copy(part, place)

        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        pipe.send((staging.offer(), staging.generation))
        pipe.send(staging.write(tensors(1), cast))
        listener.join()
        pipe.recv()


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)
