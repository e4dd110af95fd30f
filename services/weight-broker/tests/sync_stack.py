"""Starts and stops the processes of a sync for tests: broker, publishers and replicas, and the pipes to them."""

import asyncio
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import broker_processes
from broker_processes import digest

HANG_GUARD_SECONDS = 60.0
FORKS = multiprocessing.get_context("forkserver")
# The fork server of Python 3.11 does not see this folder, but what takes long to import is installed.
FORKS.set_forkserver_preload(
    ["reflux_weight_broker.main", "reflux_transfer.client.publisher", "reflux_transfer.client.subscriber"]
)


class Peer:
    """A process and the pipe to it."""

    def __init__(self, process: BaseProcess, pipe: Connection) -> None:
        self.process, self.pipe = process, pipe

    async def hears(self) -> dict:
        """The next message of the process."""
        assert await asyncio.to_thread(self.pipe.poll, HANG_GUARD_SECONDS), "nothing was heard"
        return self.pipe.recv()

    async def asks(self, **order: object) -> dict:
        """Orders something and waits for the answer."""
        self.orders(**order)
        return await self.hears()

    def orders(self, **order: object) -> None:
        """Orders something."""
        self.pipe.send(order)

    async def serves(self, version: int, seed: int, changes: int = 0) -> int:
        """The epoch under which the process says next that it serves these weights."""
        state = await self.hears()
        assert (state["version"], state["digest"]) == (version, digest(seed, changes))
        return state["epoch"]

    def signal(self, number: int) -> None:
        """Sends a signal."""
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.join()


class Stack:
    """The processes of one test."""

    def __init__(self, valkey_url: str) -> None:
        self.valkey_url, self.address = valkey_url, "127.0.0.1:0"
        self.peers: list[Peer] = []

    def broker(self) -> Peer:
        """Starts the broker; a later one takes the first one's address."""
        environment = {"REFLUX_REDIS_URL": self.valkey_url, "REFLUX_WEIGHT_BROKER_LISTEN": self.address}
        log, theirs = FORKS.Pipe(duplex=False)
        peer = self._start(broker_processes.broker, log, theirs, environment)
        with os.fdopen(os.dup(log.fileno())) as lines:
            for line in lines:
                assert "Traceback" not in line
                if "serves gRPC on " in line:
                    self.address = line.rpartition("serves gRPC on ")[2].strip()
                    return peer
        raise AssertionError("the broker did not start")

    def publisher(self, transport: str) -> Peer:
        """A publisher that obeys orders."""
        return self.starts(broker_processes.publisher, transport)

    def replica(self, name: str, mode: str = "swap") -> Peer:
        """A replica that says what it serves."""
        return self.starts(broker_processes.replica, name, mode)

    def starts(self, target: Callable[..., None], *arguments: object) -> Peer:
        """A process of `target(pipe, address of the broker, *arguments)`."""
        return self._start(target, *FORKS.Pipe(), self.address, *arguments)

    def _start(self, target: Callable[..., None], ours: Connection, theirs: Connection, *arguments: object) -> Peer:
        process = FORKS.Process(target=target, args=(theirs, *arguments), daemon=True)
        process.start()
        theirs.close()
        self.peers.append(Peer(process, ours))
        return self.peers[-1]

    def close(self) -> None:
        """Kills everybody."""
        for peer in self.peers:
            peer.kill()
            peer.pipe.close()
