"""Processes of a sharded sync: trainer ranks that hold FSDP2's shards, and ranks of tensor-parallel replicas.

Weights follow from a seed. What a rank holds is cut here by numpy, not by the library, so that both can be compared.
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
from reflux_transfer.arenas.staging import Cast, copy
from reflux_transfer.client.offer import Update, layout_of_rank
from reflux_transfer.client.publisher import BrokerPublisher
from reflux_transfer.client.rank import PublisherRank
from reflux_transfer.client.subscriber import BrokerSubscriber
from reflux_transfer.client.swap import SwapReceiver
from reflux_transfer.client.wire import RETRY
from reflux_transfer.errors import TransferError
from reflux_transfer.handles import Scope
from reflux_transfer.registry import open_backend
from reflux_weightplan.mesh import REPLICATED, Cut, Mesh, Placement
from reflux_weightplan.spec import SpecLayout, TensorSpec

MODEL = "runs/sharded"
RANKS = 2
HEAD = 64

Shape = tuple[int, ...]
SHAPES: dict[str, tuple[Shape, Placement]] = {
    "embed": ((2001, 256), Placement((Cut(0, "tensor", "chunk", 1024),))),  # a padded vocabulary
    "q": ((512, 512), Placement((Cut(0, "tensor", "even", HEAD),))),
    "k": ((HEAD, 512), Placement((Cut(0, "tensor", "even", HEAD),))),  # one head, on both ranks
    "o": ((512, 512), Placement((Cut(1, "tensor", "even", HEAD),))),
    "down": ((767, 1024), Placement((Cut(1, "tensor"),))),
    "norm": ((511,), REPLICATED),
}
"""Shape in bfloat16, and how a replica cuts it; FSDP2 cuts all of them along dimension 0, some unevenly."""

SOURCE = SpecLayout(
    Mesh((("shard", RANKS),)),
    tuple(
        TensorSpec(name, shape, "bfloat16", Placement((Cut(0, "shard", "chunk"),)))
        for name, (shape, _) in SHAPES.items()
    ),
)
TARGET = SpecLayout(
    Mesh((("tensor", RANKS),)),
    tuple(TensorSpec(name, shape, "bfloat16", placement) for name, (shape, placement) in SHAPES.items()),
)


def weights(seed: int) -> dict[str, np.ndarray]:
    """Global tensors of a seed, bfloat16 as numpy has it: uint16."""
    rng = np.random.default_rng(seed)
    return {name: rng.integers(0, 1 << 16, shape, np.uint16) for name, (shape, _) in SHAPES.items()}


def shard(seed: int, rank: int) -> dict[str, np.ndarray]:
    """What a trainer's rank holds: torch.chunk of every tensor."""
    found = {}
    for name, tensor in weights(seed).items():
        rows = -(-len(tensor) // RANKS)
        found[name] = tensor[rank * rows : (rank + 1) * rows]
    return found


def part(seed: int, rank: int) -> dict[str, np.ndarray]:
    """What a replica's rank holds."""
    tensors = weights(seed)
    quarter, half, whole = (slice(rank * size, (rank + 1) * size) for size in (256, 512, 1024))
    return {
        "embed": tensors["embed"][whole],
        "q": tensors["q"][quarter],
        "k": tensors["k"],
        "o": tensors["o"][:, quarter],
        "down": tensors["down"][:, half],
        "norm": tensors["norm"],
    }


def digests(seed: int, rank: int) -> dict[str, str]:
    """What a replica's rank reports."""
    tensors = part(seed, rank)
    return {name: xxhash.xxh3_64_hexdigest(np.ascontiguousarray(tensor)) for name, tensor in tensors.items()}


NEEDED_BYTES = sum(tensor.nbytes for rank in range(RANKS) for tensor in part(0, rank).values())
"""Of one replica."""


def first_rank(pipe: Connection, address: str, transport: str) -> None:
    """Obeys {"version": v, "seed": s, "others": regions, "min_replicas": n}; tells when the version has begun."""
    asyncio.run(_first_rank(pipe, address, transport))


def other_rank(pipe: Connection, address: str, transport: str, rank: int) -> None:
    """Obeys {"claim": seconds}, {"write": seed, "die": bool} and {"settle": committed}."""
    asyncio.run(_other_rank(pipe, address, transport, rank))


def replica_rank(pipe: Connection, address: str, name: str, rank: int) -> None:
    """Serves what the broker commits, and says so with a digest of every tensor."""
    asyncio.run(_replica_rank(pipe, address, name, rank))


async def _first_rank(pipe: Connection, address: str, transport: str) -> None:
    arenas = PublisherArenas(open_backend(transport), layout_of_rank(SOURCE, 0))
    async with open_channel(address, retry=RETRY) as channel:
        publisher = BrokerPublisher(channel, MODEL, arenas, layout=SOURCE)
        while True:
            order = await asyncio.to_thread(pipe.recv)
            try:
                pipe.send(await _publish(pipe, publisher, order))
            except TransferError as error:
                pipe.send({"error": f"{type(error).__name__}: {error}"})


async def _publish(pipe: Connection, publisher: BrokerPublisher, order: dict) -> dict:
    begun = await publisher.begin(order["version"], sync_timeout_seconds=20.0, min_replicas=2, others=order["others"])
    pipe.send({"begun": begun.epoch})
    async with begun:
        own = await asyncio.to_thread(begun.write, shard(order["seed"], 0))
        done = await begun.finish()
    replicas = {state.replica: state.fingerprint for state in done.replicas}
    return {"epoch": done.epoch, "bytes": done.bytes, "own": own, "whole": done.fingerprint, "replicas": replicas}


async def _other_rank(pipe: Connection, address: str, transport: str, rank: int) -> None:
    arenas = PublisherArenas(open_backend(transport), layout_of_rank(SOURCE, rank))
    async with open_channel(address, retry=RETRY) as channel:
        client = PublisherRank(channel, MODEL, arenas, layout=SOURCE, rank=rank)
        while True:
            order = await asyncio.to_thread(pipe.recv)
            staging = await client.claim(order["claim"])
            pipe.send({"region": client.region(staging)})
            order = await asyncio.to_thread(pipe.recv)
            cast: Cast = _dying if order["die"] else copy
            own = await asyncio.to_thread(staging.write, shard(order["write"], rank), cast)
            pipe.send({"own": own})
            client.settle(staging, committed=(await asyncio.to_thread(pipe.recv))["settle"])


def _dying(tensor: object, place: memoryview) -> None:
    """Writes until a small tensor, so that replicas have begun to follow, then nobody writes the rest."""
    if len(place) < 1 << 16:
        os.kill(os.getpid(), signal.SIGKILL)
    copy(tensor, place)


async def _replica_rank(pipe: Connection, address: str, name: str, rank: int) -> None:
    layout = layout_of_rank(TARGET, rank)
    with contextlib.closing(open_backend("shm")) as backend:
        arenas = ReplicaArenas(layout, backend=backend)
        receiver = SwapReceiver(arenas, rank=rank, scope=Scope(MODEL))

        async def apply(update: Update) -> float:
            slots = layout.slots
            held = {slot.name: xxhash.xxh3_64_hexdigest(update.buffer[slot.offset : slot.end]) for slot in slots}
            pipe.send({"version": update.version, "epoch": update.epoch, "held": held})
            return 0.0

        async with open_channel(address, retry=RETRY) as channel:
            await BrokerSubscriber(
                channel, replica=name, model_id=MODEL, layout=TARGET, receiver=receiver, apply=apply, rank=rank
            ).run()
