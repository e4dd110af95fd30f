"""Plain HTTP: one execution per sequence number, order, cancellation, limits, who may see what."""

import asyncio
import hashlib

import aiohttp
from tinker_world import STEP, done, forward_backward, model_of, sample, sampled, sampler_of, session_of

from reflux_trainer.tinker import sampling
from reflux_trainer.tinker.futures import FutureTable


async def test_a_request_that_comes_ten_times_runs_once_and_another_one_is_a_conflict(tinker_world):
    async with tinker_world.trainer():
        _, model = await model_of(tinker_world)
        tinker_world.learner.hold = asyncio.Event()
        answers = await asyncio.gather(*(forward_backward(tinker_world, model, 1) for _ in range(10)))
        assert {status for status, _ in answers} == {200}
        assert len({answer["request_id"] for _, answer in answers}) == 1
        assert (await forward_backward(tinker_world, model, 1, tokens=(1, 2, 3)))[0] == 409
        status, _ = await tinker_world.post("optim_step", STEP | {"model_id": model, "seq_id": 1})
        assert status == 409
        tinker_world.learner.hold.set()
        _, step = await tinker_world.post("optim_step", STEP | {"model_id": model, "seq_id": 2})
        assert (await done(tinker_world, step))["metrics"]["grad_norm"] > 0
        assert [op for _, op in tinker_world.learner.executed] == [1, 2]


async def test_operations_that_arrive_out_of_order_run_in_order_and_polls_say_what_is_missing(tinker_world):
    async with tinker_world.trainer(poll_seconds=0.2):
        _, model = await model_of(tinker_world)
        _, second = await tinker_world.post("optim_step", STEP | {"model_id": model, "seq_id": 2})
        _, waiting = await tinker_world.post("retrieve_future", {"request_id": second["request_id"]})
        assert (waiting["type"], waiting["queue_state"]) == ("try_again", "active")
        assert "operation 1" in waiting["queue_state_reason"]
        assert tinker_world.learner.executed == []
        await forward_backward(tinker_world, model, 1)
        assert (await done(tinker_world, second))["metrics"]["grad_norm"] > 0


async def test_a_slow_operation_is_polled_and_other_models_go_on(tinker_world):
    async with tinker_world.trainer(poll_seconds=0.2):
        _, slow = await model_of(tinker_world)
        _, quick = await model_of(tinker_world)
        tinker_world.learner.hold = asyncio.Event()
        _, held = await forward_backward(tinker_world, slow, 1)
        _, step = await tinker_world.post("optim_step", STEP | {"model_id": quick, "seq_id": 1})
        assert "metrics" in await done(tinker_world, step)
        _, waiting = await tinker_world.post("retrieve_future", {"request_id": held["request_id"]})
        assert (waiting["type"], waiting["queue_state_reason"]) == ("try_again", "is being computed")
        tinker_world.learner.hold.set()


async def test_cancelled_samples_free_the_gateway_and_end_their_polls(tinker_world):
    async with tinker_world.trainer(poll_seconds=10):
        session = await session_of(tinker_world)
        sampler = await sampler_of(tinker_world, session)
        tinker_world.gateway.hold = asyncio.Event()
        futures = [(await tinker_world.post("asample", sample(sampler, at, seed=at)))[1] for at in range(40)]
        assert futures[3]["sample_sequence_ids"] == [f"{sampler}:3:0"]
        async with asyncio.timeout(20):
            while tinker_world.gateway.running < 40:
                await asyncio.sleep(0.01)
        polls = [asyncio.create_task(done(tinker_world, future)) for future in futures]
        await asyncio.gather(
            *(tinker_world.post("cancel_future", {"request_id": future["request_id"]}) for future in futures)
        )
        assert {(await poll)["category"] for poll in polls} == {"user"}
        async with asyncio.timeout(20):
            while tinker_world.gateway.running:
                await asyncio.sleep(0.01)


async def test_more_open_futures_than_allowed_are_sent_away_for_now(tinker_world):
    async with tinker_world.trainer(max_pending=3):
        session = await session_of(tinker_world)
        sampler = await sampler_of(tinker_world, session)
        tinker_world.gateway.hold = asyncio.Event()
        statuses = [(await tinker_world.post("asample", sample(sampler, at)))[0] for at in range(5)]
        assert statuses == [200, 200, 200, 429, 429]
        other = await session_of(tinker_world, "tml-other")
        assert other
        tinker_world.gateway.hold.set()
        async with asyncio.timeout(20):
            while (await tinker_world.post("asample", sample(sampler, 9)))[0] != 200:
                await asyncio.sleep(0.05)


