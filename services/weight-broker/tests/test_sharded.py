"""Two trainer ranks with FSDP2's shards feed two tensor-parallel replicas, each rank a process of its own."""

import asyncio
import signal
from itertools import product

import pytest
import sharded_processes as processes
from sharded_processes import NEEDED_BYTES, digests
from sync_stack import Peer, Stack

from reflux_transfer import fingerprint


class Trainer:
    """The ranks of a publisher; the test tells one what the other has."""

    def __init__(self, run: Stack, transport: str = "shm") -> None:
        self.run, self.transport = run, transport
        self.first = run.starts(processes.first_rank, transport)
        self.restart()

    def restart(self) -> None:
        """A new process for rank 1."""
        self.other = self.run.starts(processes.other_rank, self.transport, 1)

    async def begins(self, version: int, seed: int) -> int:
        """Claims and announces a version; its epoch."""
        region = (await self.other.asks(claim=20.0))["region"]
        return (await self.first.asks(version=version, seed=seed, others=[region]))["begun"]

    async def publishes(self, version: int, seed: int) -> dict:
        """A version from its begin to its end."""
        epoch = await self.begins(version, seed)
        return await self.finishes(seed, epoch)

    async def finishes(self, seed: int, epoch: int) -> dict:
        """The end of one that has begun."""
        written = await self.other.asks(write=seed, die=False)
        done = await self.first.hears()
        assert "error" not in done, done
        self.other.orders(settle=True)
        assert done["epoch"] == epoch
        assert done["whole"] == fingerprint.tree([done["own"], written["own"]])
        assert done["replicas"] == dict.fromkeys(("a", "b"), done["whole"])
        return done


class Replicas:
    """All ranks of two replicas."""

    def __init__(self, run: Stack) -> None:
        self.ranks: dict[tuple[str, int], Peer] = {
            (name, rank): run.starts(processes.replica_rank, name, rank) for name, rank in product("ab", range(2))
        }

    async def serve(self, version: int, seed: int, epoch: int) -> None:
        """The next thing that each rank serves is its part of this version, to the last bit."""
        for (_, rank), peer in self.ranks.items():
            state = await peer.hears()
            assert (state["version"], state["epoch"]) == (version, epoch)
            assert state["held"] == digests(seed, rank)


@pytest.mark.parametrize("transport", ["shm", "ucx"])
async def test_shards_reach_tensor_parallel_replicas_by_the_bytes_that_they_need(run: Stack, transport: str) -> None:
    trainer = Trainer(run, transport)
    epoch = await trainer.begins(1, seed=1)  # nobody has registered: nothing can be packed
    replicas = Replicas(run)
    done = await trainer.finishes(1, epoch)
    await replicas.serve(1, 1, epoch)
    assert done["bytes"] > 1.5 * 2 * NEEDED_BYTES
    for version in (2, 3, 4):  # through both arenas, and again
        done = await trainer.publishes(version, seed=version)
        await replicas.serve(version, version, done["epoch"])
        assert 2 * NEEDED_BYTES <= done["bytes"] < 1.1 * 2 * NEEDED_BYTES


async def test_a_rank_killed_while_it_writes_costs_its_version_only(run: Stack) -> None:
    trainer, replicas = Trainer(run), Replicas(run)
    await replicas.serve(1, 1, (await trainer.publishes(1, seed=1))["epoch"])
    await trainer.begins(2, seed=2)
    trainer.other.orders(write=2, die=True)
    await asyncio.to_thread(trainer.other.process.join)
    assert trainer.other.process.exitcode == -signal.SIGKILL
    aborted = await trainer.first.hears()
    assert aborted["error"].startswith("PublishAborted"), aborted
    trainer.restart()
    done = await trainer.publishes(2, seed=3)
    await replicas.serve(2, 3, done["epoch"])  # the very next thing: nobody has applied a byte of seed 2
    assert done["bytes"] < 1.1 * 2 * NEEDED_BYTES
