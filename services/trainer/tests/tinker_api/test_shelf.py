"""Checkpoints between tenants and in time, polls of whole sessions, and routes that are refused by name."""

import asyncio
from dataclasses import replace

import aiohttp
import httpx
import pytest
import redis.asyncio
import tinker
from tinker import types
from tinker.cli.auth_api import AuthApiError, TinkerAuthApi
from tinker_world import KEY, LORA, datum, done, model_of, sample, sampled, sampler_of, session_of, train

from reflux_trainer.tinker.catalog import Catalog
from reflux_trainer.tinker.door import Door

STRANGER = "tml-stranger"


async def request(world, method, path, body=None, key=KEY):
    async with (
        aiohttp.ClientSession(headers={"x-api-key": key}) as http,
        http.request(method, f"{world.http}/api/v1/{path}", json=body) as answer,
    ):
        return answer.status, await answer.json()


async def saved(world, model, name="mine", seq_id=1):
    _, future = await world.post("save_weights", {"model_id": model, "seq_id": seq_id, "path": name})
    return (await done(world, future))["path"]


async def test_a_published_checkpoint_is_read_by_others_and_changed_by_its_owner_only(tinker_world):
    async with tinker_world.trainer():
        _, model = await model_of(tinker_world)
        path, shelf = await saved(tinker_world, model), f"training_runs/{model}/checkpoints/weights/mine"
        own = await session_of(tinker_world, STRANGER)
        sampling = {"session_id": own, "sampling_session_seq_id": 0, "model_path": path}
        loading = {"session_id": own, "model_seq_id": 0, "path": path, "optimizer": True}
        copying = {"session_id": own, "model_seq_id": 1, "source_path": path}
        reads = [
            ("weights_info", {"tinker_path": path}),
            ("create_sampling_session", sampling),
            ("copy_weights", copying),
            ("load_weights", loading),
        ]
        for verb, body in reads:
            assert (verb, (await tinker_world.post(verb, body, STRANGER))[0]) == (verb, 404)
        assert (await request(tinker_world, "POST", f"{shelf}/publish", key=STRANGER))[0] == 404
        assert (await request(tinker_world, "POST", f"{shelf}/publish"))[0] == 200
        for verb, body in reads:
            assert (verb, (await tinker_world.post(verb, body, STRANGER))[0]) == (verb, 200)
        for method, what in (("DELETE", ""), ("DELETE", "/publish"), ("PUT", "/ttl")):
            status, _ = await request(tinker_world, method, shelf + what, {"ttl_seconds": 3600}, STRANGER)
            assert (method, what, status) == (method, what, 404)
        assert (await request(tinker_world, "GET", f"training_runs/{model}/checkpoints", key=STRANGER))[0] == 404
        [listed] = (await request(tinker_world, "GET", f"training_runs/{model}/checkpoints"))[1]["checkpoints"]
        assert (listed["public"], listed["expires_at"]) == (True, None)
        assert (await request(tinker_world, "DELETE", f"{shelf}/publish"))[0] == 200
        assert (await tinker_world.post("weights_info", {"tinker_path": path}, STRANGER))[0] == 404


async def test_a_time_to_live_is_set_and_taken_back(tinker_world):
    async with tinker_world.trainer():
        _, model = await model_of(tinker_world)
        await saved(tinker_world, model)
        shelf = f"training_runs/{model}/checkpoints/weights/mine"
        assert (await request(tinker_world, "PUT", f"{shelf}/ttl", {"ttl_seconds": 5}))[0] == 400
        for wanted in (7200, None):
            assert (await request(tinker_world, "PUT", f"{shelf}/ttl", {"ttl_seconds": wanted}))[0] == 200
            [listed] = (await request(tinker_world, "GET", f"training_runs/{model}/checkpoints"))[1]["checkpoints"]
            assert (listed["expires_at"] is None) == (wanted is None)


