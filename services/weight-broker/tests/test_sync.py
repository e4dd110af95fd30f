"""The whole sync: broker, Valkey, one publisher and two replicas, each a process of its own."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from broker_processes import LAYOUT, digest

HANG_GUARD_SECONDS = 60.0


class Peer:
    """A process that speaks JSON lines."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def hears(self) -> dict:
        line = await asyncio.wait_for(self.process.stdout.readline(), HANG_GUARD_SECONDS)
        assert line, "the process ended"
        return json.loads(line)

    async def asks(self, **order: object) -> dict:
        self.orders(**order)
        return await self.hears()

    def orders(self, **order: object) -> None:
        self.process.stdin.write(json.dumps(order).encode() + b"\n")

    async def serves(self, version: int, seed: int) -> int:
        state = await self.hears()
        assert (state["version"], state["digest"]) == (version, digest(seed))
        return state["epoch"]

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()


async def start(*arguments: str) -> Peer:
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    script = str(Path(__file__).with_name("broker_processes.py"))
    return Peer(await asyncio.create_subprocess_exec(sys.executable, script, *arguments, **pipes))


class Stack:
    """The processes of one test."""

    def __init__(self, exits: AsyncExitStack, valkey_url: str, transport: str) -> None:
        self.exits, self.transport = exits, transport
        self.environment = {**os.environ, "REFLUX_REDIS_URL": valkey_url}
        self.address = "127.0.0.1:0"

    async def broker(self) -> asyncio.subprocess.Process:
        """Starts the broker; a later one takes the first one's address."""
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-m", "reflux_weight_broker.main"],
            env={**self.environment, "REFLUX_WEIGHT_BROKER_LISTEN": self.address},
            stderr=asyncio.subprocess.PIPE,
        )
        self.exits.push_async_callback(ended, process)
        while line := (await asyncio.wait_for(process.stderr.readline(), HANG_GUARD_SECONDS)).decode():
            assert "Traceback" not in line
            if "serves gRPC on " in line:
                self.address = line.rpartition("serves gRPC on ")[2].strip()
                return process
        raise AssertionError("the broker did not start")

    async def peers(self, *roles: str) -> list[Peer]:
        """Starts publishers and replicas at the same time."""
        peers = await asyncio.gather(
            *(start(role.partition("-")[0], self.address, role, self.transport) for role in roles)
        )
        for peer in peers:
            self.exits.push_async_callback(ended, peer.process)
        for peer in peers:
            assert await peer.hears() == {"ready": True}
        return list(peers)


async def ended(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


@asynccontextmanager
async def stack(valkey_url: str, transport: str) -> AsyncIterator[Stack]:
    async with AsyncExitStack() as exits:
        yield Stack(exits, valkey_url, transport)


@pytest.mark.parametrize("transport", ["shm", "ucx"])
async def test_versions_arrive_and_a_flipped_bit_changes_nothing(valkey_url: str, transport: str) -> None:
    async with stack(valkey_url, transport) as run:
        await run.broker()
        publisher, first, second = await run.peers("publisher", "replica-0", "replica-1")
        done = await publisher.asks(version=1, seed=1, min_replicas=2)
        assert (done["bytes"], set(done["replicas"])) == (2 * LAYOUT.parameter_bytes, {"replica-0", "replica-1"})
        assert await first.serves(1, seed=1) == await second.serves(1, seed=1) == done["epoch"]

        refused = await publisher.asks(version=2, seed=2, min_replicas=2, flip=True)
        assert refused["error"].startswith("PublishAborted")
        assert "replica-" in refused["error"]
        assert "checksum mismatch in norm.weight" in refused["error"]

        again = await publisher.asks(version=2, seed=3, min_replicas=2)
        assert again["epoch"] > done["epoch"]
        await first.serves(2, seed=3)  # the very next thing that it applies: the broken one was never served
        await second.serves(2, seed=3)

        (late,) = await run.peers("replica-2")
        assert await late.serves(2, seed=3) == again["epoch"]
        assert (await publisher.asks(version=1, seed=4))["error"].startswith("PublishRefused: version 1 is lower")
        third = await publisher.asks(version=3, seed=5, min_replicas=3)
        for replica in (first, second, late):
            assert await replica.serves(3, seed=5) == third["epoch"]


async def test_deaths_and_hangs_of_replicas_leave_the_others_whole(valkey_url: str) -> None:
    async with stack(valkey_url, "ucx") as run:
        await run.broker()
        publisher, first, second, third = await run.peers("publisher", "replica-0", "replica-1", "replica-2")
        await publisher.asks(version=1, seed=1, min_replicas=3)
        for replica in (first, second, third):
            await replica.serves(1, seed=1)

        second.process.send_signal(signal.SIGSTOP)  # stands still, so that the kill hits it while it should prepare
        publisher.orders(version=2, seed=2)
        await second.kill()
        assert "error" not in await publisher.hears()
        await first.serves(2, seed=2)
        await third.serves(2, seed=2)

        third.process.send_signal(signal.SIGSTOP)
        hung = await publisher.asks(version=3, seed=3, timeout=1.0)
        assert hung["error"].endswith("aborted: replica-2 did not prepare within 1 s")
        await publisher.asks(version=3, seed=4)
        await first.serves(3, seed=4)  # never seed 3

        third.process.send_signal(signal.SIGCONT)
        await third.serves(3, seed=4)  # registered again and caught up


async def test_a_killed_broker_comes_back_with_higher_epochs(valkey_url: str) -> None:
    async with stack(valkey_url, "shm") as run:
        broker = await run.broker()
        publisher, first, second = await run.peers("publisher", "replica-0", "replica-1")
        before = await publisher.asks(version=1, seed=1, min_replicas=2)
        await first.serves(1, seed=1)
        await second.serves(1, seed=1)

        broker.kill()
        await broker.wait()
        publisher.orders(version=2, seed=2, min_replicas=2)  # while it is away
        await second.kill()
        await run.broker()
        (replacement,) = await run.peers("replica-1")
        after = await publisher.hears()
        assert after["epoch"] > before["epoch"]
        assert await first.serves(2, seed=2) == after["epoch"]
        state = await replacement.hears()  # the committed version first, if it registered before the new one began
        if state["version"] == 1:
            assert state["digest"] == digest(1)
            state = await replacement.hears()
        assert (state["version"], state["digest"]) == (2, digest(2))


async def test_a_second_publisher_takes_over_and_the_first_is_fenced(valkey_url: str) -> None:
    async with stack(valkey_url, "shm") as run:
        await run.broker()
        old, new, replica = await run.peers("publisher", "publisher", "replica-0")
        await old.asks(version=5, seed=1, min_replicas=1)
        await replica.serves(5, seed=1)
        assert "error" not in await new.asks(version=3, seed=2, min_replicas=1)  # restored from a checkpoint: goes back
        await replica.serves(3, seed=2)
        assert (await old.asks(version=6, seed=3))["error"].startswith("PublisherFenced")
        await new.asks(version=4, seed=4)
        await replica.serves(4, seed=4)
