"""A trainer with all its peers in this process, and the calls that tests make again and again."""

import asyncio
from contextlib import asynccontextmanager
from uuid import uuid4

from trainer_peers import Broker, Checkpoints, Gateway, Learner, Sandbox, Scheduler

from reflux.trainer.v1 import run_pb2
from reflux.trainer.v1 import trainer_service_pb2 as pb
from reflux.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub
from reflux_kit.channel import open_channel
from reflux_kit.server import running
from reflux_runs.load import load_document
from reflux_runs.translate import to_message
from reflux_trainer.main import build
from reflux_trainer.rollout.main import build as build_rollout
from reflux_trainer.rollout.settings import RolloutSettings
from reflux_trainer.settings import TrainerSettings

Run = run_pb2.Run
CONFIG = {
    "name": "tiny",
    "task": {"name": "counting"},
    "model": {"hidden_size": 8, "num_layers": 1, "num_heads": 2, "intermediate_size": 8},
    "warmup": {"steps": 3, "batch_size": 2},
    "rl": {"steps": 4, "groups_per_step": 3, "samples_per_group": 2, "ramp_steps": 1, "no_progress_seconds": 20},
    "evaluation": {
        "prompts": 4,
        "every_steps": 2,
        "intermediate_prompts": 2,
        "surrogate_prompts": 2,
        "full_prompts": 0,
    },
    "checkpoint": {"every_steps": 2},
}


class World:
    """Trainer and peers of one test."""

    def __init__(self, valkey_url, folder):
        self.scheduler, self.gateway, self.sandbox = Scheduler(), Gateway(), Sandbox()
        self.checkpoints, self.broker = Checkpoints(), Broker()
        self.learner = Learner(fleet=self.gateway)
        self.url, self.folder = valkey_url, folder
        self.peers = ""

    def settings(self, kind=TrainerSettings, **extra):
        names = ("scheduler", "gateway", "broker", "sandbox", "checkpoint", "trainer")
        addresses = {f"{name}_address": self.peers for name in names}
        return kind(redis_url=self.url, drain_seconds=0, **addresses, **extra)

    @asynccontextmanager
    async def trainer(self, **extra):
        settings = self.settings(runs_dir=str(self.folder), http_listen="127.0.0.1:0", start_seconds=10, **extra)
        async with (
            build(settings) as service,
            running(service, settings) as bound,
            open_channel(bound.grpc) as channel,
        ):
            self.http, self.grpc = f"http://{bound.http}", bound.grpc
            yield TrainerServiceStub(channel)

    @asynccontextmanager
    async def worker(self, run):
        await asyncio.wait_for(self.scheduler.created.wait(), 20)
        settings = self.settings(
            RolloutSettings, run=run, heartbeat_seconds=0.2, idle_claim_seconds=0.5, peer_seconds=5
        )
        async with build_rollout(settings):
            yield

    async def announce(self, stub, run):
        request = pb.RegisterLearnerRequest(run=run, address=self.peers, incarnation=self.learner.incarnation)
        await stub.RegisterLearner(request)


def config(**sections):
    document = {name: dict(value) if isinstance(value, dict) else value for name, value in CONFIG.items()}
    for section, values in sections.items():
        document[section] = document.get(section, {}) | values if isinstance(values, dict) else values
    return to_message(load_document(document))


async def create(stub, message, **extra):
    request = pb.CreateRunRequest(request_id=str(uuid4()), config=message, **extra)
    return (await stub.CreateRun(request)).run


async def events_of(stub, name, token=""):
    async with asyncio.timeout(40):
        return [event async for event in stub.WatchRun(pb.WatchRunRequest(name=name, resume_token=token))]


async def until(stub, name, done):
    async with asyncio.timeout(30):
        async for event in stub.WatchRun(pb.WatchRunRequest(name=name)):
            if done(event):
                return event
    raise AssertionError("the run ended first")


def short(run):
    return run.name.removeprefix("runs/")


async def finish(world, stub, run):
    """Plays the run's processes until it has ended; returns its events."""
    async with world.worker(short(run)):
        await world.announce(stub, short(run))
        return await events_of(stub, run.name)
