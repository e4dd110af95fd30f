"""ucxx tag send and receive over worker addresses (tcp, posix, cma): its fastest way here; a listener stays on tcp."""

import asyncio
import os
import sys
from multiprocessing.connection import Connection

import numpy as np
from worker import PATTERN, answer, start

_TAG = 7


def _prepare() -> None:
    os.environ["UCX_TLS"] = "tcp,posix,cma"
    os.environ["UCX_NET_DEVICES"] = "lo"
    os.environ["UCX_WARN_UNUSED_ENV_VARS"] = "n"


def owner(pipe: Connection, length: int) -> None:
    _prepare()
    asyncio.run(_serve(pipe, length))


async def _serve(pipe: Connection, length: int) -> None:
    import ucxx

    data = np.full(length, PATTERN, np.uint8)
    pipe.send(bytes(ucxx.get_worker_address()))
    address = ucxx.get_ucx_address_from_buffer(pipe.recv())
    endpoint = await ucxx.create_endpoint_from_worker_address(address)
    wanted = np.zeros(1, np.uint8)
    while True:
        await endpoint.recv(wanted, tag=ucxx.types.Tag(_TAG), force_tag=True)
        await endpoint.send(data, tag=ucxx.types.Tag(_TAG), force_tag=True)


def main() -> None:
    length = int(sys.argv[1])
    ours = start(owner, length)
    _prepare()
    import ucxx

    loop = asyncio.new_event_loop()
    data, wanted = np.ones(length, np.uint8), np.ones(1, np.uint8)

    async def connect() -> object:
        ours.send(bytes(ucxx.get_worker_address()))
        return await ucxx.create_endpoint_from_worker_address(ucxx.get_ucx_address_from_buffer(ours.recv()))

    endpoint = loop.run_until_complete(connect())

    async def fetch() -> None:
        await endpoint.send(wanted, tag=ucxx.types.Tag(_TAG), force_tag=True)
        await endpoint.recv(data, tag=ucxx.types.Tag(_TAG), force_tag=True)

    answer(
        lambda: loop.run_until_complete(fetch()),
        lambda: bool((data == PATTERN).all()),
        lambda: data[::4096].fill(0),
    )


if __name__ == "__main__":
    main()
