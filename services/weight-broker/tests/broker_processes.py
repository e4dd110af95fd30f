"""The two ends of a sync as processes of their own: python broker_processes.py publisher|replica ADDRESS NAME TRANSPORT.

Both speak JSON lines. Weights are a function of a seed, so that everyone can tell which version it sees.
"""

import asyncio
import json
import sys

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


def say(**fields: object) -> None:
    """One JSON line."""
    print(json.dumps(fields), flush=True)


async def replica(address: str, name: str) -> None:
    """Serves what the broker commits and says so."""
    arenas = ReplicaArenas(LAYOUT)

    async def apply(update: Update) -> float:
        say(version=update.version, epoch=update.epoch, digest=served(update.buffer))
        return 0.5

    async with open_channel(address, retry=RETRY) as channel:
        say(ready=True)
        await BrokerSubscriber(channel, replica=name, model_id=MODEL, arenas=arenas, apply=apply).run()


async def publisher(address: str, transport: str) -> None:
    """Obeys {"version": v, "seed": s, "timeout": t, "min_replicas": n, "flip": bool}."""
    backend = open_backend(transport)
    arenas = PublisherArenas(backend, LAYOUT, slice_bytes=1 << 20)
    async with open_channel(address, retry=RETRY) as channel:
        client = BrokerPublisher(channel, MODEL, arenas)
        say(ready=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            order = json.loads(line)
            try:
                staged = await client.stage(weights(order["seed"]), 10.0)
                if order.get("flip"):
                    arenas.view(staged.generation)[LAYOUT.by_name["norm.weight"].offset + 99] ^= 4
                done = await client.distribute(
                    staged,
                    order["version"],
                    sync_timeout_seconds=order.get("timeout", 20.0),
                    min_replicas=order.get("min_replicas", 0),
                )
                say(epoch=done.epoch, bytes=done.bytes, replicas=[state.replica for state in done.replicas])
            except TransferError as error:
                say(error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    _, role, broker, own_name, chosen = sys.argv
    asyncio.run(replica(broker, own_name) if role == "replica" else publisher(broker, chosen))
