"""Mooncake's transfer engine, tcp, one blocking read."""

import os
import sys
from multiprocessing.connection import Connection

import numpy as np
from mooncake.engine import TransferEngine
from worker import PATTERN, answer, keep, start


def engine() -> TransferEngine:
    opened = TransferEngine()
    assert opened.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    return opened


def owner(pipe: Connection, length: int) -> None:
    opened, data = engine(), np.full(length, PATTERN, np.uint8)
    opened.register_memory(data.ctypes.data, length)
    pipe.send((f"127.0.0.1:{opened.get_rpc_port()}", data.ctypes.data))
    keep(pipe)


def main() -> None:
    length = int(sys.argv[1])
    ours = start(owner, length)
    opened, data = engine(), np.ones(length, np.uint8)
    opened.register_memory(data.ctypes.data, length)
    address, remote = ours.recv()

    def transfer() -> None:
        assert opened.transfer_sync_read(address, data.ctypes.data, remote, length) == 0

    answer(transfer, lambda: bool((data == PATTERN).all()), lambda: data[::4096].fill(0))


if __name__ == "__main__":
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    main()
