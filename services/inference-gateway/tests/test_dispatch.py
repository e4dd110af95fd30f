"""The life of a request against replicas that die, stall and come back at random; no network."""

import asyncio
import random
from contextlib import aclosing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reflux_inference_gateway.dispatch import Dispatcher, GivenUp, ReplicaLost, Want
from reflux_inference_gateway.errors import GenerationLost, NoReplica, Overloaded, UnknownModel
from reflux_inference_gateway.fleet import Fleet
from reflux_inference_gateway.replicas import ReplicaInfo, ReplicaTable
from reflux_inference_gateway.routing.least_loaded import LeastLoaded

from .gateway_harness import weather


def dispatcher(replicas=2, *, max_held=100, wait_seconds=5.0):
    made = Dispatcher(
        table=ReplicaTable(), fleet=Fleet(max_held=max_held), new_policy=LeastLoaded, replica_wait_seconds=wait_seconds
    )
    for number in range(replicas):
        made.table.register(info(number), made.clock())
    return made


def info(number, **fields):
    return ReplicaInfo(name=f"replicas/{number}", model_id="m", grpc_address=f"a:{number}", **fields)


def want(**fields):
    return Want(**({"model_id": "m", "num_tokens": 10, "deadline_seconds": 10.0} | fields))


async def collect(made, one, send):
    async with aclosing(made.stream_group(one, send)) as items:
        return [item async for item in items]


@given(st.integers(0, 1 << 32), st.integers(1, 4), st.integers(1, 30))
@settings(max_examples=40, deadline=None)
def test_nothing_is_lost_or_doubled_whatever_dies_pauses_or_hangs_up(seed, replicas, requests):
    asyncio.run(chaos(random.Random(seed), replicas, requests))


async def chaos(draw, replicas, requests):
    made = dispatcher(replicas)
    delivered: list[list[str]] = [[] for _ in range(requests)]
    storm = asyncio.create_task(weather(made, draw))
    tasks = [asyncio.create_task(relay(made, draw, parts)) for parts in delivered]
    for task in tasks:
        if draw.random() < 0.1:
            await asyncio.sleep(0)
            task.cancel()
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
    storm.cancel()
    ledger = made.fleet.ledger
    assert ledger.balanced()
    assert (ledger.held, ledger.running, ledger.entered) == (0, 0, ledger.completed + ledger.failed + ledger.cancelled)
    assert ledger.completed == results.count(None)
    for parts, result in zip(delivered, results, strict=True):
        if result is None:
            assert [part.rpartition("/")[2] for part in parts] == ["0", "1", "2"]
        else:
            assert isinstance(result, GenerationLost | asyncio.CancelledError)
        assert len({part.rpartition("/")[0] for part in parts}) <= 1  # never two replicas in one answer
    assert all(entry.inflight_tokens == entry.inflight_requests == 0 for entry in made.table.entries())


async def relay(made, draw, parts):
    """One client whose replicas answer three parts, slowly, and die now and then."""

    async def send(replica, _):
        for part in range(3):
            for _ in range(draw.randrange(4)):
                await asyncio.sleep(0)
            if draw.random() < 0.15:
                raise ReplicaLost("died")
            yield f"{replica.info.name}/{part}"

    async def attempt(replica, share):
        async for part in send(replica, share):
            share.attempts.delivered = True
            parts.append(part)
        return True

    if draw.random() < 0.5:
        await made.serve(want(), attempt)
        return
    async with aclosing(made.stream_group(want(), send)) as items:
        async for item in items:
            parts.append(item)


async def answer(replica, _):
    yield replica.info.name


async def test_time_in_a_pause_does_not_count_as_waiting_for_a_replica():
    made = dispatcher(wait_seconds=0.05)
    made.fleet.pause()
    call = asyncio.create_task(collect(made, want(), answer))
    done, _ = await asyncio.wait({call}, timeout=0.2)
    assert not done
    made.fleet.resume()
    made.changes.notify()
    assert await asyncio.wait_for(call, 5) == ["replicas/0"]


async def test_deadline_ends_the_wait_even_in_a_pause():
    made = dispatcher()
    made.fleet.pause("m")
    with pytest.raises(NoReplica, match="paused"):
        await collect(made, want(deadline_seconds=0.02), answer)
    assert made.fleet.ledger.failed == 1


async def test_unknown_model_and_full_queue_are_told_apart():
    made = dispatcher(wait_seconds=0, max_held=1)
    with pytest.raises(UnknownModel):
        await collect(made, want(model_id="other"), answer)
    made.fleet.pause()
    first = asyncio.create_task(collect(made, want(), answer))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await collect(made, want(), answer)
    made.fleet.resume()
    made.changes.notify()
    assert await first == ["replicas/0"]


async def test_whoever_waits_in_vain_is_told_what_is_wrong_with_the_replicas():
    made = dispatcher(1, wait_seconds=0.05)
    made.table.heartbeat(info(0, fault="its weights are a mixture"), made.clock())
    with pytest.raises(NoReplica, match="unhealthy replicas/0: its weights are a mixture"):
        await collect(made, want(), answer)


async def test_a_model_whose_replicas_are_gone_is_unavailable_not_unknown():
    made = dispatcher(1, wait_seconds=0)
    made.table.remove("replicas/0")
    with pytest.raises(NoReplica, match="there now"):
        await collect(made, want(), answer)


async def test_a_fresh_gateway_calls_no_model_unknown_until_replicas_had_time_to_register():
    made = dispatcher(0, wait_seconds=0.05)
    with pytest.raises(NoReplica, match="there now"):
        await collect(made, want(), answer)
    with pytest.raises(UnknownModel):
        await collect(made, want(), answer)


async def test_abort_while_held_leaves_as_cancelled():
    made = dispatcher()
    made.fleet.pause()
    aborted = asyncio.Event()
    call = asyncio.create_task(collect(made, want(given_up=aborted.is_set), answer))
    await asyncio.sleep(0)
    aborted.set()
    made.changes.notify()
    with pytest.raises(GivenUp):
        await call
    assert (made.fleet.ledger.cancelled, made.fleet.ledger.held) == (1, 0)


async def test_replica_that_came_back_takes_its_request_again_when_it_is_the_only_one():
    made = dispatcher(1)
    lives = iter([False, True])

    async def send(replica, _):
        if not next(lives):
            raise ReplicaLost("blinked")
        yield "done"

    call = asyncio.create_task(collect(made, want(), send))
    await asyncio.sleep(0)
    assert not call.done()
    assert (made.fleet.ledger.held, made.fleet.ledger.running) == (1, 0)
    made.table.heartbeat(info(0), made.clock())
    made.changes.notify()
    assert await asyncio.wait_for(call, 5) == ["done"]


async def test_abandoned_replica_loses_its_waits_only():
    made = dispatcher(2)
    stuck = asyncio.Event()

    async def send(replica, _):
        if replica.info.name == "replicas/0":
            stuck.set()
            await asyncio.sleep(60)
        yield replica.info.name

    call = asyncio.create_task(collect(made, want(), send))
    await stuck.wait()
    made.abandon("replicas/1")
    made.abandon("replicas/0")
    assert await asyncio.wait_for(call, 5) == ["replicas/1"]
