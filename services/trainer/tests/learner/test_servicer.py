"""LearnerService over real gRPC: every primitive, repeated calls, bad input, and what a caller that hangs up leaves."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
import xxhash

from reflux.trainer.v1 import learner_service_pb2 as pb
from reflux.trainer.v1.learner_service_pb2_grpc import LearnerServiceStub, add_LearnerServiceServicer_to_server
from reflux_kit.channel import open_channel
from reflux_kit.errors import reason_of
from reflux_kit.server import Mount, Service, running
from reflux_kit.settings import ServiceSettings
from reflux_model.training import logprobs
from reflux_trainer.learner.core import Learner
from reflux_trainer.learner.host import LearnerHost
from reflux_trainer.learner.publish import Outlet
from reflux_trainer.learner.servicer import SERVICE_NAME, LearnerServicer
from reflux_transfer.client.wire import scope_of
from reflux_transfer.errors import WrongHandle
from reflux_transfer.handles import unseal

from .fake_broker import FakeBroker
from .tiny import tiny_folder, tiny_groups

torch.set_num_threads(1)
MODEL = "run-1"
LOSS = pb.LossConfig(name="ppo", clip_low=0.9, clip_high=5.0, aggregation="token_mean")


@dataclass
class World:
    """A learner, its broker, and a folder with a model."""

    stub: Any
    channel: grpc.aio.Channel
    broker: FakeBroker
    host: LearnerHost
    folder: Path
    store_url: str

    async def create(self, transport: str = "shm", weight_dtype: str = "") -> None:
        request = pb.CreateModelRequest(
            model_id=MODEL, path=str(self.folder), seed=1, transport=transport, weight_dtype=weight_dtype
        )
        await self.stub.CreateModel(request)

    async def step(self, op_id: int) -> pb.OptimStepResponse:
        """ForwardBackward `op_id` and OptimStep `op_id + 1`."""
        await self.stub.ForwardBackward(backward(op_id))
        return await self.stub.OptimStep(optim(op_id + 1))


@asynccontextmanager
async def world(tmp_path: Path, secret: str = "") -> AsyncIterator[World]:
    settings = ServiceSettings(drain_seconds=0)
    broker = FakeBroker()
    async with running(Service((broker.mount(),)), settings) as bound, open_channel(bound.grpc) as channel:
        host = LearnerHost(channel, secret=secret)
        mount = Mount(LearnerServicer(host), add_LearnerServiceServicer_to_server, SERVICE_NAME)
        async with running(Service((mount,)), settings) as served, open_channel(served.grpc) as door:
            folder = tiny_folder(tmp_path / "model")
            yield World(LearnerServiceStub(door), door, broker, host, folder, f"file://{tmp_path}/store")
        broker.gate.set()
        await host.close()


def backward(op_id: int, advantage: float = 1.0) -> pb.ForwardBackwardRequest:
    groups = [
        pb.PromptGroup(
            prompt_token_ids=group.prompt,
            completions=[
                pb.Completion(
                    token_ids=completion.token_ids,
                    behaviour_logprobs=completion.sampler_logprobs,
                    advantage=completion.advantage * advantage,
                )
                for completion in group.completions
            ],
        )
        for group in tiny_groups()
    ]
    return pb.ForwardBackwardRequest(op_id=op_id, model_id=MODEL, groups=groups, loss=LOSS)


def optim(op_id: int) -> pb.OptimStepRequest:
    return pb.OptimStepRequest(
        op_id=op_id, model_id=MODEL, learning_rate=1e-2, beta1=0.9, beta2=0.95, max_grad_norm=1.0
    )


async def refusal(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert reason_of(caught.value), caught.value
    return caught.value


async def test_the_primitives_train_exactly_as_the_core_does(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await w.create()
        for op_id in (1, 3, 5):
            answer = await w.step(op_id)
        assert (answer.version, answer.applied) == (3, True)
        status = await w.stub.GetLearner(pb.GetLearnerRequest())
        assert (status.model_id, status.op_id, status.version) == (MODEL, 6, 3)
        assert w.host.session is not None
        first = w.host.session.learner.flat.clone()
        await w.create()
        for op_id in (1, 3, 5):
            await w.step(op_id)
        assert torch.equal(w.host.session.learner.flat, first)


async def test_a_repeated_operation_has_one_effect_and_a_gap_is_refused(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await w.create()
        answers = await asyncio.gather(*(w.stub.ForwardBackward(backward(1)) for _ in range(3)))
        assert answers[0] == answers[1] == answers[2]
        steps = [await w.stub.OptimStep(optim(2)) for _ in range(2)]
        assert steps[0] == steps[1]
        assert steps[0].version == 1
        error = await refusal(w.stub.OptimStep(optim(4)))
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "send 3 first" in (error.details() or "")


async def test_an_operation_ends_although_its_caller_hung_up(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await w.create()
        call = w.stub.ForwardBackward(backward(1))
        await asyncio.sleep(0)
        call.cancel()
        answer = await w.stub.ForwardBackward(backward(1))
        step = await w.stub.OptimStep(optim(2))
        await w.create()
        assert (await w.stub.ForwardBackward(backward(1))).loss == answer.loss
        assert (await w.stub.OptimStep(optim(2))).grad_norm == step.grad_norm


async def test_a_loss_that_is_not_a_number_refuses_the_step(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await w.create()
        await w.stub.ForwardBackward(backward(1, advantage=float("nan")))
        step = await w.stub.OptimStep(optim(2))
        assert (step.applied, step.version) == (False, 0)
        assert (await w.step(3)).version == 1


async def test_forward_recomputes_log_probs(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await w.create()
        groups = backward(1).groups
        answer = await w.stub.Forward(pb.ForwardRequest(model_id=MODEL, groups=groups))
        expected = Learner.from_folder(w.folder, 1).score(tiny_groups())
        got = [[list(c.behaviour_logprobs) for c in group.completions] for group in answer.groups]
        for got_group, expected_group in zip(got, expected, strict=True):
            for got_row, expected_row in zip(got_group, expected_group, strict=True):
                assert got_row == pytest.approx(expected_row, abs=1e-5)


@pytest.mark.parametrize("transport", ["shm", "ucx"])
async def test_published_weights_arrive_bit_for_bit(tmp_path: Path, transport: str) -> None:
    async with world(tmp_path) as w:
        await w.create(transport)
        await w.step(1)
        request = pb.PublishWeightsRequest(request_id="a", model_id=MODEL, sync_timeout_seconds=20, min_replicas=1)
        answer = await w.stub.PublishWeights(request)
        assert (answer.version, answer.epoch) == (1, 1)
        assert answer.bytes == 4 * sum(tensor.numel() for tensor in w.broker.weights.values())
        assert w.host.session is not None
        for name, tensor in w.host.session.learner.params.items():
            assert torch.equal(w.broker.weights[name], tensor)
        assert await w.stub.PublishWeights(request) == answer
        assert len(w.broker.begun) == 1


async def test_training_goes_on_during_a_publish_and_does_not_touch_it(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await w.create()
        await w.step(1)
        assert w.host.session is not None
        published = {name: tensor.detach().clone() for name, tensor in w.host.session.learner.params.items()}
        w.broker.gate.clear()
        request = pb.PublishWeightsRequest(request_id="a", model_id=MODEL, sync_timeout_seconds=20)
        call = asyncio.ensure_future(w.stub.PublishWeights(request))
        await w.broker.arrived.wait()
        assert (await w.step(3)).version == 2
        w.broker.gate.set()
        assert (await call).version == 1
        assert all(torch.equal(w.broker.weights[name], tensor) for name, tensor in published.items())


async def test_bfloat16_is_rounded_to_nearest_even_and_half_as_long(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await w.create(weight_dtype="bfloat16")
        await w.step(1)
        request = pb.PublishWeightsRequest(request_id="a", model_id=MODEL, sync_timeout_seconds=20)
        answer = await w.stub.PublishWeights(request)
        assert answer.bytes == 2 * sum(tensor.numel() for tensor in w.broker.weights.values())
        assert w.host.session is not None
        rounded = {name: tensor.detach().to(torch.bfloat16) for name, tensor in w.host.session.learner.params.items()}
        assert all(torch.equal(w.broker.weights[name], tensor) for name, tensor in rounded.items())
        assert answer.fingerprint == fingerprint_of(rounded)


def fingerprint_of(params: dict[str, torch.Tensor]) -> int:
    """By its definition: every tensor cut at 4 MiB, the checksums of the parts hashed in their order."""
    data = [bytes(tensor.flatten().view(torch.uint8).numpy()) for tensor in params.values()]
    parts = [part[start : start + (4 << 20)] for part in data for start in range(0, len(part), 4 << 20)]
    return xxhash.xxh3_64_intdigest(b"".join(xxhash.xxh3_64_intdigest(part).to_bytes(8, "little") for part in parts))


async def test_the_learner_scores_the_probe_prompt_under_the_published_weights(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await w.create()
        await w.step(1)
        request = pb.PublishWeightsRequest(request_id="a", model_id=MODEL, probe_token_ids=[3, 4, 5, 6])
        answer = await w.stub.PublishWeights(request)
        assert list(w.broker.begun[0].probe_token_ids) == [3, 4, 5, 6]
        (probe,) = w.broker.probes
        assert (probe.epoch, probe.replica) == (answer.epoch, "")
        assert w.host.session is not None
        with torch.no_grad():
            (expected,) = logprobs(w.broker.weights, w.host.session.learner.config, [[3]], [[[4, 5, 6]]])
        assert list(probe.logprobs) == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.parametrize("ids", [[3], [3, 4_000_000]])
async def test_a_probe_prompt_that_does_not_fit_the_model_is_refused(tmp_path: Path, ids: list[int]) -> None:
    async with world(tmp_path) as w:
        await w.create()
        request = pb.PublishWeightsRequest(request_id="a", model_id=MODEL, probe_token_ids=ids)
        error = await refusal(w.stub.PublishWeights(request))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "probe_token_ids" in (error.details() or "")


async def test_an_aborted_version_is_an_error_with_the_brokers_text(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await w.create()
        w.broker.refuse = "replica engine-1: checksum differs"
        request = pb.PublishWeightsRequest(request_id="a", model_id=MODEL, sync_timeout_seconds=20)
        error = await refusal(w.stub.PublishWeights(request))
        assert error.code() is grpc.StatusCode.ABORTED
        assert "checksum differs" in (error.details() or "")
        w.broker.refuse = ""
        assert (await w.stub.PublishWeights(request)).epoch == 2


async def test_what_is_published_is_signed_with_the_key_of_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    secret, ours = "a secret of the stack", scope_of(MODEL, "a secret of the stack")
    async with world(tmp_path, secret) as w:
        await w.create()
        style = pb.CreateAdapterRequest(model_id=MODEL, adapter="style", rank=2, train_attention=True)
        await w.stub.CreateAdapter(style)
        for adapter in ("", "style"):
            request = pb.PublishWeightsRequest(request_id=f"a{adapter}", model_id=MODEL, adapter=adapter)
            await w.stub.PublishWeights(request)
            handle = w.broker.begun[-1].regions[0].handle
            assert unseal(handle, "shm", scope=ours)["run"] == MODEL
            with pytest.raises(WrongHandle, match="not signed with that run's key"):
                unseal(handle, "shm", scope=scope_of(MODEL, "another secret"))
    assert len(w.broker.begun) == 2
    for hidden in (secret, ours.key.hex(), repr(ours.key)):
        assert hidden not in caplog.text
        assert hidden not in repr(Outlet("shm", secret=secret))


async def test_a_saved_state_continues_where_it_was(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await w.create()
        await w.step(1)
        await w.stub.PublishWeights(pb.PublishWeightsRequest(request_id="a", model_id=MODEL, sync_timeout_seconds=20))
        saved = await w.stub.SaveState(
            pb.SaveStateRequest(model_id=MODEL, store_url=w.store_url, prefix="checkpoints/1")
        )
        assert (saved.op_id, saved.version) == (2, 1)
        assert saved.pause_seconds <= saved.seconds
        expected = await w.step(3)
        loaded = await w.stub.LoadState(
            pb.LoadStateRequest(
                model_id=MODEL, path=str(w.folder), store_url=w.store_url, objects=saved.objects, transport="shm"
            )
        )
        assert (loaded.op_id, loaded.version) == (2, 1)
        assert (await w.stub.GetLearner(pb.GetLearnerRequest())).epoch == 1
        assert (await w.stub.OptimStep(optim(2))).version == 1
        again = await w.step(3)
        assert (again.version, again.grad_norm) == (expected.version, expected.grad_norm)


async def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await w.create()
        saved = await w.stub.SaveState(pb.SaveStateRequest(model_id=MODEL, store_url=w.store_url, prefix="c/1"))
        path = next(path for path in (tmp_path / "store").rglob("*") if path.is_file() and path.stat().st_size > 4096)
        path.chmod(0o600)
        with path.open("r+b") as file:
            file.seek(path.stat().st_size // 2)
            file.write(b"flip")
        request = pb.LoadStateRequest(
            model_id=MODEL, path=str(w.folder), store_url=w.store_url, objects=saved.objects, transport="shm"
        )
        error = await refusal(w.stub.LoadState(request))
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert (await w.stub.GetLearner(pb.GetLearnerRequest())).model_id == MODEL


async def test_missing_things_are_named(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        error = await refusal(w.stub.ForwardBackward(backward(1)))
        assert error.code() is grpc.StatusCode.NOT_FOUND
        assert "no model is; call CreateModel" in (error.details() or "")
        request = pb.CreateModelRequest(model_id=MODEL, path=str(tmp_path / "nowhere"), transport="shm")
        error = await refusal(w.stub.CreateModel(request))
        assert error.code() is grpc.StatusCode.NOT_FOUND
        assert "does not exist" in (error.details() or "")
        await w.create()
        stored = [pb.LoadStateRequest().objects.add(key="c/9/learner-00000.safetensors")]
        loading = pb.LoadStateRequest(
            model_id=MODEL, path=str(w.folder), store_url=w.store_url, objects=stored, transport="shm"
        )
        assert (await refusal(w.stub.LoadState(loading))).code() is grpc.StatusCode.NOT_FOUND


async def test_the_event_loop_answers_during_a_long_backward_pass(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await w.create()
        request = backward(1)
        for _ in range(5):
            request.groups.extend(list(request.groups))
        call = asyncio.ensure_future(w.stub.ForwardBackward(request))
        answers = 0
        while not call.done():
            await w.stub.GetLearner(pb.GetLearnerRequest())
            answers += 1
        assert answers >= 2
        await call


METHODS = [method.name for method in pb.DESCRIPTOR.services_by_name["LearnerService"].methods]


@pytest.mark.parametrize("loaded", [False, True])
async def test_empty_and_random_requests_get_a_proper_status(tmp_path: Path, loaded: bool) -> None:
    noise = random.Random(5)
    async with world(tmp_path) as w:
        if loaded:
            await w.create()
        for method in METHODS:
            call = w.channel.unary_unary(f"/{SERVICE_NAME}/{method}")
            for raw in (b"", noise.randbytes(64), noise.randbytes(200), b"\x12\x05run-1", b"\x0a\x05run-1"):
                sent = call(raw)
                await asyncio.gather(sent, return_exceptions=True)
                assert await sent.code() not in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL), (method, raw)
