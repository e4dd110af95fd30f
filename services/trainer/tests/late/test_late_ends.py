"""Ladders of a run end with it, however it ends, and go on when the trainer merely stops."""

import asyncio
from dataclasses import replace

from trainer_world import config, create, events_of, short, until

from reflux.trainer.v1 import trainer_service_pb2 as pb
from reflux.trainer.v1.run_pb2 import Run
from reflux_trainer.queue.keys import RunKeys
from reflux_trainer.store import RunStore


async def started(world, stub):
    """A run on the ladder that no worker goes on with; its end is up to the test."""
    run = await create(stub, config(rl={"release": "surrogate", "verifier": "full"}))
    await world.announce(stub, short(run))
    await until(stub, run.name, lambda event: event.run.state == Run.STATE_WARMING_UP)
    return run


async def test_ladders_of_a_run_that_fails_are_cancelled(late_world):
    async with late_world.trainer() as stub:
        run = await started(late_world, stub)
        late_world.scheduler.end("the machine is gone")
        assert (await events_of(stub, run.name))[-1].run.state == Run.STATE_FAILED
        assert late_world.rungs.cancelled == [short(run)]


async def test_ladders_of_a_run_that_is_cancelled_are_cancelled(late_world):
    async with late_world.trainer() as stub:
        run = await started(late_world, stub)
        await stub.CancelRun(pb.CancelRunRequest(name=run.name))
        assert late_world.rungs.cancelled == [short(run)]


async def test_ladders_of_a_run_without_an_attempt_are_cancelled_with_it(late_world, redis_client):
    async with late_world.trainer() as stub:
        run = await started(late_world, stub)
        await RunStore(redis_client).update(short(run), lambda found: replace(found, attempt=7))
        late_world.scheduler.end("ends the attempt, which a newer one owns")
        async with asyncio.timeout(20):
            while any(task.get_name() == f"run {short(run)}" for task in asyncio.all_tasks()):
                await asyncio.sleep(0.01)
        assert late_world.rungs.cancelled == []
        await stub.CancelRun(pb.CancelRunRequest(name=run.name))
    assert late_world.rungs.cancelled == [short(run)]


async def test_ladders_outlive_a_trainer_that_stops_until_the_run_is_given_up(late_world, redis_client):
    async with late_world.trainer() as stub:
        run = await started(late_world, stub)
    await redis_client.hset(RunKeys(short(run)).cursor, "op_id", 1000)  # as if the first attempt had got far
    async with late_world.trainer(max_attempts=1) as stub:
        assert (await stub.GetRun(pb.GetRunRequest(name=run.name))).run.attempt == 2
    assert late_world.rungs.cancelled == []
    async with late_world.trainer(max_attempts=1) as stub:
        ended = (await events_of(stub, run.name))[-1].run
    assert "gave up after 1 attempts" in ended.message
    assert late_world.rungs.cancelled == [short(run)]


async def test_a_sandbox_that_does_not_answer_does_not_keep_a_run_from_its_end(late_world, monkeypatch):
    monkeypatch.setattr("reflux_trainer.late.rewards._CANCEL_SECONDS", 0.05)
    late_world.rungs.hold = asyncio.Event()
    async with late_world.trainer() as stub:
        run = await started(late_world, stub)
        async with asyncio.timeout(20):
            ended = (await stub.CancelRun(pb.CancelRunRequest(name=run.name))).run
    assert ended.state == Run.STATE_CANCELLED
    assert late_world.rungs.cancelled == []
