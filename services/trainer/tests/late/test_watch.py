"""Which of a run's ladders are its own, and what happens to the stream when something goes wrong."""

import asyncio
from contextlib import asynccontextmanager

from reflux.sandbox.v1 import ladder_service_pb2 as pb
from reflux.sandbox.v1.verification_pb2 import Verification
from reflux_trainer.late import watch
from reflux_trainer.late.store import LateStore


class Stream:
    """A sandbox that streams `events` behind the token, and nothing more."""

    def __init__(self, *events):
        self.events = events

    async def WatchLadders(self, request):
        place = int(request.resume_token.partition("-")[0])
        for number, event in enumerate(self.events[place:], place + 1):
            event.resume_token = f"{number}-0"
            yield event
        await asyncio.Event().wait()


def settled(group, *ids):
    samples = [
        pb.SettledSample(sample_id=each, reward=float(number), basis=pb.SettledSample.BASIS_FULL)
        for number, each in enumerate(ids)
    ]
    settlement = pb.LadderSettlement(released_on=Verification.FIDELITY_SURROGATE, samples=samples)
    return pb.WatchLaddersResponse(group=group, settlement=settlement)


@asynccontextmanager
async def following(stream, run, store):
    task = asyncio.create_task(watch.follow(stream, run, store, 2))
    try:
        yield
        async with asyncio.timeout(20):
            while await store.token() != f"{len(stream.events)}-0":
                await asyncio.sleep(0.01)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_only_the_workers_own_ladders_of_the_run_give_final_rewards(redis_client, run_id):
    store = LateStore(redis_client, run_id)
    own = [f"{run_id}/12/0", f"{run_id}/12/1"]
    foreign = [
        settled("check/12", *own),
        settled("check/a", *own),
        settled("prompt/", *own),
        settled("prompt/012", *own),
        settled("prompt/" + "1" * 5000, *own),
        settled("prompt/13", *own),
        settled("prompt/12"),
        settled("prompt/12", own[0]),
        settled("prompt/12", *own, f"{run_id}/12/2"),
        settled("prompt/12", *reversed(own)),
        settled("prompt/12", "other/12/0", "other/12/1"),
    ]
    async with following(Stream(*foreign), run_id, store):
        pass
    assert await store.settled() == {}
    async with following(Stream(*foreign, settled("prompt/12", *own)), run_id, store):
        pass
    assert {index: rewards.tolist() for index, rewards in (await store.settled()).items()} == {12: [0.0, 1.0]}


async def test_an_error_that_nobody_expects_is_logged_and_the_stream_goes_on(redis_client, run_id, monkeypatch, caplog):
    class Broken(LateStore):
        failures = 1

        async def settle(self, rewards, token):
            if self.failures:
                self.failures -= 1
                raise ValueError("not a reward")
            await super().settle(rewards, token)

    monkeypatch.setattr(watch, "_REPAIR_SECONDS", 0.0)
    store = Broken(redis_client, run_id)
    async with following(Stream(settled("prompt/3", f"{run_id}/3/0", f"{run_id}/3/1")), run_id, store):
        pass
    assert set(await store.settled()) == {3}
    assert f"late rewards of {run_id} stand still" in caplog.text
    assert "not a reward" in caplog.text
