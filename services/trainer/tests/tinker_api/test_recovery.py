"""Deaths: of the trainer before and after it acknowledged, of the learner, and of what they had in memory."""

import asyncio

import numpy as np
import pytest
from tinker import types
from tinker_world import STEP, datum, done, forward_backward, model_of, sample, sampler_of, session_of, train

SEVEN = [1, 7, 7, 7]


async def reference(steps):
    """Losses of an undisturbed run, by the arithmetic of the test's learner."""
    from tinker_peers import Adapter

    from reflux.trainer.v1 import learner_service_pb2 as pb

    adapter, losses = Adapter(), []
    batch = pb.Datum(token_ids=SEVEN[:-1], target_token_ids=SEVEN[1:])
    for _ in range(steps):
        losses.append(adapter.backward(batch, pb.LossConfig(name="cross_entropy"), True)[0])
        adapter.step(pb.OptimStepRequest(learning_rate=0.1, beta1=0.9, beta2=0.95, eps=1e-12))
    return losses


async def test_a_trainer_that_dies_between_steps_of_the_sdk_changes_nothing(tinker_world):
    """The client goes on against the next trainer at the same address, and the learner dies once as well."""
    ready, go_on = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    async def use(service):
        training = await service.create_lora_training_client(base_model="tiny", rank=8, seed=1)
        losses = [(await train(training, [datum(SEVEN)])).metrics["loss:sum"] for _ in range(3)]
        loop.call_soon_threadsafe(ready.set)
        pending = training.forward_backward([datum(SEVEN)], "cross_entropy")
        step = training.optim_step(types.AdamParams(learning_rate=0.1))
        losses.append((await pending).metrics["loss:sum"])
        await step
        losses += [(await train(training, [datum(SEVEN)])).metrics["loss:sum"] for _ in range(2)]
        return losses

    async with tinker_world.trainer(max_logged_operations=4):
        client = asyncio.create_task(tinker_world.sdk(use))
        await ready.wait()
    tinker_world.learner.die()
    async with tinker_world.trainer(max_logged_operations=4):
        go_on.set()
        assert await client == pytest.approx(await reference(6), rel=1e-5)
    (adapter,) = tinker_world.learner.adapters.values()
    assert adapter.steps == 6


async def test_an_acknowledged_operation_is_executed_by_the_next_trainer(tinker_world):
    async with tinker_world.trainer():
        _, model = await model_of(tinker_world)
        tinker_world.learner.hold = asyncio.Event()
        _, first = await forward_backward(tinker_world, model, 1)
        _, second = await tinker_world.post("optim_step", STEP | {"model_id": model, "seq_id": 2})
    tinker_world.learner.hold = None
    async with tinker_world.trainer():
        assert (await done(tinker_world, second))["metrics"]["grad_norm"] > 0
        status, _ = await forward_backward(tinker_world, model, 1)
        assert status == 200, "the same request is still the same future"
        status, again = await tinker_world.post("optim_step", STEP | {"model_id": model, "seq_id": 2})
        assert (status, again["request_id"]) == (200, second["request_id"])
    assert [op for _, op in tinker_world.learner.executed] == [1, 2]
    assert first["request_id"].endswith(":1")


async def test_an_operation_that_the_learner_did_and_nobody_recorded_is_not_done_again(tinker_world):
    """The trainer died between the learner's answer and the record of it: the learner repeats its answer."""
    async with tinker_world.trainer():
        _, model = await model_of(tinker_world)
        await forward_backward(tinker_world, model, 1)
        _, step = await tinker_world.post("optim_step", STEP | {"model_id": model, "seq_id": 2})
        await done(tinker_world, step)
    (name,) = tinker_world.learner.adapters
    adapter = tinker_world.learner.adapters[name]
    from reflux.trainer.v1 import learner_service_pb2 as pb

    datums = [pb.Datum(token_ids=[1, 7], target_token_ids=[7, 7])]
    loss = pb.LossConfig(name="cross_entropy", aggregation="sum")
    unheard = pb.ForwardBackwardRequest(model_id=tinker_world.run, adapter=name, op_id=3, datums=datums, loss=loss)
    await tinker_world.learner.ForwardBackward(unheard, None)
    gradient = np.array(adapter.gradient)
    async with tinker_world.trainer():
        _, future = await forward_backward(tinker_world, model, 3)
        _, step = await tinker_world.post("optim_step", STEP | {"model_id": model, "seq_id": 4})
        norm = (await done(tinker_world, step))["metrics"]["grad_norm"]
    assert norm == pytest.approx(float(np.linalg.norm(gradient)))
    assert future["model_id"] == model


@pytest.mark.parametrize("max_logged", [2, 64])
async def test_a_learner_that_dies_comes_back_with_the_same_weights(tinker_world, max_logged):
    async with tinker_world.trainer(max_logged_operations=max_logged):
        _, model = await model_of(tinker_world)
        norms = []
        for turn in range(6):
            await forward_backward(tinker_world, model, 2 * turn + 1)
            if turn in (2, 4):
                tinker_world.learner.die()
            _, step = await tinker_world.post("optim_step", STEP | {"model_id": model, "seq_id": 2 * turn + 2})
            norms.append((await done(tinker_world, step))["metrics"]["grad_norm"])
    adapter = next(iter(tinker_world.learner.adapters.values()))
    assert (adapter.steps, adapter.op_id) == (6, 12)
    assert norms == sorted(norms, reverse=True)


