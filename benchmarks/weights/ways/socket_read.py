"""Blocking sockets over loopback: sendall on one side, recv_into the final memory on the other.

The second argument is the size of both socket buffers in MiB; 0 leaves them to the kernel, which tunes them then.
"""

import socket
import sys
from multiprocessing.connection import Connection

import numpy as np
from worker import PATTERN, answer, start

_BUFFERS = (int(sys.argv[2]) if len(sys.argv) > 2 else 0) << 20


def owner(pipe: Connection, length: int) -> None:
    data = np.full(length, PATTERN, np.uint8)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        if _BUFFERS:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFERS)
        pipe.send(listener.getsockname())
        connection, _ = listener.accept()
        while connection.recv(1):
            connection.sendall(memoryview(data))


def main() -> None:
    length = int(sys.argv[1])
    ours = start(owner, length)
    data = np.ones(length, np.uint8)
    view = memoryview(data)
    connection = socket.socket()
    if _BUFFERS:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFERS)
    connection.connect(ours.recv())

    def transfer() -> None:
        connection.send(b"x")
        done = 0
        while done < length:
            done += connection.recv_into(view[done:])

    answer(transfer, lambda: bool((data == PATTERN).all()), lambda: data[::4096].fill(0))


if __name__ == "__main__":
    main()
