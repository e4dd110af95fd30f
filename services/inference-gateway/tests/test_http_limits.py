"""Clients that send too much, too slowly or nonsense: a clear answer, bounded memory, nobody else disturbed."""

import asyncio
import json
import resource
from contextlib import suppress
from pathlib import Path

import pytest

from .http_harness import GO_ON, HANG_SECONDS, Recorder, door, hang, request, stream, whole

CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


def status_and_code(answer):
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["code"]


async def test_too_large_heads_are_431_and_close():
    async with door(Recorder()) as opened:
        many = "".join(f"x-{number}: 1\r\n" for number in range(300))
        for flood in (
            request(extra=many),
            request(extra=f"x-long: {'y' * 400_000}\r\n"),
            request(path="/" + "z" * 400_000),
        ):
            assert status_and_code(await opened.talk(flood)) == (431, "head_too_large")
        endless = b"GET / HTTP/1.1\r\nx-endless: " + b"y" * 400_000
        assert status_and_code(await opened.talk(endless)) == (431, "head_too_large")


async def test_a_chunked_body_over_the_limit_is_cut_while_it_is_read():
    replica = Recorder()
    async with door(replica, max_body_bytes=100_000) as opened, asyncio.timeout(HANG_SECONDS):
        reader, writer = await opened.connect()
        writer.write(CHUNKED)
        sent = 0
        answer = asyncio.create_task(reader.read())
        while not answer.done() and sent < 1 << 28:
            writer.write(b"2000\r\n" + bytes(0x2000) + b"\r\n")
            sent += 0x2000
            try:
                await writer.drain()
            except ConnectionError:
                break
            await asyncio.sleep(0)
        writer.close()
        assert status_and_code(await answer) == (413, "body_too_large")
    assert sent < 1 << 28
    assert not replica.requests


async def test_one_byte_chunks_are_taken_and_endless_framing_is_not():
    body = b'{"model": "m", "user": "%b"}' % (b"x" * 20_000)
    replica = Recorder()
    async with door(replica, max_body_bytes=50_000) as opened:
        tiny = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
        answer = await opened.talk(CHUNKED.replace(b"host", b"connection: close\r\nhost") + tiny + b"0\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200")
        assert replica.requests[0].body == body
        padded = b"1;%b\r\nx\r\n" % (b"e" * 1000)
        assert status_and_code(await opened.talk(CHUNKED + padded * 1500)) == (413, "body_too_large")


async def test_bodies_that_are_held_are_bounded_together():
    async with door(Recorder(hang), max_held_bytes=100_000) as opened:
        filler = b'{"model": "m", "user": "%b"}' % (b"x" * 60_000)
        _, first = await opened.connect()
        first.write(request(filler))
        while not opened.dispatcher.fleet.ledger.running:
            await asyncio.sleep(0)
        assert status_and_code(await opened.talk(request(filler))) == (429, "overloaded")
        first.close()
        while opened.dispatcher.fleet.ledger.running:
            await asyncio.sleep(0)
        _, again = await opened.connect()
        again.write(request(filler))
        async with asyncio.timeout(HANG_SECONDS):
            while not opened.dispatcher.fleet.ledger.running:
                await asyncio.sleep(0)
        again.close()


