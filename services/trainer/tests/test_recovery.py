"""The learner dies in the middle: its successor gets the same operations, each once, from the log."""

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest
from trainer_peers import Learner, serving

from reflux.checkpoint.v1 import checkpoint_pb2
from reflux.trainer.v1 import learner_service_pb2 as pb
from reflux.weight_broker.v1 import weight_broker_service_pb2 as broker_pb
from reflux_kit.settings import ServiceSettings
from reflux_trainer import oplog
from reflux_trainer.learner_client import LearnerClient, LearnerFailed
from reflux_trainer.learners import LearnerEntry, LearnerRegistry
from reflux_trainer.model_source import ModelSource
from reflux_trainer.publish import Publisher
from reflux_trainer.queue.ledger import Cursor, Ledger
from reflux_trainer.watchdog import Waits


def forward(run, op_id):
    group = pb.PromptGroup(prompt_token_ids=[1], completions=[pb.Completion(token_ids=[2], advantage=1.0)])
    return pb.ForwardBackwardRequest(op_id=op_id, model_id=run, groups=[group])


def optim(run, op_id):
    return pb.OptimStepRequest(op_id=op_id, model_id=run, learning_rate=0.1)


class Setup:
    def __init__(self, redis_client, run, **source):
        self.run, self.checkpoint = run, None
        self.registry = LearnerRegistry()
        self.ledger = Ledger(redis_client, run, 1)
        source = ModelSource(run, "/model", 0, "shm", **source)
        self.waits, self.older, self.scrubbed = Waits(), None, []
        self.client = LearnerClient(
            source, ServiceSettings(), self.registry, self.ledger, self.waits, self.latest, self.scrub
        )
        self.cursor = Cursor()

    async def latest(self):
        return self.checkpoint

    async def scrub(self, name):
        self.scrubbed.append(name)
        self.checkpoint = self.older
        return True

    def announce(self, learner, address):
        self.registry.announce(self.run, LearnerEntry(address, learner.incarnation))

    async def log(self):
        op_id = self.cursor.op_id
        requests = forward(self.run, op_id + 1), optim(self.run, op_id + 2)
        after = replace(self.cursor, warmup_step=self.cursor.warmup_step + 1)
        self.cursor = await self.ledger.log_step(after, [oplog.encode(each) for each in requests], [])
        return requests

    async def step(self):
        first, second = await self.log()
        await self.client.forward_backward(first)
        return await self.client.optim_step(second)

    @asynccontextmanager
    async def working(self, learner, steps=3):
        """The learner serves, and the run has made so many steps on it."""
        async with serving(learner) as address:
            self.announce(learner, address)
            await self.client.restore(0)
            for _ in range(steps):
                await self.step()
            yield

    async def step_on(self, learner):
        """The next step, on another learner."""
        async with serving(learner) as address:
            self.announce(learner, address)
            return await self.step()


@pytest.fixture
async def setup(redis_client, run_id):
    made = Setup(redis_client, run_id)
    await made.ledger.begin(Cursor())
    yield made
    await made.client.close()


async def test_a_new_learner_is_created_and_gets_all_operations_again(setup):
    first, second = Learner("a"), Learner("b")
    async with serving(first) as address:
        setup.announce(first, address)
        await setup.client.restore(0)
        await setup.step()
        await setup.step()
        request, following = await setup.log()
        await setup.client.forward_backward(request)
    async with serving(second) as address:
        setup.announce(second, address)
        answer = await setup.client.optim_step(following)
    assert first.done == ["create", 1, 2, 3, 4, 5]
    assert second.done == ["create", 1, 2, 3, 4, 5, 6]
    assert answer.version == 3
    assert setup.client.recoveries == 1


async def test_a_checkpoint_is_loaded_and_only_later_operations_are_replayed(setup):
    first, second = Learner("a"), Learner("b")
    async with setup.working(first):
        setup.checkpoint = stored(4, 2)
        await setup.ledger.trim(4)
    answer = await setup.step_on(second)
    assert second.done == ["load 4", 5, 6, 7, 8]
    assert answer.version == 4


def stored(op_id, version, run="r"):
    kept = checkpoint_pb2.StoredObject(key="p/state", checksum=json.dumps([op_id, version]))
    return checkpoint_pb2.Checkpoint(name=f"checkpoints/{run}/{version}", objects=[kept])