async def test_a_copy_outlives_its_source_and_the_same_call_makes_no_second_one(tinker_world):
    async def use(service):
        training = await service.create_lora_training_client(base_model="tiny", rank=8, seed=1)
        for _ in range(3):
            await train(training, [datum([1, 2, 3, 4])])
        source = (await training.save_state("three")).path
        straight = (await train(training, [datum([1, 2, 3, 4])])).metrics["loss:sum"]
        session = await session_of(tinker_world)
        body = {"session_id": session, "model_seq_id": 0, "source_path": source}
        (status, first), (_, again) = (
            await tinker_world.post("copy_weights", body),
            await tinker_world.post("copy_weights", body),
        )
        assert (status, first) == (200, again)
        rest = tinker.RestClient(base_url=tinker_world.http, api_key=KEY)
        await rest.delete_checkpoint(training.model_id, "weights/three")
        copied = await service.create_training_client_from_state_with_optimizer(first["tinker_path"])
        assert (await train(copied, [datum([1, 2, 3, 4])])).metrics["loss:sum"] == straight
        assert (await training.save_state("three")).path == source
        assert (await tinker_world.post("copy_weights", body))[1] == first  # the same address is the same source

    await tinker_world.with_sdk(use)


async def test_a_slot_holds_one_thing(tinker_world):
    async with tinker_world.trainer():
        session, model = await model_of(tinker_world)
        mine, other = await saved(tinker_world, model), await saved(tinker_world, model, "other", 2)
        copying = {"session_id": session, "model_seq_id": 1, "source_path": mine}
        assert (await tinker_world.post("copy_weights", copying))[0] == 200
        training = {"session_id": session, "model_seq_id": 1, "base_model": "tiny", "lora_config": LORA}
        loading = {"session_id": session, "model_seq_id": 1, "path": mine, "optimizer": True}
        for verb, body, holds in (
            ("copy_weights", copying | {"source_path": other}, f"a copy of {mine}"),
            ("copy_weights", copying | {"model_seq_id": 0}, "a model that is trained"),
            ("create_model", training, f"a copy of {mine}"),
            ("load_weights", loading, f"a copy of {mine}"),
        ):
            status, refused = await tinker_world.post(verb, body)
            assert (verb, status) == (verb, 409)
            assert holds in refused["error"]


async def test_what_is_overwritten_while_it_is_published_keeps_its_new_bytes(tinker_world, valkey_url, monkeypatch):
    async with tinker_world.trainer(), redis.asyncio.from_url(valkey_url) as client:
        _, model = await model_of(tinker_world)
        path = await saved(tinker_world, model)
        catalog = Catalog(client)
        stored = await catalog.any_model(model)
        before = await catalog.checkpoint(stored.tenant, path)
        over = replace(before, seq_id=7, weights={"objects": [["new", 1, "sum"]]})
        change, overwriting = catalog._change, [over]

        async def late(**call):
            if overwriting:
                await catalog.add_checkpoint(overwriting.pop())
            return await change(**call)

        monkeypatch.setattr(catalog, "_change", late)
        await catalog.change_checkpoint(stored.tenant, path, public=True)
        assert not overwriting
        assert await catalog.checkpoint(stored.tenant, path) == replace(over, public=True)


@pytest.mark.parametrize("field", ["destination_project_id", "weights_access_token"])
async def test_what_a_copy_does_not_know_is_refused_by_name(tinker_world, field):
    async with tinker_world.trainer():
        status, answer = await tinker_world.post("copy_weights", {"source_path": "tinker://a/weights/b", field: "x"})
        assert status == 400
        assert field in answer["error"]


