"""One read by our `ucx` backend into private memory; the owner sleeps.

Its memory is what a publisher's is: allocated for readers, or, with the argument `private`, private memory as well.
"""

import sys
from multiprocessing.connection import Connection

import numpy as np
from worker import PATTERN, answer, keep, start

from reflux_transfer.memory import private
from reflux_transfer.registry import open_backend
from reflux_transfer.settings import TransferEnvironment

_SECONDS = 60.0


def owner(pipe: Connection, length: int) -> None:
    backend = open_backend("ucx", TransferEnvironment())
    region = backend.allocate(length, for_readers="private" not in sys.argv)
    np.frombuffer(region.view, np.uint8)[:] = PATTERN
    pipe.send(backend.describe(region))
    keep(pipe)


def main() -> None:
    length = int(sys.argv[1])
    ours = start(owner, length)
    backend, memory = open_backend("ucx", TransferEnvironment()), private(length)
    local, remote = backend.register(memory), backend.open(ours.recv())
    data = np.frombuffer(memory, np.uint8)
    answer(
        lambda: backend.read(remote, 0, local, 0, length, _SECONDS),
        lambda: bool((data == PATTERN).all()),
        lambda: data[::4096].fill(0),
    )


if __name__ == "__main__":
    main()