async def test_a_damaged_checkpoint_is_read_back_and_the_one_before_it_is_taken(setup):
    first, second = Learner("a"), Learner("b")
    async with setup.working(first):
        setup.checkpoint, setup.older = stored(4, 2), stored(2, 1)
        second.damaged = {"[4, 2]"}
        await setup.ledger.trim(2)
    answer = await setup.step_on(second)
    assert setup.scrubbed == ["checkpoints/r/2"]
    assert second.done == ["load 2", 3, 4, 5, 6, 7, 8]
    assert answer.version == 4


@pytest.mark.parametrize("checkpointed", [False, True])
async def test_a_new_learner_gets_the_adapter_and_its_later_operations(redis_client, run_id, checkpointed):
    setup = Setup(redis_client, run_id, lora_rank=4, lora_targets=frozenset(("mlp",)))
    await setup.ledger.begin(Cursor())
    first, second = Learner("a"), Learner("b")
    async with setup.working(first):
        if checkpointed:
            setup.checkpoint = stored(4, 2)
    answer = await setup.step_on(second)
    assert first.done == ["create", "adapter of rank 4", 1, 2, 3, 4, 5, 6]
    made = ["create", "load 4"] if checkpointed else ["create", "adapter of rank 4", 1, 2, 3, 4]
    assert second.done == [*made, 5, 6, 7, 8]
    assert (answer.version, setup.client.version) == (4, 4)
    await setup.client.close()


async def test_each_replayed_operation_is_progress(setup):
    first, second = Learner("a"), Learner("b")
    async with setup.working(first):
        pass
    moves = []
    setup.waits.progress = lambda: moves.append(1)
    async with serving(second) as address:
        setup.announce(second, address)
        await setup.client.restore(6)
    assert len(moves) == 6 + 1  # and the end of the wait


async def test_a_restore_never_moves_the_acknowledged_operation_back(setup):
    learner = Learner("a")
    async with serving(learner) as address:
        setup.announce(learner, address)
        await setup.client.restore(0)
        await setup.step()
        await setup.client.restore(1)
    assert setup.client.op_id == 2


async def test_a_publish_that_may_still_run_is_joined_and_a_failed_one_begins_anew(setup):
    learner = Learner("a")
    async with serving(learner) as address, asyncio.TaskGroup() as tasks:
        setup.announce(learner, address)
        await setup.client.restore(0)
        for failure, joins in ((grpc.StatusCode.DEADLINE_EXCEEDED, True), (grpc.StatusCode.ABORTED, False)):
            learner.publish_codes, learner.publish_ids = [failure], []
            publisher = Publisher(setup.client, no_broker(), tasks, setup.waits, setup.run, 5.0)
            publisher.start(nothing)
            await publisher.settled()
            first, second = learner.publish_ids
            assert (first == second) == joins
    assert learner.publish_seconds > 2 * 5.0 + 8.0  # both phases of a sync, and some more


async def nothing(_version):
    pass


def no_broker():
    class Broker:
        async def ListReplicas(self, request, timeout):
            return broker_pb.ListReplicasResponse()

    return Broker()


async def test_a_restarted_trainer_sends_only_what_the_living_learner_lacks(setup, redis_client):
    learner = Learner("a")
    async with serving(learner) as address:
        setup.announce(learner, address)
        await setup.client.restore(0)
        await setup.step()
        await setup.log()  # logged, then the trainer dies before it calls
        again = Setup(redis_client, setup.run)
        again.registry = setup.registry
        again.client._registry = setup.registry
        cursor = await again.ledger.cursor()
        await again.client.restore(cursor.op_id)
        assert (again.client.version, cursor.warmup_step) == (2, 2)
        await again.client.close()
    assert learner.done == ["create", 1, 2, 3, 4]


async def test_a_refusal_of_a_living_learner_is_an_error_with_its_text(setup):
    learner = Learner("a")
    async with serving(learner) as address:
        setup.announce(learner, address)
        await setup.client.restore(0)
        with pytest.raises(LearnerFailed, match="operation 7 after 0"):
            await setup.client.forward_backward(forward(setup.run, 7))


def test_operations_survive_the_log():
    for operation in (forward("r", 3), optim("r", 4)):
        assert oplog.decode(oplog.encode(operation)) == operation
