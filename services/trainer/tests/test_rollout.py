"""The worker's protocol: outages are waited for, poison ends in the dead letters, work of the dead is gone on with."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest
from trainer_peers import Gateway, Sandbox, serving

from reflux.inference_gateway.v1.inference_gateway_service_pb2_grpc import InferenceGatewayServiceStub
from reflux.sandbox.v1.sandbox_service_pb2_grpc import SandboxServiceStub
from reflux_kit.channel import open_channel
from reflux_runs.load import load_document
from reflux_trainer.clients.generation import Generator
from reflux_trainer.clients.verification import open_verifications
from reflux_trainer.queue.groups import DeadPrompt, GroupQueue
from reflux_trainer.queue.ledger import Cursor, Ledger
from reflux_trainer.queue.prompts import PromptQueue
from reflux_trainer.queue.records import Prompt
from reflux_trainer.rollout.settings import RolloutSettings
from reflux_trainer.rollout.worker import Worker

CONFIG = load_document({"rl": {"samples_per_group": 2, "groups_per_step": 4}})


class Words:
    end_id = 1

    def answer_text(self, token_ids):
        return " ".join(map(str, token_ids))


class World:
    def __init__(self, redis_client, run):
        self.redis, self.run = redis_client, run
        self.gateway, self.sandbox = Gateway(), Sandbox()
        self.ledger, self.queue = Ledger(redis_client, run, 1), GroupQueue(redis_client, run, 1)

    async def issue(self, *indices):
        await self.queue.issue([Prompt(index, [index], {"n": index}, 0, time.time()) for index in indices])

    @asynccontextmanager
    async def worker(self, name, **extra):
        limits = {"heartbeat_seconds": 0.05, "idle_claim_seconds": 0.2, "peer_seconds": 10.0}
        settings = RolloutSettings(run=self.run, **(limits | extra))
        async with (
            open_channel(self.address) as channel,
            open_verifications(SandboxServiceStub(channel), self.run) as verifications,
        ):
            generator = Generator(InferenceGatewayServiceStub(channel), self.run, max_tokens=4, stop_token_ids=[1])
            queue = PromptQueue(self.redis, self.run, name)
            task = asyncio.create_task(Worker(queue, generator, verifications, Words(), CONFIG, settings).run())
            try:
                yield task
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def arrivals(self, count):
        found = []
        async with asyncio.timeout(20):
            while len(found) < count:
                found += await self.queue.read(200)
        return found


@pytest.fixture
async def world(redis_client, run_id):
    made = World(redis_client, run_id)
    await made.ledger.begin(Cursor())
    async with serving(made.gateway, made.sandbox) as address:
        made.address = address
        yield made


async def test_prompts_become_graded_groups_with_versions_and_times(world):
    async with world.worker("w0"):
        await world.issue(0, 1, 2)
        groups = await world.arrivals(3)
    assert {group.index for group in groups} == {0, 1, 2}
    (group, *_) = groups
    assert [sample.token_ids for sample in group.samples] == [[3, 1], [4, 1]]
    assert [grade.reward for grade in group.grades] == [0.0, 1.0]
    assert group.samples[0].replica == "replicas/r0"
    assert group.emitted_at >= group.claimed_at >= group.issued_at - 1
    assert await world.queue.depths() == (0, 3)


async def test_a_gateway_that_restarts_is_waited_for(world):
    world.gateway.outages = 2
    async with world.worker("w0"):
        await world.issue(0)
        (group,) = await world.arrivals(1)
    assert group.index == 0
    assert world.gateway.requests[(0,)] == 3


async def test_a_gateway_that_stays_away_gives_the_prompt_back_without_counting_it(world):
    world.gateway.outages = 8
    async with world.worker("w0", peer_seconds=0.5):
        await world.issue(0)
        (group,) = await world.arrivals(1)
    assert group.index == 0
    assert await world.ledger.dead_letters() == []


async def test_a_poison_prompt_ends_in_the_dead_letters_and_others_go_on(world):
    world.gateway.poison.add((1,))
    async with world.worker("w0"):
        await world.issue(0, 1, 2)
        arrivals = await world.arrivals(3)
    dead = [arrival.index for arrival in arrivals if isinstance(arrival, DeadPrompt)]
    assert dead == [1]
    ((index, error),) = await world.ledger.dead_letters()
    assert index == 1
    assert "exceeds the context" in error
    assert world.gateway.requests[(1,)] == 3


async def test_a_job_whose_end_was_not_streamed_is_polled(world, monkeypatch):
    monkeypatch.setattr("reflux_trainer.clients.verification._POLL_SECONDS", 0.1)
    world.sandbox.silent = True
    async with world.worker("w0"):
        await world.issue(0)
        assert len(await world.arrivals(1)) == 1


async def test_another_worker_finishes_what_a_dead_one_held(world):
    world.gateway.hold = asyncio.Event()
    async with world.worker("w0") as first:
        await world.issue(0, 1)
        while sum(world.gateway.requests.values()) < 2:
            await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        world.gateway.hold.set()
        async with world.worker("w1"):
            groups = await world.arrivals(2)
    assert {group.worker for group in groups} == {"w1"}
    assert await world.ledger.states() == {0: "emitted", 1: "emitted"}


async def test_samples_of_a_dead_worker_are_graded_not_drawn_again(world):
    world.sandbox.hold = asyncio.Event()
    async with world.worker("w0") as first:
        await world.issue(0)
        while not await world.redis.hlen(f"{{{world.run}}}:samples"):
            await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        world.sandbox.hold.set()
        async with world.worker("w1"):
            (group,) = await world.arrivals(1)
    assert group.worker == "w1"
    assert world.gateway.requests[(0,)] == 1


async def test_a_gateway_that_knows_no_replica_yet_is_waited_for(world):
    world.gateway.unknown = 3
    async with world.worker("w0"):
        await world.issue(0)
        (group,) = await world.arrivals(1)
    assert not isinstance(group, DeadPrompt)
    assert world.gateway.unknown == 0