@pytest.mark.parametrize(
    "part", [b"POST /v1/comple", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n", request()[:-3], CHUNKED + b"5\r\nab"]
)
async def test_a_slow_client_is_cut_off_and_others_are_served(part):
    replica = Recorder()
    async with door(replica, head_seconds=0.3, body_seconds=0.3) as opened:
        slow = asyncio.create_task(opened.talk(part))
        while not slow.done():
            assert (await opened.talk(request(extra="connection: close\r\n"))).startswith(b"HTTP/1.1 200")
            await asyncio.sleep(0.01)
        assert status_and_code(await slow) == (408, "request_timeout")


async def test_idle_connections_end_and_never_keep_others_out():
    async with door(Recorder(), max_connections=8) as opened:
        idle = [await opened.connect() for _ in range(30)]
        assert (await opened.post())[0] == 200
        async with asyncio.timeout(HANG_SECONDS):
            for reader, _ in idle[:20]:
                with suppress(ConnectionError):
                    assert await reader.read() == b""
        for _, writer in idle:
            writer.close()
    async with door(Recorder(), idle_seconds=0.3) as opened:
        assert await opened.talk(b"") == b""
        assert (await opened.talk(request())).startswith(b"HTTP/1.1 200"), "a served one ends as well"


async def test_a_request_ends_in_time_whether_it_streams_or_not():
    async with door(Recorder(hang), request_seconds=0.3) as opened:
        assert (await opened.error())[1]["code"] == "deadline_exceeded"
        assert opened.dispatcher.fleet.ledger.running == 0
    replica = Recorder(stream(GO_ON, then=hang))
    async with door(replica, request_seconds=0.3) as opened:
        _, _, body = await opened.post(stream=True)
        assert json.loads(body.removeprefix(GO_ON).removeprefix(b"data: "))["error"]["code"] == "deadline_exceeded"
        async with asyncio.timeout(HANG_SECONDS):
            await replica.gone.wait()


BAD = [
    (b"", None),
    (b'{"model": "m", "user": "\xff"}', None),
    (b'{"model": "m"', None),
    (b'{"a":' * 100_000, None),
    (b"[" * 500_000 + b"]" * 500_000, None),
    (b'{"model": "m", "n": 0}', "n"),
    (b'{"model": "m", "n": 1000000}', "n"),
    (b'{"model": "m", "n": 1.5}', "n"),
    (b'{"model": "m", "temperature": -0.1}', "temperature"),
    (b'{"model": "m", "sampling_params": {"n": -3}}', "n"),
    (b'{"model": "m", "stream": "true"}', "stream"),
    (b'{"model": null}', "model"),
]


async def test_nonsense_is_400_that_names_the_field_and_reaches_no_replica():
    replica = Recorder()
    async with door(replica) as opened:
        for body, field in BAD:
            status, error = await opened.error(data=body)
            assert (status, error["param"], error["type"]) == (400, field, "invalid_request_error"), body[:60]
        for header, value in (("Min-Version", "x"), ("Max-Lag", "-1"), ("Version", "1.5"), ("Session", "s" * 300)):
            name = f"X-Reflux-{header}"
            assert (await opened.error(headers={name: value}))[1]["param"] == name
        for raw in (
            b"\x00\x01\x02\r\n\r\n",
            b"\x16\x03\x01\x02\x00",
            b"POST / HTTP/9.9\r\n\r\n",
            request(extra="a b: c\r\n"),
        ):
            assert (await opened.talk(raw)).startswith(b"HTTP/1.1 400")
        smuggled = request(extra="transfer-encoding: chunked\r\n")
        assert (await opened.talk(smuggled)).startswith(b"HTTP/1.1 400")
    assert not replica.requests


async def test_a_truncated_body_goes_nowhere_and_an_announced_one_is_asked_for():
    replica = Recorder(whole(b"{}"))
    async with door(replica) as opened:
        _, writer = await opened.connect()
        writer.write(request()[:-1])
        writer.close()
        reader, writer = await opened.connect()
        head, _, body = request(extra="expect: 100-continue\r\n").partition(b"\r\n\r\n")
        writer.write(head + b"\r\n\r\n")
        async with asyncio.timeout(HANG_SECONDS):
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(body)
            assert (await reader.readuntil(b"{}")).startswith(b"HTTP/1.1 200")
        writer.close()
    assert len(replica.requests) == 1


async def test_unknown_paths_methods_and_models():
    async with door(Recorder()) as opened:
        for method, path, status in (
            ("GET", "/v1/completions", 405),
            ("POST", "/v1/models", 405),
            ("DELETE", "/healthz", 405),
            ("GET", "/v1/models/%6d", 200),
            ("GET", "/v1/models/n", 404),
            ("GET", "/", 404),
            ("CONNECT", "x:1", 404),
        ):
            answer = await opened.talk(f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
            assert answer.startswith(b"HTTP/1.1 %d" % status), (method, path)
        head = await opened.talk(b"HEAD /healthz HTTP/1.1\r\nconnection: close\r\n\r\n")
        assert head.endswith(b"\r\n\r\n")
        upgrade = b"GET /healthz HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\nPRI * HTTP/2.0\r\n\r\n"
        assert (await opened.talk(upgrade)).count(b"HTTP/1.1 200") == 1
        assert (await opened.error(model="n"))[1]["code"] == "model_not_found"


async def test_a_refused_upload_gets_its_answer_although_it_goes_on_sending():
    async with door(Recorder()) as opened:
        answer = await opened.talk(request(bytes(3_000_000), path="/nowhere"))
    assert status_and_code(answer) == (404, "not_found")


@pytest.mark.slow
async def test_thousands_of_idle_and_slow_connections_cost_little_and_disturb_nobody():
    async with door(Recorder()) as opened:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        count = min(10_000, files // 2 - 1000)
        before = resident_bytes()
        crowd = []
        for number in range(count):
            _, writer = await opened.connect()
            if number % 2:
                writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n")
            crowd.append(writer)
        for _ in range(100):
            assert (await opened.post())[0] == 200
        assert resident_bytes() - before < 40_000 * count, "both ends of each"
        for writer in crowd:
            writer.close()


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
