"""Requests that ask for weight versions: which replica takes them, how long they are held, what they are told."""

import asyncio
from contextlib import aclosing

import grpc
import pytest

from reflux_inference_gateway.dispatch import Dispatcher
from reflux_inference_gateway.errors import NoReplica, VersionGone
from reflux_inference_gateway.fleet import Fleet
from reflux_inference_gateway.replicas import ReplicaInfo, ReplicaTable
from reflux_inference_gateway.routing.least_loaded import LeastLoaded
from reflux_inference_gateway.want import Want
from reflux_kit.errors import reason_of

from .gateway_harness import FakeEngine, answers, engine_server, gateway, group


def dispatcher(*versions, wait_seconds=0.0):
    made = Dispatcher(table=ReplicaTable(), fleet=Fleet(), new_policy=LeastLoaded, replica_wait_seconds=wait_seconds)
    for number, version in enumerate(versions):
        made.table.register(info(number, version), made.clock())
    return made


def info(number, version):
    return ReplicaInfo(name=f"replicas/{number}", model_id="m", grpc_address=f"a:{number}", version=version)


async def owner(made, **fields):
    async def send(replica, _):
        yield replica.info.name

    want = Want(**({"model_id": "m", "num_tokens": 10, "deadline_seconds": 0.05} | fields))
    async with aclosing(made.stream_group(want, send)) as items:
        return [item async for item in items]


async def test_lag_counts_from_the_newest_version_that_is_heard():
    for max_lag, takers in ((0, {1}), (1, {1}), (2, {1, 2}), (4, {0, 1, 2})):
        made = dispatcher(3, 7, 5)
        found = [await owner(made, max_lag=max_lag) for _ in range(9)]
        assert {name for names in found for name in names} == {f"replicas/{number}" for number in takers}
    made.table.mark_lost("replicas/1")
    assert await owner(made, max_lag=0) == ["replicas/2"]


async def test_a_trajectory_stays_with_its_version_and_hears_when_that_is_gone():
    made = dispatcher(3, 7)
    assert await owner(made, version=3) == ["replicas/0"]
    assert await owner(made, version=7) == ["replicas/1"]
    made.table.heartbeat(info(0, 7), made.clock())
    with pytest.raises(VersionGone, match="past version 3"):
        await owner(made, version=3, deadline_seconds=60.0)
    with pytest.raises(NoReplica, match=r"versions \[7\], asked for exactly 9"):
        await owner(made, version=9)


async def test_while_a_sync_is_under_way_the_request_is_held_up_to_its_deadline():
    made = dispatcher(3, 4)
    call = asyncio.create_task(owner(made, min_version=5, deadline_seconds=60.0))
    done, _ = await asyncio.wait({call}, timeout=0.05)
    assert not done, "the wait for a replica is 0 s here, and does not count during a sync"
    made.table.heartbeat(info(1, 5), made.clock())
    made.changes.notify()
    assert await asyncio.wait_for(call, 10) == ["replicas/1"]
    with pytest.raises(NoReplica, match=r"versions \[3, 5\], asked for at least 6") as caught:
        await owner(made, min_version=6)
    assert caught.value.metadata["state"] == "syncing"


async def test_without_a_sync_nobody_waits_for_a_version_longer_than_for_a_replica():
    with pytest.raises(NoReplica) as caught:
        await owner(dispatcher(4, 4), min_version=5, deadline_seconds=60.0)
    assert caught.value.metadata["state"] == "waiting"


async def test_callers_ask_for_lag_and_version_over_grpc():
    old, new = FakeEngine(), FakeEngine()
    async with gateway() as door, engine_server(old) as first, engine_server(new) as second:
        await door.register("old", version=3, grpc_address=first)
        await door.register("new", version=5, grpc_address=second)
        for number in range(3):
            await answers(door.stub.GenerateGroup(group(f"lag{number}", max_lag=1), timeout=10))
        assert (len(old.requests), len(new.requests)) == (0, 3)
        await answers(door.stub.GenerateGroup(group("pin", version=3), timeout=10))
        assert (len(old.requests), len(new.requests)) == (1, 3)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answers(door.stub.GenerateGroup(group("gone", version=0), timeout=10))
        assert (caught.value.code(), reason_of(caught.value)) == (
            grpc.StatusCode.FAILED_PRECONDITION,
            "VERSION_GONE",
        )
        for fields in ({"version": -1}, {"session": "a b"}):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await answers(door.stub.GenerateGroup(group("bad", **fields), timeout=10))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
