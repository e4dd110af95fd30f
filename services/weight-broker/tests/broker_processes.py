"""The processes of a sync: broker, publisher and replica, forked from a server that has imported everything once.

Publisher and replica speak over a pipe. Weights follow from a seed, so that everyone can tell what it sees.
"""

import asyncio
import contextlib
import os
import signal
from multiprocessing.connection import Connection

import numpy as np
import xxhash

from reflux_kit.channel import open_channel
from reflux_transfer.arenas.publisher import PublisherArenas
from reflux_transfer.arenas.replica import ReplicaArenas
from reflux_transfer.arenas.staging import Cast, Staging, copy
from reflux_transfer.client.in_place import InPlaceReceiver
from reflux_transfer.client.layouts import single_rank
from reflux_transfer.client.offer import Update
from reflux_transfer.client.publisher import BrokerPublisher
from reflux_transfer.client.subscriber import BrokerSubscriber
from reflux_transfer.client.swap import SwapReceiver
from reflux_transfer.client.wire import RETRY
from reflux_transfer.errors import TransferError
from reflux_transfer.handles import Scope
from reflux_transfer.layout import Layout
from reflux_transfer.registry import open_backend
from reflux_weight_broker import main as broker_main
from reflux_weightplan.dtypes import ITEM_BYTES

MODEL = "runs/r1"
SHAPES = {"embed.weight": ([3000, 700], "float32"), "norm.weight": ([700], "float32"), "half": ([33], "bfloat16")}
LAYOUT = Layout.from_shapes(SHAPES)


def weights(seed: int) -> dict[str, np.ndarray]:
    """Tensors of a seed."""
    rng = np.random.default_rng(seed)
    return {
        slot.name: rng.integers(0, 256, slot.nbytes, np.uint8).view(np.dtype(f"u{ITEM_BYTES[slot.dtype]}"))
        for slot in LAYOUT.slots
    }


def changed(seed: int, changes: int) -> dict[str, np.ndarray]:
    """Tensors of a seed of which `changes` elements are others."""
    tensors = weights(seed)
    tensors["embed.weight"][:changes] ^= 1
    return tensors


def digest(seed: int, changes: int = 0) -> str:
    """What a replica reports that serves `changed(seed, changes)`."""
    return xxhash.xxh3_64_hexdigest(b"".join(tensor.tobytes() for tensor in changed(seed, changes).values()))


def served(buffer: memoryview) -> str:
    """The same of a replica's live buffer, by another route than the library's fingerprint."""
    return xxhash.xxh3_64_hexdigest(b"".join(bytes(buffer[slot.offset : slot.end]) for slot in LAYOUT.slots))


def broker(log: Connection, environment: dict[str, str]) -> None:
    """`reflux-weight-broker` with its stderr in a pipe."""
    os.environ.update(environment)
    os.dup2(log.fileno(), 2)
    broker_main.main()


def replica(pipe: Connection, address: str, name: str, mode: str = "swap") -> None:
    """Serves what the broker commits and says so."""
    asyncio.run(_replica(pipe, address, name, mode))


def publisher(pipe: Connection, address: str, transport: str) -> None:
    """Obeys {"version": v, "seed": s, "changes": n, "kind": k, "timeout": t, "min_replicas": n, "flip": bool,
    "die": bool, "fail": bool}.
    """
    asyncio.run(_publisher(pipe, address, transport))


async def _replica(pipe: Connection, address: str, name: str, mode: str) -> None:
    with contextlib.closing(open_backend("shm")) as backend:
        arenas = ReplicaArenas(LAYOUT, buffers=2 if mode == "swap" else 1, backend=backend)
        receiver = (SwapReceiver if mode == "swap" else InPlaceReceiver)(arenas, scope=Scope(MODEL))

        async def apply(update: Update) -> float:
            if update.fill:
                await asyncio.to_thread(update.fill)
            pipe.send({"version": update.version, "epoch": update.epoch, "digest": served(update.buffer)})
            return 0.5

        async with open_channel(address, retry=RETRY) as channel:
            await BrokerSubscriber(
                channel, replica=name, model_id=MODEL, layout=single_rank(LAYOUT), receiver=receiver, apply=apply
            ).run()


async def _publisher(pipe: Connection, address: str, transport: str) -> None:
    arenas = PublisherArenas(open_backend(transport), LAYOUT, slice_bytes=1 << 20, delta_share=1.0)
    async with open_channel(address, retry=RETRY) as channel:
        client = BrokerPublisher(channel, MODEL, arenas)
        while True:
            order = await asyncio.to_thread(pipe.recv)
            try:
                pipe.send(await _publish(client, order))
            except (TransferError, ValueError) as error:
                pipe.send({"error": f"{type(error).__name__}: {error}"})


async def _publish(client: BrokerPublisher, order: dict) -> dict:
    publishing = await client.begin(
        order["version"],
        kind=order.get("kind", "full"),
        sync_timeout_seconds=order.get("timeout", 20.0),
        min_replicas=order.get("min_replicas", 0),
    )
    if order.get("flip"):
        _flip_a_bit(publishing.staging)
    tensors = weights(order["seed"]) if "changes" not in order else changed(order["seed"], order["changes"])
    async with publishing:
        await asyncio.to_thread(publishing.write, tensors, _dying if order.get("die") else _cast(order.get("fail")))
        done = await publishing.finish()
    return {
        "epoch": done.epoch,
        "bytes": done.bytes,
        "replicas": [state.replica for state in done.replicas],
        "sources": {state.replica: state.source for state in done.replicas},
        "control_messages": done.control_messages,
    }


def _cast(fails: bool) -> Cast:
    def cast(part: object, place: memoryview) -> None:
        if fails and len(place) < 1 << 20:
            raise ValueError("no cast for this tensor")
        copy(part, place)

    return cast


def _dying(part: object, place: memoryview) -> None:
    """Writes some pieces, so that replicas have begun to follow, then nobody writes the rest."""
    if len(place) < 1 << 20:
        os.kill(os.getpid(), signal.SIGKILL)
    copy(part, place)


def _flip_a_bit(staging: Staging) -> None:
    """Damages the memory of a piece between its checksum and the moment when it is offered to readers."""
    header, ready = staging._header, staging._header.ready

    def damaged(index: int, checksum: int) -> None:
        if index == len(staging._geometry.pieces) - 2:
            staging._tensors[LAYOUT.by_name["norm.weight"].offset + 99] ^= 4
            header.ready = ready
        ready(index, checksum)

    header.ready = damaged
