"""Whole runs with a reference or a critic of the learner's, on a real learner that dies and comes back with nothing."""

from contextlib import asynccontextmanager

import pytest
import torch
from trainer_world import Run, config, create, events_of, short, until

from reflux.trainer.v1 import learner_service_pb2 as learner_pb
from reflux.trainer.v1 import trainer_service_pb2 as pb
from reflux.trainer.v1.learner_service_pb2_grpc import add_LearnerServiceServicer_to_server
from reflux_kit.channel import open_channel
from reflux_kit.server import Mount, Service, running
from reflux_kit.settings import ServiceSettings
from reflux_model.training import logprobs
from reflux_trainer.learner.adapters import merged_weights
from reflux_trainer.learner.host import LearnerHost
from reflux_trainer.learner.servicer import SERVICE_NAME, LearnerServicer

torch.set_num_threads(1)
RL = {"steps": 7, "learning_rate": 5e-3, "max_lag": 0, "samples_per_group": 4, "no_progress_seconds": 20}
QUIET = {"prompts": 1, "every_steps": 0, "intermediate_prompts": 1, "surrogate_prompts": 0}
FORMS = {
    "loss": ({}, 30.0),
    "adapter": ({"model": {"lora_rank": 2}}, 30.0),
    "reward": ({"rl": {"kl_in": "reward", "algorithm": "reinforce_pp", "loss": "reinforce"}}, 30.0),
}


class Computing(LearnerServicer):
    """A real learner; the gateway gives the same answers always, with the log-probs of the published policy."""

    def __init__(self, host, gateway):
        super().__init__(host)
        self._gateway = gateway

    async def PublishWeights(self, request, context):
        session = self._host.session
        adapter = session.adapters.get(request.merged_adapter)
        weights = merged_weights(session.learner.params, adapter)
        weights = {name: tensor.detach().clone() for name, tensor in weights.items()}

        def scores(prompt, answers):
            return [row.tolist() for row in logprobs(weights, session.learner.config, [prompt], [answers])]

        self._gateway.scores, self._gateway.version = scores, (adapter or session.learner).version
        return learner_pb.PublishWeightsResponse(version=self._gateway.version, epoch=self._gateway.version + 100)


@asynccontextmanager
async def learner(world, stub, run):
    async with open_channel(world.peers) as nowhere:
        host = LearnerHost(nowhere)
        servicer = Computing(host, world.gateway)
        mount = Mount(servicer, add_LearnerServiceServicer_to_server, SERVICE_NAME)
        async with running(Service((mount,)), ServiceSettings(drain_seconds=0)) as bound:
            request = pb.RegisterLearnerRequest(run=run, address=bound.grpc, incarnation=servicer.incarnation)
            await stub.RegisterLearner(request)
            yield
        await host.close()


def reached(event, step):
    return event.progress.stage == "rl" and event.progress.step >= step


async def curve(world, form, coefficient, dies_at=()):
    """Loss, gradient's norm and KL of every step; the learner dies at steps of reinforcement learning."""
    sections, _ = FORMS[form]
    changed = sections | {"rl": sections.get("rl", {}) | {"kl_coefficient": coefficient}}
    steps = await figures(world, changed, dies_at)
    return [(step["loss"], step["grad_norm"], step["kl_reference"]) for step in steps]


async def figures(world, sections, dies_at=()):
    """All figures of every step."""
    world.scheduler.created.clear()
    world.gateway.version = 0
    async with world.trainer() as stub:
        rl = RL | sections.get("rl", {})
        fixed = {"rl": rl, "evaluation": QUIET, "checkpoint": {"every_steps": 4}, "fleet": {"transport": "shm"}}
        asked = config(**(sections | fixed))
        run = await create(stub, asked)
        async with world.worker(short(run)):
            for step in dies_at:
                async with learner(world, stub, short(run)):
                    await until(stub, run.name, lambda event, at=step: reached(event, at))
            async with learner(world, stub, short(run)):
                events = await events_of(stub, run.name)
    assert events[-1].run.state == Run.STATE_SUCCEEDED, events[-1].run.message
    return [{each.name: each.value for each in e.progress.metrics} for e in events if e.progress.stage == "rl"]


@pytest.mark.parametrize("form", ["loss", "reward", pytest.param("adapter", marks=pytest.mark.slow)])
async def test_a_kl_holds_the_policy_at_its_reference_and_survives_the_death_of_the_learner(world, tmp_path, form):
    world.checkpoints.store_url = f"file://{tmp_path}/store"
    free = await curve(world, form, 1e-9)
    held = await curve(world, form, FORMS[form][1])
    # An adapter's reference is the model without it, and warm-up has moved the adapter.
    assert free[0][2] == held[0][2]
    assert (held[0][2] == 0.0) == (form != "adapter")
    assert held[-1][2] < 0.2 * free[-1][2]
    assert await curve(world, form, FORMS[form][1], dies_at=(2, 5)) == held


async def test_a_critic_learns_beside_the_policy_and_survives_the_death_of_the_learner(world, tmp_path):
    world.checkpoints.store_url = f"file://{tmp_path}/store"
    sections = {"rl": {"algorithm": "gae", "critic_learning_rate": 3e-2, "kl_coefficient": 0.01}}
    names = ("loss", "grad_norm", "critic/loss", "critic/explained_variance")
    steps = [[step[name] for name in names] for step in await figures(world, sections)]
    assert len(steps) == RL["steps"]
    assert steps[0][3] == 0.0, "values are 0 before the critic has learned"
    assert len({step[3] for step in steps}) > 3
    again = [[step[name] for name in names] for step in await figures(world, sections, dies_at=(2, 5))]
    assert again == steps
