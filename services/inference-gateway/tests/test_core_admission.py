"""Replicas that are full: who waits, who goes next, who is turned away."""

import asyncio
import random
from contextlib import aclosing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reflux_inference_gateway.dispatch import Dispatcher, GivenUp, ReplicaLost
from reflux_inference_gateway.errors import GenerationLost, NoReplica, Overloaded
from reflux_inference_gateway.fleet import Fleet
from reflux_inference_gateway.replicas import ReplicaInfo, ReplicaTable
from reflux_inference_gateway.routing.base import Ask
from reflux_inference_gateway.routing.group_spread import GroupSpread
from reflux_inference_gateway.want import Want

from .gateway_harness import weather


class CheckedTable(ReplicaTable):
    """Nothing is sent to a replica that is full."""

    def dispatched(self, name, num_tokens, num_samples=1):
        assert self.get(name).inflight_samples < self.get(name).info.capacity
        super().dispatched(name, num_tokens, num_samples)


def dispatcher(*capacities, max_held=1000, weights=None):
    made = Dispatcher(
        table=CheckedTable(),
        fleet=Fleet(max_held=max_held),
        new_policy=GroupSpread,
        replica_wait_seconds=0.0,
        full_at_capacities=1.0,
        tenant_weights=weights or {},
    )
    for number, capacity in enumerate(capacities):
        made.table.register(info(number, capacity), made.clock())
    return made


def info(number, capacity, **fields):
    return ReplicaInfo(name=f"replicas/{number}", model_id="m", grpc_address=f"a:{number}", capacity=capacity, **fields)


class Work:
    """Requests that end in the order in which a test lets them."""

    def __init__(self, made):
        self.made, self.order, self.gate = made, [], asyncio.Semaphore(0)

    def start(self, name, **fields):
        return asyncio.create_task(self.run(name, **fields))

    async def run(self, name, **fields):
        async def send(replica, _):
            self.order.append(name)
            await self.gate.acquire()
            yield replica.info.name

        want = Want(**({"model_id": "m", "num_tokens": 10, "deadline_seconds": 60.0} | fields))
        async with aclosing(self.made.stream_group(want, send)) as items:
            return [item async for item in items]

    async def until(self, count):
        while len(self.order) < count:
            await asyncio.sleep(0)


async def turns(count=50):
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_full_replica_gets_nothing_more_and_a_flood_does_not_keep_another_tenant_out():
    work = Work(dispatcher(1))
    tasks = [work.start(f"flood{number}", tenant="flood") for number in range(6)]
    await work.until(1)
    await turns()
    tasks += [work.start(f"calm{number}", tenant="calm") for number in range(2)]
    await turns()
    assert work.order == ["flood0"]
    for done in range(1, 8):
        work.gate.release()
        await work.until(done + 1)
    work.gate.release()
    await asyncio.gather(*tasks)
    assert {work.order.index("calm0"), work.order.index("calm1")} <= {1, 2, 3, 4}
    assert [name for name in work.order if name.startswith("flood")] == [f"flood{number}" for number in range(6)]


async def test_models_of_one_process_have_one_load_and_wait_for_the_same_room():
    made = dispatcher(2, 2)
    for number in range(2):
        other = ReplicaInfo(name=f"replicas/x{number}", model_id="x", grpc_address=f"a:{number}", capacity=2)
        made.table.register(other, made.clock())
    work = Work(made)
    tasks = [work.start("m0", model_id="m"), work.start("x0", model_id="x")]
    await work.until(2)
    assert [entry.inflight_samples for entry in made.table.entries("m")] == [1, 1], "x0 went where m0 was not"
    tasks += [work.start(f"{model}{number}", model_id=model) for number in (1, 2) for model in ("m", "x")]
    await turns()
    assert work.order == ["m0", "x0", "m1", "x1"], "two processes of two samples are full"
    for _ in tasks:
        work.gate.release()
    await asyncio.gather(*tasks)
    assert sorted(work.order) == ["m0", "m1", "m2", "x0", "x1", "x2"], "room that one model leaves is the other's too"
    assert not any(entry.inflight_samples or entry.inflight_tokens for entry in made.table.entries())


async def test_weights_divide_what_tenants_get_and_priority_orders_a_tenants_own():
    work = Work(dispatcher(1, weights={"large": 3.0}))
    tasks = [work.start("first")]
    await work.until(1)
    for _ in range(8):
        tasks += [work.start("small", tenant="small"), work.start("large", tenant="large")]
    tasks.append(work.start("urgent", tenant="small", priority=5))
    await turns()
    for done in range(1, 18):
        work.gate.release()
        await work.until(done + 1)
    work.gate.release()
    await asyncio.gather(*tasks)
    assert work.order[1:9].count("large") == 6
    assert next(name for name in work.order if name in ("small", "urgent")) == "urgent"


