"""The processes of a sync: broker, publisher and replica, forked from a server that has imported everything once.

Publisher and replica speak over a pipe. Weights follow from a seed, so that everyone can tell what it sees.
"""

import asyncio
import os
import signal
from multiprocessing.connection import Connection

import numpy as np
import xxhash

from reflux_kit.channel import open_channel
from reflux_transfer.arena import PublisherArenas, ReplicaArenas
from reflux_transfer.client.publisher import BrokerPublisher
from reflux_transfer.client.subscriber import BrokerSubscriber, Update
from reflux_transfer.client.wire import RETRY
from reflux_transfer.errors import TransferError
from reflux_transfer.layout import Layout
from reflux_transfer.registry import open_backend
from reflux_weight_broker import main as broker_main

MODEL = "runs/r1"
SHAPES = {"embed.weight": ([3000, 700], "float32"), "norm.weight": ([700], "float32"), "half": ([33], "bfloat16")}
LAYOUT = Layout.from_shapes(SHAPES)


def weights(seed: int) -> dict[str, np.ndarray]:
    """Tensors of a seed."""
    rng = np.random.default_rng(seed)
    return {slot.name: rng.integers(0, 256, slot.nbytes, np.uint8) for slot in LAYOUT.slots}


def digest(seed: int) -> str:
    """What a replica reports that serves `weights(seed)`."""
    return xxhash.xxh3_64_hexdigest(b"".join(tensor.tobytes() for tensor in weights(seed).values()))


def served(buffer: memoryview) -> str:
    """The same of a replica's live buffer, by another route than the library's fingerprint."""
    return xxhash.xxh3_64_hexdigest(b"".join(bytes(buffer[slot.offset : slot.end]) for slot in LAYOUT.slots))


def broker(log: Connection, environment: dict[str, str]) -> None:
    """`reflux-weight-broker` with its stderr in a pipe."""
    os.environ.update(environment)
    os.dup2(log.fileno(), 2)
    broker_main.main()


def replica(pipe: Connection, address: str, name: str) -> None:
    """Serves what the broker commits and says so."""
    asyncio.run(_replica(pipe, address, name))


def publisher(pipe: Connection, address: str, transport: str) -> None:
    """Obeys {"version": v, "seed": s, "timeout": t, "min_replicas": n, "flip": bool, "die": bool}."""
    asyncio.run(_publisher(pipe, address, transport))


async def _replica(pipe: Connection, address: str, name: str) -> None:
    arenas = ReplicaArenas(LAYOUT)

    async def apply(update: Update) -> float:
        pipe.send({"version": update.version, "epoch": update.epoch, "digest": served(update.buffer)})
        return 0.5

    async with open_channel(address, retry=RETRY) as channel:
        await BrokerSubscriber(channel, replica=name, model_id=MODEL, arenas=arenas, apply=apply).run()


async def _publisher(pipe: Connection, address: str, transport: str) -> None:
    arenas = PublisherArenas(open_backend(transport), LAYOUT, slice_bytes=1 << 20)
    async with open_channel(address, retry=RETRY) as channel:
        client = BrokerPublisher(channel, MODEL, arenas)
        while True:
            order = await asyncio.to_thread(pipe.recv)
            try:
                pipe.send(await _publish(client, arenas, order))
            except TransferError as error:
                pipe.send({"error": f"{type(error).__name__}: {error}"})


async def _die_once_begun(client: BrokerPublisher, before: int | None) -> None:
    while client._epoch == before:
        await asyncio.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


async def _publish(client: BrokerPublisher, arenas: PublisherArenas, order: dict) -> dict:
    staged = await client.stage(weights(order["seed"]), 10.0)
    if order.get("flip"):
        arenas.view(staged.generation)[LAYOUT.by_name["norm.weight"].offset + 99] ^= 4
    death = asyncio.create_task(_die_once_begun(client, client._epoch)) if order.get("die") else None
    done = await client.distribute(
        staged,
        order["version"],
        sync_timeout_seconds=order.get("timeout", 20.0),
        min_replicas=order.get("min_replicas", 0),
    )
    assert death is None, "the version was committed although its publisher was to die"
    return {"epoch": done.epoch, "bytes": done.bytes, "replicas": [state.replica for state in done.replicas]}