async def test_the_sdk_polls_a_whole_session_at_once(tinker_world, monkeypatch):
    polls, single, ended, retrieve = [], [], Door.ended, Door.retrieve

    async def counted(door, tenant, body):
        polls.append(body)
        return await ended(door, tenant, body)

    async def fetched(door, tenant, request_id):
        single.append(request_id)
        return await retrieve(door, tenant, request_id)

    monkeypatch.setattr(Door, "ended", counted)
    monkeypatch.setattr(Door, "retrieve", fetched)

    async def use(service):
        sampler = await service.create_sampling_client(base_model="tiny")
        params, prompt = types.SamplingParams(max_tokens=4), types.ModelInput.from_ints([4, 5])
        answers = await asyncio.gather(*(sampler.sample(prompt, 1, params) for _ in range(12)))
        assert len({tuple(answer.sequences[0].tokens) for answer in answers}) > 6

    await tinker_world.with_sdk(use, batch_polls=True)
    assert polls
    assert sorted(single) == sorted(set(single)), "each result is fetched once, when it is there"


async def test_ends_come_in_order_are_forgotten_behind_the_cursor_and_are_each_clients_own(tinker_world):
    async with tinker_world.trainer():
        session = await session_of(tinker_world)
        sampler = await sampler_of(tinker_world, session)
        status, joined = await tinker_world.post("join_sampling_session", {"sampling_session_id": sampler})
        assert (status, joined["client_counter"]) == (200, 1)

        async def ended(client=0, cursor=0, key=KEY, **more):
            target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": client}
            return await tinker_world.post("retrieve_futures", {"target": target, "prev_cursor": cursor} | more, key)

        assert (await ended())[1] == {"completions": [], "cursor": 0}
        assert (await ended(key=STRANGER))[0] == 404
        waiting = asyncio.create_task(ended())
        await asyncio.sleep(0.05)
        for seq_id in (0, 1, 1_000_000_000):
            _, future = await tinker_world.post("asample", sample(sampler, seq_id))
            await sampled(tinker_world, future)
        _, first = await waiting
        assert [each["request_id"] for each in first["completions"]][:1] == [f"{sampler}:0"]
        _, rest = await ended(cursor=first["cursor"], timeout=0)
        seen = [each["request_id"] for each in (*first["completions"], *rest["completions"])]
        assert seen == [f"{sampler}:0", f"{sampler}:1"]
        assert all(each["response_payload_uncompressed_size"] > 0 for each in rest["completions"])
        assert (await ended(cursor=rest["cursor"], timeout=0))[1]["completions"] == []
        assert (await ended(timeout=0))[1]["completions"] == [], "what was seen is forgotten"
        _, other = await ended(client=1, timeout=0)
        assert [each["request_id"] for each in other["completions"]] == [f"{sampler}:1000000000"]
        assert other["cursor"] == 1
        _, future = await tinker_world.post("asample", sample(sampler, 2))
        await sampled(tinker_world, future)
        assert (await ended(timeout=0))[1]["cursor"] == 3, "places go on when all ends are forgotten"


async def test_routes_that_are_not_served_say_what_to_do_instead(tinker_world):
    async with tinker_world.trainer():
        for method, path, words in (
            ("POST", "create_custom_loss", "forward_backward_custom"),
            ("POST", "save_weights_external", "save_weights"),
            ("POST", "sessions/search", "GET sessions"),
            ("GET", "training_runs/a/checkpoints/weights/b/external_weights_urls", "tinker://"),
        ):
            status, answer = await request(tinker_world, method, path, {} if method == "POST" else None)
            assert (status, answer["category"]) == (400, "user")
            assert words in answer["error"]


async def test_the_sdks_login_knows_the_tenant_of_a_key(tinker_world):
    def who(key):
        with httpx.Client(timeout=20) as http:
            return TinkerAuthApi(http, base_url=tinker_world.http).get_self_api_key(key)

    async with tinker_world.trainer():
        mine, again, other = [await asyncio.to_thread(who, key) for key in (KEY, KEY, STRANGER)]
        assert mine == again
        assert (mine.key_id, mine.name) != (other.key_id, other.name)
        assert mine.name == mine.details.user_details.email
        assert KEY not in mine.model_dump_json()
        with pytest.raises(AuthApiError, match="401"):
            await asyncio.to_thread(who, "not-a-key")
