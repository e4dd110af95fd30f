"""Publishers pack for the layouts of the replicas that are registered, against a real broker in this process."""

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest
import redis.asyncio
from test_clients import HANG_SECONDS, LAYOUT, Replica, Stack, opened, publish, weights

from reflux_transfer.arenas.publisher import PublisherArenas
from reflux_transfer.client.layouts import single_rank
from reflux_transfer.client.offer import layout_of_rank
from reflux_transfer.client.publisher import BrokerPublisher
from reflux_transfer.client.rank import PublisherRank
from reflux_transfer.errors import LayoutError
from reflux_weightplan.mesh import Cut, Mesh, Placement
from reflux_weightplan.spec import SpecLayout, TensorSpec


@pytest.fixture
async def stack(valkey_url: str) -> AsyncIterator[Stack]:
    async with opened(valkey_url, reconnect_seconds=30.0) as started:  # who has registered stays registered
        yield started


MATRIX, NORM = 64 * 32 * 4, 32 * 4


def columns(ranks: int) -> SpecLayout:
    """`LAYOUT` with its matrix cut along columns."""
    cut = Placement((Cut(1, "tensor"),))
    return SpecLayout(
        Mesh((("tensor", ranks),)),
        (TensorSpec("w", (64, 32), "float32", cut), TensorSpec("norm", (32,), "float32")),
    )


async def join(stack: Stack, name: str, ranks: int) -> list[Replica]:
    """All ranks of a replica; the broker knows them."""
    found = [stack.replica(name, spec=columns(ranks), rank=rank) for rank in range(ranks)]
    async with asyncio.timeout(HANG_SECONDS):
        while (state := (await stack.states()).get(name)) is None or "ranks are there" in state.health_reason:
            await asyncio.sleep(0.01)
    return found


async def serve(replicas: list[Replica], version: int, seed: int) -> None:
    """Each rank serves its columns of this version."""
    for rank, replica in enumerate(replicas):
        expected = np.split(weights(seed)["w"], len(replicas), axis=1)[rank]
        assert np.array_equal((await replica.serves(version))["w"], expected.reshape(-1))


def packed(replica: Replica) -> list[bool]:
    """Of the routes that a rank has made, in order."""
    return [route.packed for route in replica.subscriber._routes.values()]


async def test_publishers_pack_for_every_layout_that_is_there(stack: Stack) -> None:
    publisher, halves = stack.publisher(), await join(stack, "halves", 2)
    publisher._rank.arenas.pack_room *= 2
    done = await publish(publisher, 1, 1, min_replicas=1)
    assert done.bytes == MATRIX + 2 * NORM
    await serve(halves, 1, 1)
    quarters = await join(stack, "quarters", 4)  # late: the committed version is not packed for it
    await serve(quarters, 1, 1)
    await stack.settled("quarters", done.epoch)
    assert packed(quarters[0]) == [False]
    for version in (2, 3):
        assert (await publish(publisher, version, version, min_replicas=2)).bytes == 2 * MATRIX + 6 * NORM
        await serve(halves, version, version)
        await serve(quarters, version, version)
    assert (packed(halves[0]), packed(quarters[0])) == ([True], [False, True])


async def test_replicas_of_the_publishers_own_layout_need_nothing_packed(stack: Stack) -> None:
    replica = stack.replica("a", spec=single_rank(LAYOUT))
    publisher = stack.publisher()
    for version in (1, 2):
        async with await publisher.begin(version, sync_timeout_seconds=20.0, min_replicas=1) as publishing:
            assert publishing.staging.plans == ()
            await asyncio.to_thread(publishing.write, weights(version))
            await publishing.finish()
        await replica.serves(version)


async def test_a_rank_without_anything_to_pack_does_not_keep_the_others_from_it(stack: Stack) -> None:
    stages = SpecLayout(
        Mesh((("stage", 2),)),
        (
            TensorSpec("w", (64, 32), "float32", Placement((), (("stage", 0),))),
            TensorSpec("norm", (32,), "float32", Placement((), (("stage", 1),))),
        ),
    )
    arenas = [PublisherArenas(stack.backend, layout_of_rank(stages, rank)) for rank in range(2)]
    first = BrokerPublisher(stack.channel, "m", arenas[0], layout=stages)
    second = PublisherRank(stack.channel, "m", arenas[1], layout=stages, rank=1)
    halves, tensors = await join(stack, "halves", 2), weights(1)
    other = await second.claim(20.0)
    assert len(other.plans) == 1
    regions = [second.region(other)]
    async with await first.begin(1, sync_timeout_seconds=20.0, min_replicas=1, others=regions) as publishing:
        await asyncio.to_thread(other.write, {"norm": tensors["norm"]})
        await asyncio.to_thread(publishing.write, {"w": tensors["w"]})
        assert (await publishing.finish()).bytes == MATRIX + 2 * NORM
    second.settle(other, committed=True)
    await serve(halves, 1, 1)
    for publisher in (first, second):
        await publisher.close()


async def test_a_claim_that_nobody_settled_is_given_up_by_the_next(stack: Stack) -> None:
    arenas = PublisherArenas(stack.backend, LAYOUT)
    rank = PublisherRank(stack.channel, "m", arenas, layout=single_rank(LAYOUT))
    claims = [await rank.claim(20.0) for _ in range(4)]
    for given_up in claims[:-1]:
        with pytest.raises(LayoutError, match="was written or given up before"):
            given_up.write(weights(1))
    claims[-1].write(weights(1))
    rank.settle(claims[-1], committed=True)
    await rank.claim(20.0)
    assert np.array_equal(np.frombuffer(arenas.view(4)[:MATRIX], np.float32), weights(1)["w"].reshape(-1))
    await rank.close()


async def test_a_layout_that_redis_has_lost_costs_bytes_and_no_version(stack: Stack, valkey_url: str) -> None:
    halves, client = await join(stack, "halves", 2), redis.asyncio.Redis.from_url(valkey_url)
    await client.delete(*[key async for key in client.scan_iter("weights:layout:*")])
    await client.aclose()
    assert (await publish(stack.publisher(), 1, 1, min_replicas=1)).bytes == 2 * (MATRIX + NORM)
    await serve(halves, 1, 1)


async def test_what_does_not_fit_the_room_is_left_unpacked(stack: Stack, caplog: pytest.LogCaptureFixture) -> None:
    halves, publisher = await join(stack, "halves", 2), stack.publisher()
    publisher._rank.arenas.pack_room = MATRIX
    assert (await publish(publisher, 1, 1, min_replicas=1)).bytes == 2 * (MATRIX + NORM)
    await serve(halves, 1, 1)
    assert f"({MATRIX + NORM} bytes): {MATRIX} bytes of room are left" in caplog.text