async def test_a_deadline_ends_the_wait_for_room_and_an_abort_does():
    work = Work(dispatcher(1))
    first = work.start("first")
    await work.until(1)
    with pytest.raises(NoReplica) as caught:
        await work.run("late", deadline_seconds=0.01)
    assert caught.value.metadata["state"] == "full"
    aborted = asyncio.Event()
    call = work.start("aborted", given_up=aborted.is_set)
    await turns()
    aborted.set()
    work.made.changes.notify()
    with pytest.raises(GivenUp):
        await call
    work.gate.release()
    await first
    assert work.order == ["first"]


async def test_who_is_bound_to_a_full_replica_keeps_nobody_from_another():
    work = Work(dispatcher(1, 1))
    work.made.table.heartbeat(info(1, 1, version=2), work.made.clock())
    bound = [work.start(f"bound{number}", version=2) for number in range(2)]
    await work.until(1)
    await turns()
    free = work.start("free")
    await work.until(2)
    assert work.order == ["bound0", "free"]
    for _ in range(3):
        work.gate.release()
    assert [await task for task in (*bound, free)] == [["replicas/1"], ["replicas/1"], ["replicas/0"]]


async def test_the_flood_itself_is_turned_away_when_the_queue_is_full():
    work = Work(dispatcher(1))
    work.made.waiting_room.max_waiting = 3
    first = work.start("first", tenant="flood")
    await work.until(1)
    flood = [work.start(f"flood{number}", tenant="flood") for number in range(3)]
    await turns()
    calm = work.start("calm", tenant="calm")
    await turns()
    with pytest.raises(Overloaded):
        await flood[2]
    assert not calm.done()
    for done in range(1, 4):
        work.gate.release()
        await work.until(done + 1)
    work.gate.release()
    await asyncio.gather(first, calm, *flood[:2])


async def test_who_is_cancelled_while_its_turn_comes_leaves_no_load_behind():
    work = Work(dispatcher(1))
    first = work.start("first")
    await work.until(1)
    second = work.start("second")
    await turns()
    work.gate.release()
    while not first.done():
        await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    assert work.made.waiting_room.is_empty("m")
    (entry,) = work.made.table.entries()
    assert (entry.inflight_tokens, entry.inflight_samples, entry.inflight_requests) == (0, 0, 0)


@given(st.integers(0, 1 << 32), st.integers(1, 3), st.integers(1, 25))
@settings(max_examples=40, deadline=None)
def test_no_load_is_left_and_nobody_waits_for_ever_whatever_happens(seed, replicas, requests):
    asyncio.run(chaos(random.Random(seed), replicas, requests))


async def chaos(draw, replicas, requests):
    made = dispatcher(*(draw.randint(1, 4) for _ in range(replicas)))
    made.replica_wait_seconds = 20.0
    storm = asyncio.create_task(weather(made, draw))
    tasks = [asyncio.create_task(group(made, draw)) for _ in range(requests)]
    for task in tasks:
        await asyncio.sleep(0)
        if draw.random() < 0.2:
            task.cancel()
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
    storm.cancel()
    assert all(result is None or isinstance(result, GenerationLost | asyncio.CancelledError) for result in results)
    assert made.waiting_room.is_empty("m")
    assert made.fleet.ledger.balanced()
    assert (made.fleet.ledger.held, made.fleet.ledger.running) == (0, 0)
    for entry in made.table.entries():
        assert (entry.inflight_tokens, entry.inflight_samples, entry.inflight_requests) == (0, 0, 0)


async def group(made, draw):
    async def send(replica, share):
        for index in range(share.count):
            for _ in range(draw.randrange(3)):
                await asyncio.sleep(0)
            if draw.random() < 0.03:
                raise ReplicaLost("died")
            made.finished(share, 1, [3])
            yield index

    ask = Ask(num_samples=draw.randint(1, 6), num_prompt_tokens=10, max_tokens=5)
    tenant = draw.choice("abc")
    want = Want(model_id="m", num_tokens=10 + 5 * ask.num_samples, ask=ask, deadline_seconds=20.0, tenant=tenant)
    async with aclosing(made.stream_group(want, send)) as items:
        async for _ in items:
            pass
