"""Versions as differences: a learner process, real engines, and those to whom a difference means nothing."""

from contextlib import AsyncExitStack

from reflux.trainer.v1 import learner_service_pb2 as learner_pb
from reflux.trainer.v1.learner_service_pb2_grpc import LearnerServiceStub
from reflux.weight_broker.v1.weight_version_pb2 import WeightVersion
from reflux_kit.channel import open_channel

from .learner_and_engines import RUN, World, world
from .learner_process import LearnerProcess

SMALL, LARGE = 1e-6, 0.05
"""Learning rates: few of the bfloat16 values change, or nearly all."""


async def published(w: World, name: str) -> tuple[bool, int]:
    """Publishes to all engines, which have to hold equal weights; whether as a difference, and the bytes pulled."""
    answer = await w.publish(name)
    assert await w.fingerprints() == [(answer.epoch, answer.fingerprint)] * len(w.engines)
    outcome = await w.outcome(answer.epoch)
    return outcome.kind == WeightVersion.KIND_DELTA, outcome.bytes


async def test_versions_arrive_as_differences_and_in_full_where_these_mean_nothing(tmp_path):
    async with AsyncExitStack() as stack:
        process: LearnerProcess | None = None

        async def start(broker_address: str) -> str:
            nonlocal process
            process = LearnerProcess(RUN, broker_address)
            stack.push_async_callback(process.kill)
            return await process.start()

        w = await stack.enter_async_context(world(tmp_path, "bfloat16", start, weight_delta=True, transport="auto"))
        assert process
        await w.engine()
        whole = (await w.publish("first")).bytes
        seen = set()
        for number in (1, 2, 3):
            await w.train(SMALL)
            delta, pulled = await published(w, f"p{number}")
            assert delta
            assert 0 < pulled < whole / 4
            seen.add((await w.fingerprints())[0])
        assert len(seen) == 3

        await w.engine(rank=1)
        await w.fleet(lambda replicas: {one.version for one in replicas} == {3})
        ours, joined = await w.fingerprints()
        assert joined == ours, "the joiner has no base and took the weights in full"
        await w.train(SMALL)
        delta, pulled = await published(w, "both")
        assert delta
        assert pulled < 2 * whole / 4

        await w.train(LARGE)
        delta, pulled = await published(w, "dense")
        assert delta
        assert pulled >= 2 * whole, "too dense: pulled in full although it began as a difference"

        state = learner_pb.SaveStateRequest(model_id=RUN, store_url=f"file://{tmp_path}/store", prefix="c/1")
        saved = await w.learner.SaveState(state)
        await process.kill()
        channel = await stack.enter_async_context(open_channel(await process.start()))
        w.learner = LearnerServiceStub(channel)
        await w.learner.LoadState(
            learner_pb.LoadStateRequest(
                model_id=RUN,
                path=str(w.folder),
                store_url=f"file://{tmp_path}/store",
                objects=saved.objects,
                transport="auto",
                weight_dtype="bfloat16",
                weight_delta=True,
            )
        )
        delta, pulled = await published(w, "restarted")
        assert not delta, "it has no base any more"
        assert pulled >= 2 * whole
        await w.train(SMALL)
        delta, pulled = await published(w, "again")
        assert delta
        assert pulled < 2 * whole / 4
