"""LoRA adapters over real gRPC: operations that are repeated, pipelined and side by side; states; merged publishes."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from reflux.trainer.v1 import learner_service_pb2 as pb
from reflux_model.creation import create_folder
from reflux_model.lora import merged
from reflux_model.training import logprobs
from reflux_trainer.learner.adapter_host import AdapterHost
from reflux_trainer.learner.core import AdapterJob, Learner
from reflux_trainer.learner.ops import BatchFigures, CompletionData, GroupData, LossSpec

from .test_servicer import MODEL, World, refusal, world
from .tiny import CONFIG

torch.set_num_threads(1)
SUM = pb.LossConfig(name="cross_entropy", aggregation="sum")


def untied(w: World) -> None:
    create_folder(w.folder, replace(CONFIG, tie_embeddings=False), 0)


async def adapter(w: World, name: str = "a", **fields: Any) -> None:
    request = pb.CreateAdapterRequest(
        model_id=MODEL, adapter=name, rank=4, train_attention=True, train_mlp=True, seed=7
    )
    for field, value in fields.items():
        setattr(request, field, value)
    await w.stub.CreateAdapter(request)


def datums() -> list[pb.Datum]:
    weights = pb.FloatArray(name="weights", values=[0.0, 1.0, 2.0])
    return [
        pb.Datum(token_ids=[3, 4, 5], target_token_ids=[4, 5, 6], arrays=[weights]),
        pb.Datum(token_ids=[7, 8], target_token_ids=[8, 9]),
    ]


def backward(op_id: int, name: str = "a") -> pb.ForwardBackwardRequest:
    return pb.ForwardBackwardRequest(op_id=op_id, model_id=MODEL, adapter=name, datums=datums(), loss=SUM)


def optim(op_id: int, name: str = "a") -> pb.OptimStepRequest:
    return pb.OptimStepRequest(
        op_id=op_id, model_id=MODEL, adapter=name, learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-12
    )


async def scores(w: World, name: str) -> list[list[float]]:
    answer = await w.stub.Forward(pb.ForwardRequest(model_id=MODEL, adapter=name, datums=datums()))
    return [list(output.logprobs) for output in answer.outputs]


async def test_datums_get_their_own_log_probs_and_a_weighted_sum(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await w.create()
        await adapter(w)
        answer = await w.stub.ForwardBackward(backward(1))
        params = {name: tensor.detach() for name, tensor in Learner.from_folder(w.folder, 1).params.items()}
        first = [float(logprobs(params, CONFIG, [[3, 4, 5][: n + 1]], [[[4 + n]]])[0]) for n in range(3)]
        second = [float(logprobs(params, CONFIG, [[7, 8][: n + 1]], [[[8 + n]]])[0]) for n in range(2)]
        assert list(answer.outputs[0].logprobs) == pytest.approx(first, abs=1e-5)
        assert list(answer.outputs[1].logprobs) == pytest.approx(second, abs=1e-5)
        assert answer.loss == pytest.approx(-(first[1] + 2 * first[2] + sum(second)), abs=1e-4)
        looked = await w.stub.Forward(pb.ForwardRequest(model_id=MODEL, adapter="a", datums=datums(), loss=SUM))
        assert looked.loss == pytest.approx(answer.loss, abs=1e-5)


async def test_operations_of_an_adapter_are_counted_apart_and_done_once(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await w.create()
        await adapter(w)
        await adapter(w, "b")
        await w.step(1)
        answers = await asyncio.gather(*(w.stub.ForwardBackward(backward(1)) for _ in range(3)))
        assert answers[0] == answers[1] == answers[2]
        steps = [await w.stub.OptimStep(optim(2)) for _ in range(2)]
        assert steps[0] == steps[1]
        assert (await refusal(w.stub.OptimStep(optim(4)))).code() is grpc.StatusCode.FAILED_PRECONDITION
        status = await w.stub.GetLearner(pb.GetLearnerRequest())
        assert (status.op_id, status.version) == (2, 1)
        assert {each.name: (each.op_id, each.version) for each in status.adapters} == {"a": (2, 1), "b": (0, 0)}


async def test_passes_of_several_adapters_at_once_end_as_if_each_were_alone(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await w.create()
        names = ["a", "b", "c"]
        for name in names:
            await adapter(w, name)
        for op_id in (1, 3):
            await asyncio.gather(*(w.stub.ForwardBackward(backward(op_id, name)) for name in names))
            steps = await asyncio.gather(*(w.stub.OptimStep(optim(op_id + 1, name)) for name in names))
        assert [step.version for step in steps] == [2, 2, 2]
        together = [await scores(w, name) for name in names]
        await adapter(w, "a")
        for op_id in (1, 3):
            await w.stub.ForwardBackward(backward(op_id))
            await w.stub.OptimStep(optim(op_id + 1))
        alone = await scores(w, "a")
        for each in together:
            for row, expected in zip(each, alone, strict=True):
                assert row == pytest.approx(expected, abs=1e-5)


async def test_a_loaded_state_is_an_operation_and_works_under_another_name(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await w.create()
        await adapter(w)
        await w.stub.ForwardBackward(backward(1))
        await w.stub.OptimStep(optim(2))
        save = pb.SaveStateRequest(model_id=MODEL, store_url=w.store_url, prefix="s/1", adapter="a")
        saved = await w.stub.SaveState(save)
        assert (saved.op_id, saved.version) == (2, 1)
        expected = await scores(w, "a")
        await w.stub.ForwardBackward(backward(3))
        continued = await w.stub.OptimStep(optim(4))

        def load(name: str, op_id: int, weights_only: bool = False) -> Any:
            return w.stub.LoadState(
                pb.LoadStateRequest(
                    model_id=MODEL,
                    adapter=name,
                    store_url=w.store_url,
                    objects=saved.objects,
                    op_id=op_id,
                    weights_only=weights_only,
                )
            )

        assert (await load("new", 0)).op_id == 2
        assert (await w.stub.OptimStep(optim(2, "new"))).version == 1  # the saved answer
        await w.stub.ForwardBackward(backward(3, "new"))
        assert (await w.stub.OptimStep(optim(4, "new"))).grad_norm == continued.grad_norm
        assert await scores(w, "new") == await scores(w, "a")
        for _ in range(2):
            assert ((await load("a", 5, weights_only=True)).op_id, await scores(w, "a")) == (5, expected)
        await w.stub.ForwardBackward(backward(6))
        for op_id in (5, 6, 9):
            assert (await refusal(load("a", op_id))).code() is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize("stored", [False, True])
async def test_merged_weights_are_published_as_another_model(tmp_path: Path, stored: bool) -> None:
    async with world(tmp_path) as w:
        untied(w)
        await w.create()
        await adapter(w, train_unembed=True)
        await w.stub.ForwardBackward(backward(1))
        await w.stub.OptimStep(optim(2))
        assert w.host.session is not None
        learned = w.host.session.adapters["a"]
        expected = merged(w.host.session.learner.params, learned.params, learned.spec)
        request = pb.PublishWeightsRequest(request_id="x", model_id=MODEL, publish_as=f"{MODEL}/adapters/s1", version=3)
        if stored:
            save = pb.SaveStateRequest(
                model_id=MODEL, store_url=w.store_url, prefix="s/1", adapter="a", weights_only=True
            )
            request.merged_objects.extend((await w.stub.SaveState(save)).objects)
            request.store_url = w.store_url
            await w.stub.DropAdapter(pb.DropAdapterRequest(model_id=MODEL, adapter="a"))
        else:
            request.merged_adapter = "a"
        answer = await w.stub.PublishWeights(request)
        assert (answer.version, w.broker.begun[-1].model_id) == (3, f"{MODEL}/adapters/s1")
        assert all(torch.equal(w.broker.weights[name], tensor) for name, tensor in expected.items())
        plain = pb.PublishWeightsRequest(request_id="y", model_id=MODEL, publish_as=f"{MODEL}/adapters/s2", version=1)
        await w.stub.PublishWeights(plain)
        base = w.host.session.learner.params
        assert all(torch.equal(w.broker.weights[name], tensor) for name, tensor in base.items())


async def test_the_models_own_replicas_get_its_weights_with_an_adapter_as_that_ones_version(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await w.create()
        await adapter(w)
        for op_id in (1, 3):
            await w.stub.ForwardBackward(backward(op_id))
            await w.stub.OptimStep(optim(op_id + 1))
        assert w.host.session is not None
        learned = w.host.session.adapters["a"]
        expected = merged(w.host.session.learner.params, learned.params, learned.spec)
        probe = [3, 4, 5]
        request = pb.PublishWeightsRequest(
            request_id="x", model_id=MODEL, merged_adapter="a", probe_token_ids=probe, sync_timeout_seconds=30
        )
        answer = await w.stub.PublishWeights(request)
        assert (answer.version, w.broker.begun[-1].model_id) == (2, MODEL)
        assert all(torch.equal(w.broker.weights[name], tensor) for name, tensor in expected.items())
        alone = logprobs(expected, CONFIG, [probe[:1]], [[probe[1:]]])[0]
        assert list(w.broker.probes[-1].logprobs) == pytest.approx(alone.tolist(), abs=1e-5)
        save = pb.SaveStateRequest(model_id=MODEL, store_url=w.store_url, prefix="s/1", adapter="a")
        saved = await w.stub.SaveState(save)
        load = pb.LoadStateRequest(model_id=MODEL, adapter="a", store_url=w.store_url, objects=saved.objects, epoch=1)
        await w.stub.LoadState(load)
        request.request_id = "y"
        await w.stub.PublishWeights(request)
        assert w.broker.begun[-1].replay, "a loaded adapter may be older than what the replicas have"


async def test_a_model_that_is_created_anew_has_no_adapters_and_ends_waiting_publishes(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await w.create()
        await adapter(w)
        w.broker.gate.clear()
        request = pb.PublishWeightsRequest(
            request_id="x", model_id=MODEL, publish_as=f"{MODEL}/adapters/s", sync_timeout_seconds=30, version=1
        )
        call = asyncio.ensure_future(w.stub.PublishWeights(request))
        await w.broker.arrived.wait()
        await w.create()
        assert (await refusal(call)).code() is grpc.StatusCode.FAILED_PRECONDITION
        assert (await refusal(w.stub.ForwardBackward(backward(1)))).code() is grpc.StatusCode.NOT_FOUND


BAD: dict[str, tuple[pb.ForwardBackwardRequest, str]] = {
    "both": (pb.ForwardBackwardRequest(groups=[pb.PromptGroup()], datums=datums()), "exactly one"),
    "neither": (pb.ForwardBackwardRequest(), "exactly one"),
    "targets": (
        pb.ForwardBackwardRequest(datums=[pb.Datum(token_ids=[3, 4], target_token_ids=[4])]),
        "1 targets for 2",
    ),
    "long": (pb.ForwardBackwardRequest(datums=[pb.Datum(token_ids=[3] * 49, target_token_ids=[3] * 49)]), "takes 48"),
    "vocabulary": (pb.ForwardBackwardRequest(datums=[pb.Datum(token_ids=[3], target_token_ids=[29])]), "id 29"),
    "array": (
        pb.ForwardBackwardRequest(
            datums=[pb.Datum(token_ids=[3], target_token_ids=[4], arrays=[pb.FloatArray(name="mask", values=[1])])]
        ),
        "'mask' is not one of",
    ),
    "length": (
        pb.ForwardBackwardRequest(
            datums=[pb.Datum(token_ids=[3], target_token_ids=[4], arrays=[pb.FloatArray(name="weights")])]
        ),
        "0 entries for 1",
    ),
}


async def test_bad_batches_and_adapters_are_refused_by_name(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await w.create()
        await adapter(w)
        for request, text in BAD.values():
            request.MergeFrom(pb.ForwardBackwardRequest(op_id=1, model_id=MODEL, adapter="a", loss=SUM))
            error = await refusal(w.stub.ForwardBackward(request))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert text in (error.details() or "")
        for fields, text in (
            ({"train_unembed": True}, "ties its output head"),
            ({"rank": 0}, "rank must be"),
            ({"adapter": "A b"}, "a-z"),
            ({"train_attention": False, "train_mlp": False}, "needs one of"),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match=text):
                await adapter(w, **fields)
        assert (await w.stub.ForwardBackward(backward(1))).loss > 0


async def test_what_waits_for_several_adapters_is_computed_in_one_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(tmp_path) as w:
        await w.create()
        names = ["a", "b", "c"]
        for name in names:
            await adapter(w, name)
        assert w.host.session is not None
        learner, host = w.host.session.learner, AdapterHost(w.host)
        passes: list[int] = []

        def counted(jobs: Sequence[AdapterJob]) -> list[BatchFigures]:
            passes.append(len(jobs))
            return Learner.adapters_forward_backward(learner, jobs)

        monkeypatch.setattr(learner, "adapters_forward_backward", counted)
        batch, loss = [GroupData([3, 4], [CompletionData([5])])], LossSpec(name="cross_entropy")
        async with w.host.order:
            calls = [asyncio.ensure_future(host.forward_backward(MODEL, name, 1, batch, loss)) for name in names]
            calls.append(asyncio.ensure_future(host.forward_backward(MODEL, "a", 2, batch, loss)))
            await asyncio.sleep(0)  # all of them wait for the lock now
        await asyncio.gather(*calls)
        assert passes == [3, 1]