async def test_samples_that_were_open_are_drawn_by_the_next_trainer(tinker_world):
    async with tinker_world.trainer():
        session = await session_of(tinker_world)
        sampler = await sampler_of(tinker_world, session)
        tinker_world.gateway.hold = asyncio.Event()
        _, future = await tinker_world.post("asample", sample(sampler, 0))
    tinker_world.gateway.hold = None
    async with tinker_world.trainer():
        for _ in range(3):
            status, again = await tinker_world.post("asample", sample(sampler, 0))
            assert (status, again["request_id"]) == (200, future["request_id"])
        async with asyncio.timeout(20):
            while (answer := await _poll(tinker_world, future)) is None:
                await asyncio.sleep(0.05)
        assert answer


async def _poll(world, future):
    import aiohttp
    from tinker_world import KEY

    async with (
        aiohttp.ClientSession(headers={"x-api-key": KEY}) as http,
        http.post(f"{world.http}/api/v1/retrieve_future", json={"request_id": future["request_id"]}) as answer,
    ):
        assert answer.status == 200
        return await answer.read() if answer.content_type == "application/x-protobuf" else None


async def test_models_beyond_the_learners_room_take_turns_without_losing_a_step(tinker_world):
    async with tinker_world.trainer(max_models=1):
        models = [(await model_of(tinker_world))[1] for _ in range(3)]
        for turn in range(3):
            for model in models:
                await forward_backward(tinker_world, model, 2 * turn + 1)
                _, step = await tinker_world.post("optim_step", STEP | {"model_id": model, "seq_id": 2 * turn + 2})
                await done(tinker_world, step)
        assert len(tinker_world.learner.adapters) == 1
        _, info = await tinker_world.post("optim_step", STEP | {"model_id": models[0], "seq_id": 7})
        await done(tinker_world, info)
        (adapter,) = tinker_world.learner.adapters.values()
        assert (adapter.steps, adapter.op_id) == (4, 7)


async def test_a_save_that_nobody_recorded_is_repeated_under_its_own_name(tinker_world, monkeypatch):
    from redis.exceptions import ConnectionError as Away

    from reflux_trainer.tinker.futures import FutureTable

    finish, failures = FutureTable.finish, []

    async def broken(self, owner, seq_id, *arguments):
        if seq_id == 1 and not failures:
            failures.append(seq_id)
            raise Away("as the test wants it")
        await finish(self, owner, seq_id, *arguments)

    monkeypatch.setattr(FutureTable, "finish", broken)
    async with tinker_world.trainer():
        _, model = await model_of(tinker_world)
        _, future = await tinker_world.post("save_weights", {"model_id": model, "seq_id": 1, "path": "one"})
        assert (await done(tinker_world, future))["path"] == f"tinker://{model}/weights/one"
        assert failures == [1]
        _, taken = await tinker_world.post("save_weights", {"model_id": model, "seq_id": 2, "path": "one"})
        assert "exists" in (await done(tinker_world, taken))["error"]
        over = {"model_id": model, "seq_id": 3, "path": "one", "overwrite": True}
        _, again = await tinker_world.post("save_weights", over)
        assert "path" in await done(tinker_world, again)
    stored = list((tinker_world.folder / "objects").rglob("weights/*/adapter"))
    assert len(stored) == 1, "replaced checkpoints leave their bytes behind"


async def test_the_end_of_a_session_frees_what_it_held_and_ends_what_cannot_go_on(tinker_world):
    async with tinker_world.trainer(poll_seconds=0.2):
        session, model = await model_of(tinker_world)
        await forward_backward(tinker_world, model, 1)
        _, step = await tinker_world.post("optim_step", STEP | {"model_id": model, "seq_id": 2})
        await done(tinker_world, step)
        _, orphan = await tinker_world.post("optim_step", STEP | {"model_id": model, "seq_id": 4})
        saving = {"model_id": model, "seq_id": 9, "sampling_session_seq_id": 0}
        await tinker_world.post("save_weights_for_sampler", saving)
        assert (await tinker_world.post(f"sessions/{session}/finish", {}))[0] == 200
        assert "operation 3 never arrived" in (await done(tinker_world, orphan))["error"]
        assert tinker_world.learner.adapters == {}
        # The model is still there for whoever loads or lists it, and for its own client.
        await forward_backward(tinker_world, model, 3)
        _, step = await tinker_world.post("optim_step", STEP | {"model_id": model, "seq_id": 4})
        assert "never arrived" in (await done(tinker_world, step))["error"], "the number is used up"
        _, step = await tinker_world.post("optim_step", STEP | {"model_id": model, "seq_id": 5})
        assert (await done(tinker_world, step))["metrics"]["grad_norm"] > 0


async def test_what_arrives_while_a_trainer_stops_is_left_to_the_next_one(tinker_world, monkeypatch):
    from reflux_trainer.tinker.desks import Desks

    made, remember = [], Desks.__init__
    monkeypatch.setattr(Desks, "__init__", lambda self, *args: (made.append(self), remember(self, *args))[1])
    async with tinker_world.trainer():
        _, model = await model_of(tinker_world)
        async with made[0].closing():
            pass
        _, future = await forward_backward(tinker_world, model, 1)
        _, waiting = await tinker_world.post("retrieve_future", {"request_id": future["request_id"]})
        assert waiting["type"] == "try_again"
        assert tinker_world.learner.executed == []
    async with tinker_world.trainer():
        _, step = await tinker_world.post("optim_step", STEP | {"model_id": model, "seq_id": 2})
        assert (await done(tinker_world, step))["metrics"]["grad_norm"] > 0
