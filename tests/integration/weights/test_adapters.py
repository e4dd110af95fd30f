"""One replica serves adapters of several runs: versions of their own, pulled as factors, drawn side by side."""

import asyncio
from contextlib import asynccontextmanager

import grpc
import pytest

from reflux.common.v1.common_pb2 import SamplingParams
from reflux.inference_gateway.v1 import engine_service_pb2 as engine_pb
from reflux.inference_gateway.v1 import inference_gateway_service_pb2 as gateway_pb
from reflux.trainer.v1 import learner_service_pb2 as learner_pb

from .learner_and_engines import RUN, world

PROMPT = [5, 6, 7, 8]
SHAPE = {"rank": 4, "train_attention": True, "train_mlp": True}


def served(name, run=RUN):
    return f"{run}/adapters/{name}"


async def learn(w, name, steps=1, run=RUN, learner=None):
    """Steps of one adapter towards tokens of its own."""
    learner, target = learner or w.learner, 9 + len(name)
    state = {each.name: each.op_id for each in (await learner.GetLearner(learner_pb.GetLearnerRequest())).adapters}
    for number in range(steps):
        op_id = state[name] + 2 * number
        group = learner_pb.PromptGroup(
            prompt_token_ids=PROMPT, completions=[learner_pb.Completion(token_ids=[target, target, 2], advantage=1.0)]
        )
        loss = learner_pb.LossConfig(name="cross_entropy", aggregation="token_mean")
        fields = {"model_id": run, "adapter": name}
        await learner.ForwardBackward(
            learner_pb.ForwardBackwardRequest(op_id=op_id + 1, groups=[group], loss=loss, **fields)
        )
        await learner.OptimStep(
            learner_pb.OptimStepRequest(op_id=op_id + 2, learning_rate=0.02, beta1=0.9, beta2=0.98, **fields)
        )


async def draw(w, model_id, name, count=4, **fields):
    request = gateway_pb.GenerateGroupRequest(
        request_id=name,
        model_id=model_id,
        prompt_token_ids=PROMPT,
        num_samples=count,
        sampling=SamplingParams(max_tokens=6, temperature=1.0, seed=4, ignore_eos=True),
        whole_group=True,
        **fields,
    )
    (answer,) = [answer async for answer in w.gateway.GenerateGroup(request, timeout=60)]
    return list(answer.samples)


async def check(w, name, samples, version):
    """The learner's log-probs of the adapter are the engine's, at the version that it has published."""
    completions = [learner_pb.Completion(token_ids=sample.token_ids) for sample in samples]
    group = learner_pb.PromptGroup(prompt_token_ids=PROMPT, completions=completions)
    again = await w.learner.Forward(learner_pb.ForwardRequest(model_id=RUN, adapter=name, groups=[group]))
    for sample, scored in zip(samples, again.groups[0].completions, strict=True):
        assert {span.version for span in sample.versions} == {version}
        assert list(sample.logprobs) == pytest.approx(list(scored.behaviour_logprobs), abs=1e-4)


@asynccontextmanager
async def shared(tmp_path, names=("a", "bb"), **settings):
    async with world(tmp_path, "float32") as w:
        engine = await w.engine(max_adapters=2, max_adapter_rank=8, model_id="base", **settings)
        for name in names:
            create = learner_pb.CreateAdapterRequest(model_id=RUN, adapter=name, seed=len(name), **SHAPE)
            await w.learner.CreateAdapter(create)
            await engine.AttachAdapter(attaching(name))
        yield w, engine


def attaching(name, seconds=60.0, **fields):
    return engine_pb.AttachAdapterRequest(model_id=served(name), lease_seconds=seconds, **(SHAPE | fields))


async def publish(w, name, number):
    request = learner_pb.PublishWeightsRequest(
        request_id=f"{name}{number}", model_id=RUN, adapter=name, min_replicas=1, sync_timeout_seconds=20,
        probe_token_ids=PROMPT,
    )  # fmt: skip
    return await w.learner.PublishWeights(request, timeout=60)


async def test_two_adapters_have_independent_versions_on_one_replica_with_two_seats(tmp_path):
    async with shared(tmp_path) as (w, engine):
        plain = await draw(w, "base", "plain")
        await learn(w, "a", 3)
        for name, version in (("a", 3), ("bb", 0)):
            published = await publish(w, name, 1)
            assert published.version == version
            assert published.bytes < 100_000, "factors only"
            kept = await engine.GetFingerprint(engine_pb.GetFingerprintRequest(adapter=served(name)))
            assert (kept.epoch, kept.fingerprint) == (published.epoch, published.fingerprint)
        await w.fleet(lambda replicas: sum(not one.health_reason for one in replicas) == 3)
        mine, other, base = await asyncio.gather(
            draw(w, served("a"), "same-id"), draw(w, served("bb"), "same-id"), draw(w, "base", "same-id")
        )
        await check(w, "a", mine, 3)
        await check(w, "bb", other, 0)
        assert [list(one.token_ids) for one in base] == [list(one.token_ids) for one in plain], "the base stays"
        assert [list(one.token_ids) for one in other] == [list(one.token_ids) for one in plain], "B is zero"
        assert [list(one.logprobs) for one in mine] != [list(one.logprobs) for one in plain]
        await learn(w, "bb", 2)
        await publish(w, "bb", 2)
        again, newer = await draw(w, served("a"), "a2"), await draw(w, served("bb"), "bb2", min_version=2)
        assert [list(one.token_ids) for one in again] == [list(one.token_ids) for one in mine]
        await check(w, "a", again, 3)
        await check(w, "bb", newer, 2)
        # Seats are bounded, leased and free again.
        with pytest.raises(grpc.aio.AioRpcError, match="all 2 seats for adapters are taken") as full:
            await engine.AttachAdapter(attaching("ccc"))
        assert full.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        with pytest.raises(grpc.aio.AioRpcError, match="rank 16 exceeds the 8"):
            await engine.AttachAdapter(attaching("ccc", rank=16))
        with pytest.raises(grpc.aio.AioRpcError, match="is attached with"):
            await engine.AttachAdapter(attaching("a", rank=2))
        await engine.DetachAdapter(engine_pb.DetachAdapterRequest(model_id=served("bb")))
        await engine.AttachAdapter(attaching("a", seconds=0.1))
        await w.fleet(lambda replicas: len(replicas) == 1)
        create = learner_pb.CreateAdapterRequest(model_id=RUN, adapter="ccc", seed=5, **SHAPE)
        await w.learner.CreateAdapter(create)
        await engine.AttachAdapter(attaching("ccc"))
        await publish(w, "ccc", 1)
        await w.fleet(lambda replicas: len(replicas) == 2 and not any(one.health_reason for one in replicas))
        await check(w, "ccc", await draw(w, served("ccc"), "c"), 0)
