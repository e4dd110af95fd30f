"""The learner dies in the middle: its successor gets the same operations, each once, from the log."""

import json
from dataclasses import replace

import pytest
from trainer_peers import Learner, serving

from reflux.checkpoint.v1 import checkpoint_pb2
from reflux.trainer.v1 import learner_service_pb2 as pb
from reflux_kit.settings import ServiceSettings
from reflux_trainer import oplog
from reflux_trainer.learner_client import LearnerClient, LearnerFailed, ModelSource
from reflux_trainer.learners import LearnerEntry, LearnerRegistry
from reflux_trainer.queue.ledger import Cursor, Ledger
from reflux_trainer.watchdog import Waits


def forward(run, op_id):
    group = pb.PromptGroup(prompt_token_ids=[1], completions=[pb.Completion(token_ids=[2], advantage=1.0)])
    return pb.ForwardBackwardRequest(op_id=op_id, model_id=run, groups=[group])


def optim(run, op_id):
    return pb.OptimStepRequest(op_id=op_id, model_id=run, learning_rate=0.1)


class Setup:
    def __init__(self, redis_client, run):
        self.run, self.checkpoint = run, None
        self.registry = LearnerRegistry()
        self.ledger = Ledger(redis_client, run, 1)
        source = ModelSource(run, "/model", 0, "shm")
        self.client = LearnerClient(source, ServiceSettings(), self.registry, self.ledger, Waits(), self.latest)
        self.cursor = Cursor()

    async def latest(self):
        return self.checkpoint

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
    async with serving(first) as address:
        setup.announce(first, address)
        await setup.client.restore(0)
        for _ in range(3):
            await setup.step()
        stored = checkpoint_pb2.StoredObject(key="p/state", checksum=json.dumps([4, 2]))
        setup.checkpoint = checkpoint_pb2.Checkpoint(name="checkpoints/r/2", objects=[stored])
        await setup.ledger.trim(4)
    async with serving(second) as address:
        setup.announce(second, address)
        answer = await setup.step()
    assert second.done == ["load 4", 5, 6, 7, 8]
    assert answer.version == 4


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
