"""`make load-gateway` against a server that answers, refuses and breaks off in known shares."""

import asyncio
import json
import os
import sys
from itertools import count
from pathlib import Path

from aiohttp import web

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "deploy" / "load" / "load_gateway.py"


async def load(url, *arguments, token=""):
    """Exit status, the last line's figures and all of stderr."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(SCRIPT),
        url,
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "REFLUX_TOKEN": token},
    )
    out, errors = await asyncio.wait_for(process.communicate(), 60)
    lines = out.decode().strip().splitlines()
    return process.returncode, json.loads(lines[-1]) if lines else {}, errors.decode()


class Server:
    """Every fifth stream breaks off, every fifth whole answer is refused; keeps what came."""

    def __init__(self):
        self.bodies, self.tokens, self._numbers = [], set(), {True: count(1), False: count(1)}

    async def models(self, request):
        return web.json_response({"data": [{"id": "first"}, {"id": "second"}]})

    async def completions(self, request):
        body = await request.json()
        self.bodies.append(body)
        self.tokens.add(request.headers.get("Authorization"))
        number = next(self._numbers[bool(body.get("stream"))])
        if not body.get("stream"):
            status = 429 if number % 5 == 0 else 200
            return web.json_response({"choices": [{}], "usage": {"completion_tokens": 4}}, status=status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(4):
            await response.write(b'data: {"choices": [{"index": 0}]}\n\n')
        await response.write(b"" if number % 5 == 0 else b"data: [DONE]\n\n")
        return response


async def serve(server):
    app = web.Application()
    app.add_routes([web.get("/v1/models", server.models), web.post("/v1/completions", server.completions)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


async def test_answers_refusals_and_broken_streams_are_counted_and_reported(tmp_path):
    server, report = Server(), tmp_path / "load.html"
    runner, url = await serve(server)
    try:
        arguments = ("--rate", "200", "--duration", "0.5", "--mix", "smoke", "--seed", "3", "--report", str(report))
        status, figures, errors = await load(url, *arguments, token="secret-token")
    finally:
        await runner.cleanup()
    streams = sum(bool(body.get("stream")) for body in server.bodies)
    refused = (len(server.bodies) - streams) // 5
    assert errors == ""
    assert figures["requests"] == len(server.bodies) > 40
    assert figures["failed"] == streams // 5 + refused
    assert status == 1
    assert {body["model"] for body in server.bodies} == {"first"}
    assert len({body["prompt"] for body in server.bodies}) > 20
    assert server.tokens == {"Bearer secret-token"}
    assert 0 < figures["first_token_p50_ms"] <= figures["total_max_ms"]
    page = report.read_text()
    assert "status 429" in page
    assert "stream without [DONE]" in page
    assert "secret-token" not in page
    assert "<script" not in page
    assert 'src="http' not in page


async def test_what_cannot_start_is_one_line_and_status_2(tmp_path):
    report = ("--report", str(tmp_path / "load.html"))
    for arguments, told in (
        (("http://127.0.0.1:1", "--mix", "nothing"), "there is no mix 'nothing'"),
        (("http://127.0.0.1:1",), "Cannot connect"),
        (("http://127.0.0.1:1", "--rate", "0"), "rate and duration must be above 0"),
    ):
        status, _, errors = await load(*arguments, *report)
        assert status == 2
        assert told in errors
        assert len(errors.splitlines()) == 1
