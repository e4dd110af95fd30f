"""A reflux verifier behind /verify, called over the real service, and by our own client of that contract."""

import contextlib
import json

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from reflux_client.verify_door import VerifyDoor, rows
from reflux_kit.channel import open_channel
from reflux_kit.server import running
from reflux_sandbox.main import build
from reflux_sandbox.remote.http import HttpBackend, verify_request
from reflux_sandbox.remote.settings import HttpSettings
from reflux_sandbox.settings import SandboxSettings

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Task:
    name, end_word = "test", "<eos>"

    def problem(self, split, index):
        return (split, index)

    def prompt_text(self, problem):
        return f"{problem[0]} {problem[1]}"

    def truth(self, problem):
        return {"n": problem[1]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url(valkey_url, here):
    settings = SandboxSettings(
        listen="127.0.0.1:0", redis_url=valkey_url, isolation="process", graders="sample_graders",
        import_folders=(here,), idle_children=1, drain_seconds=0,
    )  # fmt: skip
    async with contextlib.AsyncExitStack() as stack:
        service = await stack.enter_async_context(build(settings))
        bound = await stack.enter_async_context(running(service, settings))
        channel = await stack.enter_async_context(open_channel(bound.grpc))
        runner = web.AppRunner(VerifyDoor(channel, "door", 60.0).application(), shutdown_timeout=0.1)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"


async def test_rows_go_out_and_grades_come_back_over_the_contract(url):
    (row, other) = rows(Task(), "length", "train", 2)
    assert row["responses_create_params"] == {"input": "train 0"}
    backend = HttpBackend({"door/verify": HttpSettings(url=url, version="1")})
    await backend.start()
    async with backend.session(backend.verifiers[0]) as session:
        grades = (await session.grade("door/verify", json.dumps(row), ["abc", "abc <eos>"]))["grades"]
        other["reflux"]["verifier"] = "test/nothing"
        (refused,) = (await session.grade("door/verify", json.dumps(other), ["abc"]))["grades"]
    await backend.close()
    assert [grade["reward"] for grade in grades] == [9.0, 9.0]  # the end word is there once
    assert grades[0]["figures"]["pid"] > 0
    assert refused["outcome"] == "infra_error"
    assert "answered 422: " in refused["message"]


async def test_bad_rows_are_refused_and_the_door_says_that_it_keeps_no_state(url):
    good = verify_request(next(rows(Task(), "length", "train", 1)), "a")
    bad = [
        {},
        [],
        "x",
        good | {"reflux": {}},
        good | {"response": {"output": []}},
        good | {"response": {"output": [1]}},
    ]
    async with aiohttp.ClientSession(url) as client:
        for body in bad:
            async with client.post("/verify", json=body) as answer:
                assert answer.status == 422, body
        async with client.post("/verify", data=b"\xff{") as answer:
            assert answer.status in (415, 422)
        async with client.get("/reverify_mode") as answer:
            assert await answer.json() == "stateless"
        async with client.post("/verify", json=good) as answer:
            document = await answer.json()
    assert (document["reward"], document["mask_sample"], document["outcome"]) == (7.0, False, "scored")
    assert document["response"] == good["response"]