async def test_what_another_tenant_owns_does_not_exist(tinker_world):
    stranger = "tml-stranger"
    async with tinker_world.trainer():
        session, model = await model_of(tinker_world)
        sampler = await sampler_of(tinker_world, session)
        _, saved = await tinker_world.post("save_weights", {"model_id": model, "seq_id": 1, "path": "mine"})
        path = (await done(tinker_world, saved))["path"]
        own = await session_of(tinker_world, stranger)
        loading = {"session_id": own, "model_seq_id": 0, "path": path, "optimizer": True}
        for verb, body in (
            ("get_info", {"model_id": model}),
            ("optim_step", STEP | {"model_id": model, "seq_id": 2}),
            ("asample", sample(sampler, 0)),
            ("retrieve_future", {"request_id": saved["request_id"]}),
            ("session_heartbeat", {"session_id": session}),
            ("weights_info", {"tinker_path": path}),
            ("load_weights", loading),
            ("create_sampling_session", {"session_id": own, "sampling_session_seq_id": 0, "model_path": path}),
        ):
            status, answer = await tinker_world.post(verb, body, stranger)
            assert (verb, status) == (verb, 404), answer
        assert (await tinker_world.post("get_info", {"model_id": model}))[0] == 200


async def test_a_lost_result_is_gone_and_a_foreign_id_is_unknown(tinker_world):
    async with tinker_world.trainer():
        session = await session_of(tinker_world)
        sampler = await sampler_of(tinker_world, session)
        assert (await tinker_world.post("retrieve_future", {"request_id": f"{sampler}:7"}))[0] == 410
        assert (await tinker_world.post("retrieve_future", {"request_id": "none:sample:0:7"}))[0] == 404
        assert (await tinker_world.post("retrieve_future", {"request_id": "nonsense"}))[0] == 400


async def test_keys_open_one_tenant_each_and_never_reach_a_log(tinker_world, tmp_path, caplog):
    keys = tmp_path / "keys.toml"
    digest = hashlib.sha256(b"tml-known").hexdigest()
    keys.write_text(f'[[keys]]\nname = "physics"\nsha256 = "{digest}"\n')
    async with tinker_world.trainer(secret="the stack's", keys_file=str(keys)):
        assert await session_of(tinker_world, "tml-known")
        for wrong in ("tml-unknown", "sk-known", ""):
            status, answer = await tinker_world.post("create_session", {}, wrong)
            assert (status, answer["category"]) == (401, "user")
        async with aiohttp.ClientSession() as http, http.get(f"{tinker_world.http}/api/v1/healthz") as health:
            assert await health.json() == {"status": "ok"}
    assert "tml-unknown" not in caplog.text
    async with tinker_world.trainer(secret="the stack's"):
        assert (await tinker_world.post("create_session", {}, "tml-known"))[0] == 401


async def test_bodies_that_make_no_sense_are_refused_with_the_field(tinker_world):
    async with tinker_world.trainer(max_body_bytes=4096):
        session, model = await model_of(tinker_world)
        lora = {"session_id": session, "model_seq_id": 1, "base_model": "tiny"}
        for verb, body, field in (
            ("create_model", lora | {"lora_config": {"rank": 0}}, "lora_config.rank"),
            ("create_model", lora | {"optimizer_config": {"type": "dimuon"}}, "dimuon"),
            ("optim_step", STEP | {"model_id": model}, "seq_id"),
            ("asample", sample(await sampler_of(tinker_world, session), 0) | {"num_samples": 0}, "num_samples"),
            ("create_session", {"tags": "none"}, "tags"),
        ):
            status, answer = await tinker_world.post(verb, body)
            assert status == 400
            assert field in answer["error"]
        assert (await tinker_world.post("create_session", {"tags": ["x" * 5000]}))[0] == 413
        assert (await tinker_world.post("no_such_verb", {}))[0] == 404


async def test_a_request_that_redis_logged_twice_is_drawn_all_the_same(tinker_world, monkeypatch):
    submit = FutureTable.submit

    async def twice(self, *arguments, **named):
        await submit(self, *arguments, **named)
        return await submit(self, *arguments, **named)

    monkeypatch.setattr(FutureTable, "submit", twice)
    async with tinker_world.trainer():
        sampler = await sampler_of(tinker_world, await session_of(tinker_world))
        _, future = await tinker_world.post("asample", sample(sampler, 0))
        await sampled(tinker_world, future)


async def test_nobody_joins_a_group_whose_last_call_was_cancelled(tinker_world, monkeypatch):
    monkeypatch.setattr(sampling, "_GATHER_SECONDS", 0.3)
    async with tinker_world.trainer():
        sampler = await sampler_of(tinker_world, await session_of(tinker_world))
        _, first = await tinker_world.post("asample", sample(sampler, 0))
        await tinker_world.post("cancel_future", {"request_id": first["request_id"]})
        _, second = await tinker_world.post("asample", sample(sampler, 1))
        await sampled(tinker_world, second)


async def test_the_operation_that_others_wait_behind_is_never_one_too_many(tinker_world):
    async with tinker_world.trainer(max_pending=2):
        _, model = await model_of(tinker_world)
        behind = [await tinker_world.post("optim_step", STEP | {"model_id": model, "seq_id": seq}) for seq in (2, 3)]
        assert (await tinker_world.post("optim_step", STEP | {"model_id": model, "seq_id": 4}))[0] == 429
        status, first = await tinker_world.post("optim_step", STEP | {"model_id": model, "seq_id": 1})
        assert status == 200
        for future in (first, *(future for _, future in behind)):
            assert "metrics" in await done(tinker_world, future)
