"""Weights on their way from the learner to embedded engines, and what becomes of replicas that get them wrong."""

import asyncio
import gc
import weakref

import pytest

from reflux.inference_gateway.v1 import engine_service_pb2 as engine_pb
from reflux.inference_gateway.v1.replica_pb2 import Replica
from reflux_inference_gateway.engine import main as engine_main
from reflux_inference_gateway.engine.weights import Follower
from reflux_transfer.client.in_place import InPlaceReceiver
from reflux_transfer.errors import PeerGone

from .learner_and_engines import world

PROBE = [5, 6, 7, 8, 9]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
async def test_learner_and_replicas_of_both_modes_name_one_fingerprint(tmp_path, dtype):
    async with world(tmp_path, dtype) as w:
        await w.engine(weight_mode="swap")
        await w.engine(weight_mode="in_place")
        assert [epoch for epoch, _ in await w.fingerprints()] == [0, 0]
        seen = set()
        for number in (1, 2, 3):
            await w.train()
            published = await w.publish(f"p{number}", probe_token_ids=PROBE)
            assert published.version == number
            assert await w.fingerprints() == [(published.epoch, published.fingerprint)] * 2
            seen.add(published.fingerprint)
            samples = await w.generate(f"g{number}", min_version=number)
            assert {span.version for sample in samples for span in sample.versions} == {number}
        assert len(seen) == 3
        scored = [await engine.ScorePrompt(engine_pb.ScorePromptRequest(token_ids=PROBE)) for engine in w.engines]
        assert [(one.version, one.epoch, len(one.logprobs)) for one in scored] == [(3, published.epoch, 4)] * 2
        assert scored[0].logprobs == scored[1].logprobs
        replicas = await w.fleet(lambda replicas: all(one.version == 3 for one in replicas))
        assert {(one.health, one.engine) for one in replicas} == {(Replica.HEALTH_OK, "torch")}


async def test_a_running_group_goes_on_under_the_new_version(tmp_path):
    async with world(tmp_path, "float32") as w:
        await w.engine(weight_mode="swap")
        await w.publish("first")
        await w.train()
        running = asyncio.create_task(w.generate("g", count=48, max_tokens=240))
        await w.busy()
        published = await w.publish("second")
        samples = await running
        spans = [[span.version for span in sample.versions] for sample in samples]
        assert all(versions in ([0], [0, 1], [1]) for versions in spans)
        assert [0, 1] in spans, "the swap came while samples ran"
        assert await w.fingerprints() == [(published.epoch, published.fingerprint)]


async def test_the_copy_of_the_model_folder_is_freed(tmp_path, monkeypatch):
    tensors = []
    load = engine_main.load_model

    def watched(settings):
        model = load(settings)
        tensors.extend(weakref.ref(tensor) for tensor in model.weights.params.values())
        return model

    monkeypatch.setattr(engine_main, "load_model", watched)
    async with world(tmp_path) as w:
        await w.engine()
        await w.publish("p")
        gc.collect()
        assert tensors
        assert not any(ref() is not None for ref in tensors)


async def test_a_replica_whose_weights_are_a_mixture_gets_no_requests_until_it_is_whole_again(tmp_path, monkeypatch):
    pull, failures, healed = InPlaceReceiver._pull, [], asyncio.Event()
    loop = asyncio.get_running_loop()

    def broken(self, offer):
        if len(failures) < 2:
            failures.append(offer.epoch)
            self.arenas.view(0)[:64] = bytes(64)  # half of it is there
            raise PeerGone("the source went away in the middle")
        asyncio.run_coroutine_threadsafe(healed.wait(), loop).result(60)
        return pull(self, offer)

    async with world(tmp_path) as w:
        await w.engine(weight_mode="in_place")
        await w.publish("first")
        monkeypatch.setattr(InPlaceReceiver, "_pull", broken)
        await w.train()
        running = asyncio.create_task(w.generate("running", count=32, max_tokens=250))
        await w.busy()
        publishing = asyncio.create_task(w.publish("second"))
        (sick,) = await w.fleet(lambda replicas: replicas[0].health == Replica.HEALTH_UNHEALTHY)
        assert "mixture" in sick.health_reason
        assert "the source went away" in sick.health_reason
        waiting = asyncio.create_task(w.generate("waiting"))
        healed.set()
        (well,) = await w.fleet(lambda replicas: replicas[0].health == Replica.HEALTH_OK and replicas[0].version == 1)
        await asyncio.wait([publishing, running])
        samples = await waiting
        assert {span.version for sample in samples for span in sample.versions} == {1}
        assert len(failures) == 2
        assert (await w.fingerprints())[0][0] == well.epoch


async def test_a_replica_that_computes_something_else_than_the_learner_is_left_out(tmp_path, monkeypatch):
    score, sick = Follower.score, ["replicas/run-1-1-"]

    async def wrong(self, token_ids):
        scores = await score(self, token_ids)
        return [value + 1.0 if self._description.name.startswith(tuple(sick)) else value for value in scores]

    monkeypatch.setattr(Follower, "score", wrong)
    async with world(tmp_path) as w:
        await w.engine(rank=0)
        await w.engine(rank=1)
        await w.publish("p", probe_token_ids=PROBE)
        replicas = await w.fleet(lambda replicas: any(one.health == Replica.HEALTH_UNHEALTHY for one in replicas))
        by_rank = {one.name.split("-")[2]: one for one in replicas}
        assert by_rank["0"].health == Replica.HEALTH_OK
        assert "differs by 1" in by_rank["1"].health_reason
        for number in range(6):
            await w.generate(f"g{number}")
        assert (await w.engines[1].GetStatus(engine_pb.GetStatusRequest())).replica.sequences == 0
        sick.clear()
        await w.train()
        await w.publish("again", probe_token_ids=PROBE)
        await w.fleet(lambda replicas: all(one.health == Replica.HEALTH_OK for one in replicas))
