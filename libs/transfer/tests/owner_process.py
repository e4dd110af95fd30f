"""A process that offers one region filled with `pattern` and obeys "withdraw" over a pipe."""

from multiprocessing.connection import Connection

import numpy as np

from reflux_transfer.registry import open_backend
from reflux_transfer.settings import TransferSettings


def pattern(length: int) -> np.ndarray:
    """Bytes in which no range of 8 or more equals a neighbouring one."""
    counter = np.arange(-(-length // 4), dtype=np.uint32) * np.uint32(2654435761)
    return counter.view(np.uint8)[:length]


def offer(pipe: Connection, backend_name: str, settings: TransferSettings, length: int) -> None:
    """Sends the handle, then obeys until it is killed or the pipe closes."""
    backend = open_backend(backend_name, settings)
    region = backend.allocate(length)
    region.view[:] = memoryview(pattern(length))
    pipe.send(backend.describe(region))
    while pipe.recv() == "withdraw":
        backend.unregister(region)
        pipe.send("withdrawn")
