"""A model over two ranks: the steps of one rank, its shards published and saved as they lie, and a rank that dies."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import torch

from reflux.trainer.v1 import learner_service_pb2 as pb
from reflux.trainer.v1.learner_service_pb2_grpc import LearnerServiceStub, add_LearnerServiceServicer_to_server
from reflux_kit.channel import open_channel
from reflux_kit.server import Mount, Service, running
from reflux_kit.settings import ServiceSettings
from reflux_trainer.learner.core import Learner
from reflux_trainer.learner.host import LearnerHost
from reflux_trainer.learner.ops import GroupData, LossSpec, StepSpec
from reflux_trainer.learner.ranks.backend import ManyRanks
from reflux_trainer.learner.ranks.setup import RankSetup
from reflux_trainer.learner.servicer import SERVICE_NAME, LearnerServicer

from .fake_broker import FakeBroker
from .test_servicer import MODEL, World, backward, optim, refusal
from .tiny import tiny_folder, tiny_groups

torch.set_num_threads(1)
LOSS = LossSpec(name="ppo", clip_low=0.9, clip_high=5.0)
STEP = StepSpec(learning_rate=1e-2, max_grad_norm=1.0)
_PATIENCE = 150.0
"""Hang guard; seconds on an idle machine."""


class Sharded:
    """A served learner of two ranks, and what it said of a lost one."""

    def __init__(self, world: World, backend: ManyRanks) -> None:
        self.world, self.backend = world, backend
        self.losses: list[str] = []


@asynccontextmanager
async def sharded(tmp_path: Path) -> AsyncIterator[Sharded]:
    settings, broker, losses = ServiceSettings(drain_seconds=0), FakeBroker(), []
    async with running(Service((broker.mount(),)), settings) as bound, open_channel(bound.grpc) as channel:
        backend = ManyRanks(RankSetup(2, bound.grpc, timeout_seconds=_PATIENCE), losses.append)
        host = LearnerHost(channel, backend=backend)
        mount = Mount(LearnerServicer(host), add_LearnerServiceServicer_to_server, SERVICE_NAME)
        async with running(Service((mount,)), settings) as served, open_channel(served.grpc) as door:
            folder = tiny_folder(tmp_path / "model")
            served_world = World(LearnerServiceStub(door), door, broker, host, folder, f"file://{tmp_path}/store")
            found = Sharded(served_world, backend)
            found.losses = losses
            yield found
        await host.close()


async def created(w: World) -> None:
    """Starts the ranks: two processes import torch's compiler first."""
    request = pb.CreateModelRequest(model_id=MODEL, path=str(w.folder), seed=1, transport="shm")
    await w.stub.CreateModel(request, timeout=_PATIENCE)


def unmasked(folder: Path, steps: int) -> Learner:
    """One rank's learner after the same steps; requests carry no masks."""
    learner = Learner.from_folder(folder, 1)
    for _ in range(steps):
        learner.forward_backward(whole_groups(), LOSS)
        learner.optim_step(STEP)
    return learner


def whole_groups() -> list[GroupData]:
    """The groups without masks."""
    return [
        replace(group, completions=[replace(each, mask=()) for each in group.completions]) for group in tiny_groups()
    ]


async def test_two_ranks_train_publish_and_resume_as_one_does(tmp_path: Path) -> None:
    async with sharded(tmp_path) as s:
        w = s.world
        await created(w)
        for op_id in (1, 3):
            batch = backward(op_id)
            batch.micro_batch_completions = 1 + op_id  # another number of parts, even and odd
            await w.stub.ForwardBackward(batch)
            step = await w.stub.OptimStep(optim(op_id + 1))
        assert step.version == 2
        alone = unmasked(w.folder, 2)
        await w.stub.PublishWeights(pb.PublishWeightsRequest(request_id="a", model_id=MODEL, sync_timeout_seconds=20))
        for name, tensor in alone.params.items():
            torch.testing.assert_close(w.broker.weights[name], tensor.detach(), atol=1e-5, rtol=0)
        scored = await w.stub.Forward(pb.ForwardRequest(model_id=MODEL, groups=backward(1).groups))
        rows = [list(c.behaviour_logprobs) for group in scored.groups for c in group.completions]
        for row, expected in zip(rows, (row for group in alone.score(tiny_groups()) for row in group), strict=True):
            assert row == pytest.approx(expected, abs=1e-4)
        await resumed(s, w, alone)


def held(op_id: int) -> pb.ForwardBackwardRequest:
    """A batch with a KL to the reference that its first one keeps."""
    batch = backward(op_id)
    batch.loss.kl_coefficient, batch.loss.own_reference = 0.5, True
    return batch


async def held_step(w: World) -> tuple[float, float, float]:
    """Ends the step of operation 5 and makes the next one: gradient's norms and the KL in between."""
    first = await w.stub.OptimStep(optim(6))
    distance = (await w.stub.ForwardBackward(held(7))).kl_reference
    return first.grad_norm, distance, (await w.stub.OptimStep(optim(8))).grad_norm


def held_alone(alone: Learner) -> tuple[float, float, float]:
    """The same on one rank."""
    loss, groups = replace(LOSS, kl_coefficient=0.5, own_reference=True), whole_groups()
    alone.forward_backward(groups, loss)
    first = alone.optim_step(STEP)
    distance = alone.forward_backward(groups, loss).kl_reference
    return first.grad_norm, distance, alone.optim_step(STEP).grad_norm


async def resumed(s: Sharded, w: World, alone: Learner) -> None:
    """Saves in the middle of a step, goes on, loads, goes on again: bit for bit the same, the reference too."""
    present = (await w.stub.Forward(pb.ForwardRequest(model_id=MODEL, groups=backward(1).groups))).groups
    asked = pb.ForwardRequest(model_id=MODEL, groups=backward(1).groups, reference=True)
    assert (await w.stub.ForwardBackward(held(5))).kl_reference == pytest.approx(0.0, abs=1e-9)
    save = pb.SaveStateRequest(model_id=MODEL, store_url=w.store_url, prefix="c/1")
    saved = await w.stub.SaveState(save)
    assert [each.key for each in saved.objects] == [f"c/1/learner-0000{rank}.safetensors" for rank in (0, 1)]
    figures = await held_step(w)
    assert figures == pytest.approx(held_alone(alone), abs=1e-5)
    assert figures[1] > 1e-5
    assert (await w.stub.Forward(asked)).groups == present
    load = pb.LoadStateRequest(
        model_id=MODEL, path=str(w.folder), store_url=w.store_url, objects=saved.objects, transport="shm"
    )
    assert (await w.stub.LoadState(load, timeout=_PATIENCE)).version == 2
    assert await held_step(w) == figures
    assert (await w.stub.Forward(asked)).groups == present
    await w.stub.ForwardBackward(backward(9, advantage=float("nan")))
    assert not (await w.stub.OptimStep(optim(10))).applied
    adapter = pb.CreateAdapterRequest(model_id=MODEL, adapter="a", rank=2, train_mlp=True)
    assert "REFLUX_LEARNER_RANKS" in ((await refusal(w.stub.CreateAdapter(adapter))).details() or "")
    await killed(s, w)


async def killed(s: Sharded, w: World) -> None:
    """A rank that dies is named by the call that needs it and told to the process, within seconds."""
    (pid,) = s.backend.group.pids
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(_PATIENCE):
        error = await refusal(w.stub.ForwardBackward(backward(11)))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert f"rank 1 (pid {pid}) ended with status -9" in (error.details() or "")
        while not s.losses:
            await asyncio.sleep(0.05)
    assert "rank 1" in s.losses[0]
