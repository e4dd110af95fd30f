"""Verifiers behind the /verify contract, against a real server that behaves and misbehaves."""

import asyncio
import json
import socket

import pytest
from aiohttp import web

from reflux_sandbox.remote.http import HttpBackend, parse_verdict, verify_request
from reflux_sandbox.remote.settings import HttpSettings

NAME = "gym/verify"


class Gym:
    """A resources server: exact match against the row's answer; `script` replaces the next answers of /verify."""

    def __init__(self):
        self.script = []
        self.bodies = []
        self.seeds = 0
        self.url = ""

    async def seed(self, request):
        self.seeds += 1
        response = web.json_response({})
        response.set_cookie("session", f"s{self.seeds}")
        return response

    async def verify(self, request):
        body = await request.json()
        self.bodies.append((body, dict(request.cookies), request.headers.get("Authorization", "")))
        if self.script:
            return await self.script.pop(0)()
        text = body["response"]["output"][0]["content"][0]["text"]
        return web.json_response({**body, "reward": float(text == body["expected"]), "accuracy": 0.5, "note": "n"})


@pytest.fixture
async def gym():
    server = Gym()
    app = web.Application()
    app.router.add_post("/seed_session", server.seed)
    app.router.add_post("/verify", server.verify)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield server
    await runner.cleanup()


async def grade(url, *answers, **changes):
    backend = HttpBackend({NAME: HttpSettings(url=url, version="7", attempt_seconds=60, **changes)})
    await backend.start()
    try:
        (info,) = backend.verifiers
        async with backend.session(info) as session:
            return (await session.grade(NAME, json.dumps({"expected": "4", "id": 1}), list(answers)))["grades"]
    finally:
        await backend.close()


def says(status=200, text="", **document):
    async def answer():
        return web.Response(status=status, text=text or json.dumps(document), content_type="application/json")

    return answer


async def test_answers_are_verified_with_their_row_session_and_token(gym):
    right, wrong = await grade(gym.url, "4", "5", token="secret")
    assert (right["outcome"], right["reward"], right["figures"]) == ("scored", 1.0, {"id": 1.0, "accuracy": 0.5})
    assert wrong["reward"] == 0.0
    body, _, authorization = gym.bodies[0]
    assert body["responses_create_params"] == {"input": []}
    assert body["response"]["output"][0]["role"] == "assistant"
    assert {cookies["session"] for _, cookies, _ in gym.bodies} == {"s1", "s2"}
    assert authorization == "Bearer secret"
    assert gym.seeds == 2


async def test_a_server_that_fails_for_a_while_is_asked_again(gym):
    gym.script = [says(500), says(429)]
    assert [row["reward"] for row in await grade(gym.url, "4", seed_session=False)] == [1.0]
    assert len(gym.bodies) == 3
    assert gym.seeds == 0


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (says(422, text="no such field"), "answered 422: no such field"),
        (says(302), "answered 302"),
        (says(text="[1]"), "JSON object"),
        (says(text="{" * 100), "JSON object"),
        (says(text='{"reward": NaN}'), "reward is nan"),
        (says(text='{"reward": 1' + "0" * 400 + "}"), "reward is 1"),
        (says(reward=True), "reward is True"),
        (says(reward="1"), "reward is 1"),
        (says(), "reward is None"),
        (says(reward=0.0, mask_sample=True, failure_kind="oom", failure_reason="killed"), "oom, killed"),
        (says(reward=1.0, padding="x" * 5000), "more than 2048 bytes"),
    ],
)
async def test_what_is_no_measurement_is_unknown_and_never_zero(gym, answer, reason):
    gym.script = [answer]
    (row,) = await grade(gym.url, "4", most_response_bytes=2048)
    assert row["outcome"] == "infra_error"
    assert reason in row["message"]
    assert len(gym.bodies) == 1


async def test_one_bad_answer_does_not_hide_the_grade_of_its_neighbour(gym):
    gym.script = [says(422)]
    rows = await grade(gym.url, "4", "4", parallel=1)
    assert [row["outcome"] for row in rows] == ["infra_error", "scored"]


async def test_a_server_that_is_away_or_hangs_is_unknown_after_bounded_attempts(gym):
    with socket.socket() as deaf:  # bound and not listening: nobody else can answer there
        deaf.bind(("127.0.0.1", 0))
        (away,) = await grade(f"http://127.0.0.1:{deaf.getsockname()[1]}", "4", attempts=2)
    assert away["outcome"] == "infra_error"
    assert "attempt 2 of 2" in away["message"]
    gym.script = [lambda: asyncio.sleep(60)]
    backend = HttpBackend({NAME: HttpSettings(url=gym.url, version="7", attempts=1, attempt_seconds=0.2)})
    await backend.start()
    async with backend.session(backend.verifiers[0]) as session:
        hung = await session.grade(NAME, "{}", ["4"])
    await backend.close()
    assert "no verdict within 0.2 s" in hung["grades"][0]["message"]


def test_the_row_keeps_its_own_parameters_and_objectives_become_figures():
    row = {"responses_create_params": {"input": "q"}, "response": "stale"}
    body = verify_request(row, "text")
    assert body["responses_create_params"] == {"input": "q"}
    assert body["response"]["output"][0]["content"][0]["text"] == "text"
    verdict = parse_verdict({"reward": 1, "reward_components": {"format": 0.5}, "flag": True})
    assert verdict["figures"] == {"format": 0.5}
