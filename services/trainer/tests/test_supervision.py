"""Ends, cancels and resumes of runs at bad moments: the record must say what happened, and nothing starts twice."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from redis.exceptions import ConnectionError as RedisAway
from trainer_world import Run, config, create, events_of, finish, short, until

from reflux.trainer.v1 import trainer_service_pb2 as pb
from reflux_kit.errors import StartupError, reason_of
from reflux_kit.server import running
from reflux_trainer import summary
from reflux_trainer.main import build
from reflux_trainer.queue.keys import RunKeys
from reflux_trainer.store import RunStore


async def started(world, stub, **sections):
    """A run in its first step that no worker goes on with; its end is up to the test."""
    run = await create(stub, config(**({"rl": {"steps": 50}} | sections)))
    await world.announce(stub, short(run))
    await until(stub, run.name, lambda event: event.run.state == Run.STATE_WARMING_UP)
    return run


async def _stopped(run):
    """Returns when no attempt of `run` is under way in this process."""
    async with asyncio.timeout(20):
        while any(task.get_name() == f"run {short(run)}" for task in asyncio.all_tasks()):
            await asyncio.sleep(0.01)


async def test_the_end_of_a_run_waits_for_redis(world, monkeypatch):
    failures = iter(range(3))
    real = RunStore.step

    async def away(self, run):
        if world.scheduler.cancelled.is_set() and next(failures, None) is not None:
            raise RedisAway("down")
        return await real(self, run)

    monkeypatch.setattr(RunStore, "step", away)
    async with world.trainer() as stub:
        run = await started(world, stub)
        world.scheduler.end("the machine is gone")
        async with asyncio.timeout(20):
            while True:
                try:
                    ended = (await stub.GetRun(pb.GetRunRequest(name=run.name))).run
                except grpc.aio.AioRpcError:
                    continue
                if ended.state == Run.STATE_FAILED:
                    break
    assert next(failures, None) is None
    assert "the machine is gone" in ended.message


async def test_a_summary_that_cannot_be_written_does_not_keep_a_run_alive(world, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(summary, "write", full)
    async with world.trainer() as stub:
        run = await create(stub, config())
        ended = (await finish(world, stub, run))[-1].run
        assert ended.state == Run.STATE_SUCCEEDED
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.CancelRun(pb.CancelRunRequest(name=run.name))
        assert reason_of(caught.value) == "WRONG_STATE"


async def test_a_second_cancel_waits_for_the_first_one(world):
    world.scheduler.hold = asyncio.Event()
    async with world.trainer() as stub:
        run = await started(world, stub)
        cancels = [asyncio.ensure_future(stub.CancelRun(pb.CancelRunRequest(name=run.name)))]
        await asyncio.wait_for(world.scheduler.cancelled.wait(), 20)  # the first one closes the run now
        cancels += [asyncio.ensure_future(stub.CancelRun(pb.CancelRunRequest(name=run.name))) for _ in range(2)]
        await asyncio.wait(cancels, timeout=0.3)
        world.scheduler.hold.set()
        states = [(await call).run.state for call in cancels]
    assert states == [Run.STATE_CANCELLED] * 3
    assert (Path(world.folder) / short(run) / "summary.json").is_file()


async def test_two_resumes_at_once_start_one_attempt(world):
    world.learner.publish_failures = 2
    async with world.trainer() as stub:
        run = await create(stub, config())
        assert (await finish(world, stub, run))[-1].run.state == Run.STATE_FAILED
        calls = [stub.ResumeRun(pb.ResumeRunRequest(name=run.name)) for _ in range(2)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert sorted(isinstance(answer, Exception) for answer in answers) == [False, True]
        ended = (await finish(world, stub, run))[-1].run
    assert (ended.state, ended.attempt) == (Run.STATE_SUCCEEDED, 2)


async def test_an_attempt_that_was_superseded_leaves_record_and_processes_alone(world, redis_client):
    async with world.trainer() as stub:
        run = await started(world, stub)
        newer = await RunStore(redis_client).update(short(run), lambda found: replace(found, attempt=7))
        await redis_client.hset(RunKeys(short(run)).cursor, "attempt", 7)
        world.scheduler.end("ends the attempt")
        await _stopped(run)
        assert not world.scheduler.cancelled.is_set()
        assert await RunStore(redis_client).get(short(run)) == newer


async def test_a_second_trainer_on_a_used_port_takes_nothing_over(world):
    async with world.trainer() as stub:
        run = await started(world, stub)
        settings = world.settings(runs_dir=str(world.folder), listen=world.grpc)
        with pytest.raises(StartupError, match="cannot listen"):
            async with build(settings) as service, running(service, settings):
                pass
        found = (await stub.GetRun(pb.GetRunRequest(name=run.name))).run
        assert found.attempt == 1
        await stub.CancelRun(pb.CancelRunRequest(name=run.name))


async def test_a_run_that_gets_nowhere_is_given_up_and_its_processes_are_ended(world, redis_client):
    async with world.trainer() as stub:
        run = await started(world, stub)
    await redis_client.hset(RunKeys(short(run)).cursor, "op_id", 1000)  # as if the first attempt had got far
    for attempt in (2, 3):  # the first restart does not count
        async with world.trainer(max_attempts=2) as stub:
            assert (await stub.GetRun(pb.GetRunRequest(name=run.name))).run.attempt == attempt
    assert not world.scheduler.cancelled.is_set()
    async with world.trainer(max_attempts=2) as stub:
        ended = (await events_of(stub, run.name))[-1].run
    assert ended.state == Run.STATE_FAILED
    assert "gave up after 2 attempts without a new step" in ended.message
    assert world.scheduler.cancelled.is_set()


async def test_a_run_without_an_attempt_is_cancelled_with_its_job(world, redis_client):
    async with world.trainer() as stub:
        run = await started(world, stub)
        await RunStore(redis_client).update(short(run), lambda found: replace(found, attempt=7))
        world.scheduler.end("ends the attempt")
        await _stopped(run)
        assert not world.scheduler.cancelled.is_set()
        ended = (await stub.CancelRun(pb.CancelRunRequest(name=run.name))).run
    assert ended.state == Run.STATE_CANCELLED
    assert world.scheduler.cancelled.is_set()
    assert json.loads(await redis_client.get(RunKeys(short(run)).record))["state"] == "CANCELLED"
