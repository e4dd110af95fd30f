"""The HTTP face: JSON, server-sent events, and who may call it."""

import json

import aiohttp
import pytest
from trainer_world import CONFIG

from reflux.common.v1.common_pb2 import Resources
from reflux.scheduler.v1.scheduler_service_pb2 import TopologyNode


async def test_the_http_api_speaks_json_and_server_sent_events(world):
    json_type = {"Content-Type": "application/json"}
    async with world.trainer() as stub, aiohttp.ClientSession() as http:
        async with http.post(world.http + "/v1/runs", json={"config": {"rl": {"batch_size": 100}}}) as refused:
            body = await refused.json()
            assert (refused.status, body["error"]["field"]) == (400, "rl.batch_size")
            assert "256" in body["error"]["works"]
        async with http.post(world.http + "/v1/runs", data="{", headers=json_type) as broken:
            assert broken.status == 400
        async with http.get(world.http + "/v1/runs/none") as missing:
            assert missing.status == 404
        async with http.post(world.http + "/v1/runs", json={"config": CONFIG}) as created:
            run = (await created.json())["name"]
        async with http.post(f"{world.http}/v1/{run}/resume") as wrong:
            assert (wrong.status, (await wrong.json())["error"]["reason"]) == (409, "WRONG_STATE")
        async with world.worker(run.removeprefix("runs/")):
            await world.announce(stub, run.removeprefix("runs/"))
            async with http.get(f"{world.http}/v1/{run}/events") as stream:
                text = await stream.text()
        last = json.loads(text.strip().split("data: ")[-1])
        assert last["state"] == "SUCCEEDED"
        async with http.get(world.http + "/v1/runs?page_size=1") as listed:
            assert (await listed.json())["runs"][0]["step"] == 4
        async with http.get(world.http + "/") as page:
            assert "reflux runs" in await page.text()


async def test_a_run_that_no_node_holds_is_refused_with_the_arithmetic(world):
    large = {"model": {"hidden_size": 8192, "num_layers": 80}}
    world.scheduler.nodes = [TopologyNode(capacity=Resources(memory_bytes=size << 30)) for size in (16, 64)]
    async with world.trainer(), aiohttp.ClientSession() as http:
        async with http.post(world.http + "/v1/runs", json={"config": CONFIG | large}) as refused:
            error = (await refused.json())["error"]
        assert (refused.status, error["field"]) == (400, "model.hidden_size")
        assert "the learner needs about" in error["message"]
        assert "the largest node has 64.00 GiB" in error["message"]
        assert "model.lora_rank" in error["works"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "https://elsewhere.example"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "rebound.example"}, 403),
        ({"Content-Type": "text/plain"}, 415),
    ],
)
async def test_a_page_of_another_origin_cannot_start_a_run(world, headers, status):
    async with world.trainer(), aiohttp.ClientSession() as http:
        sent = {"Content-Type": "application/json"} | headers
        async with http.post(world.http + "/v1/runs", data=json.dumps({"config": CONFIG}), headers=sent) as refused:
            assert (refused.status, (await refused.json())["error"]["reason"]) == (status, "HTTP_ERROR")
        async with http.get(world.http + "/v1/runs", headers={"Origin": world.http}) as own:
            assert (await own.json())["runs"] == []


async def test_http_calls_without_the_token_are_refused(world):
    async with world.trainer(stack_secret="s"), aiohttp.ClientSession() as http:
        async with http.get(world.http + "/v1/runs") as refused:
            assert (refused.status, (await refused.json())["error"]["reason"]) == (401, "UNAUTHENTICATED")
        async with http.get(world.http + "/") as page:
            assert page.status == 200
