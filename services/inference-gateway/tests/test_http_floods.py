"""Clients that ask without reading, and bodies that are nested for the sake of it."""

import asyncio

import pytest

from reflux_inference_gateway.http.connection import ClientConnection
from reflux_inference_gateway.http.server import HttpLimits, HttpServer
from reflux_inference_gateway.http.shadow import read_shadow


class Transport:
    """Keeps what is written, and whether the client is listened to."""

    def __init__(self):
        self.reading, self.written = True, b""

    def write(self, data):
        self.written += data

    def pause_reading(self):
        self.reading = False

    def resume_reading(self):
        self.reading = True


class Target:
    """Answers each request with its target."""

    def __init__(self):
        self.served = []

    def screen(self, request):
        return None

    async def serve(self, exchange):
        self.served.append(exchange.request.target)
        exchange.respond(200, [], exchange.request.target)

    def fail(self, exchange, error):
        raise AssertionError(error)


async def turns():
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_client_that_reads_no_answer_gets_no_further_one_until_it_does():
    handler, transport = Target(), Transport()
    connection = ClientConnection(HttpServer(handler, HttpLimits(), lambda _: None))
    connection.connection_made(transport)
    connection.data_received(b"GET /1 HTTP/1.1\r\n\r\nGET /2 HTTP/1.1\r\n\r\n")
    connection.pause_writing()
    await turns()
    connection.data_received(b"GET /3 HTTP/1.1\r\n\r\n")
    await turns()
    assert handler.served == [b"/1"]
    assert not transport.reading
    connection.resume_writing()
    await turns()
    assert handler.served == [b"/1", b"/2", b"/3"]
    assert transport.reading


@pytest.mark.parametrize("depth", [1, 20, 300, 1000])
@pytest.mark.parametrize("level", [(b"[", b"]"), (b'[{"content":', b"}]")])
def test_a_nested_prompt_is_the_engines_business_and_no_failure_of_the_gateway(depth, level):
    depth //= level[0].count(b"{") + 1
    body = b'{"model": "m", "prompt": ' + level[0] * depth + b'"a"' + level[1] * depth + b"}"
    shadow = read_shadow(body)
    assert shadow.num_prompt_tokens == 1
    assert len(shadow.prompt_key()) < len(body)
