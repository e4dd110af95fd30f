"""What crosses the door: bytes in, bytes out, streams, broken replicas and clients that go away."""

import asyncio
import hashlib
import json

import aiohttp
import pytest

from reflux_inference_gateway.routing.round_robin import RoundRobin

from .http_harness import GO_ON, HANG_SECONDS, Recorder, die, door, hang, request, stream, whole

# The fields and headers that other routers lose, and the protocols' own: facts about vLLM, SGLang and OpenAI clients.
FIELDS = {
    "prompt": [1, 2, 3],
    "n": 16,
    "max_tokens": 9,
    "max_completion_tokens": 9,
    "min_tokens": 2,
    "temperature": 0.70000000000000007,
    "seed": 2**63 - 1,
    "stop": ["\u00e9\u2028", "<|end|>"],
    "logprobs": 5,
    "prompt_logprobs": 0,
    "echo": False,
    "stream_options": {"include_usage": True},
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": [1, {"b": None}]}}}],
    "return_token_ids": True,
    "return_weight_versions": True,
    "weight_version": "7",
    "priority": 3,
    "rid": "r-1",
    "kv_transfer_params": {"do_remote_decode": True, "remote_block_ids": None, "odd": [[]]},
    "bootstrap_host": "h",
    "bootstrap_port": None,
    "bootstrap_room": [1, 2**62],
    "return_logprob": True,
    "input_ids": [[4], [5]],
    "custom_params": {"x": 1e-300},
    "\U0001f600": "\t\u0000",
}
HEADERS = {
    "x-session-id": "s",
    "x-data-parallel-rank": "3",
    "x-request-id": "r",
    "x-custom": "c;d=\u00e9",
    "x-prefiller-host-port": "h:1",
    "authorization": "Bearer opaque",
}


@pytest.mark.parametrize(
    ("engine", "edits"),
    [
        ("torch", {}),
        ("vllm", {"cache_salt": "weight-version:4"}),
        ("sglang", {"extra_key": "weight-version:4"}),
    ],
)
async def test_a_replica_gets_every_field_and_header_plus_the_declared_edits(engine, edits):
    sent = {"model": "m", **FIELDS}
    raw = json.dumps(sent, indent=2).encode()
    replica = Recorder()
    async with door(replica, engine=engine) as opened:
        for entry in opened.dispatcher.table.entries():
            opened.register(entry.info.http_url, name=entry.info.name, engine=engine, version=4)
        await opened.post(data=raw, headers=HEADERS)
        await opened.post(data=raw, headers=HEADERS | {"X-Reflux-Session": "t"})
        opened.register(replica_url(opened), name="r0", engine=engine, version=5)
        await opened.post(data=raw, headers={"X-Reflux-Session": "t"})
    plain, salted, later = replica.requests
    assert plain.body == raw
    assert json.loads(salted.body) == sent | edits
    assert json.loads(later.body) == sent | edits, "a trajectory keeps the salt that it began with"
    if not edits:
        assert salted.body == raw
    expected = {name: value.encode().decode("latin-1") for name, value in HEADERS.items()}
    assert {name: plain.headers.get(name) for name in HEADERS} == expected


async def test_what_a_replica_computed_under_older_weights_does_not_count_as_cached():
    asks = []

    class Noting(RoundRobin):
        def choose(self, candidates, ask):
            asks.append(ask)
            return super().choose(candidates, ask)

    async with door(Recorder()) as opened:
        opened.dispatcher.new_policy = Noting
        for version in (4, 5):
            opened.register(replica_url(opened), name="r0", version=version)
            await opened.post(prompt="a")
        await opened.post(prompt="a", headers={"X-Reflux-Version": "5"})
    assert [ask.salt for ask in asks] == ["4", "5", "5"]


def replica_url(opened):
    return opened.dispatcher.table.entries()[0].info.http_url


async def test_every_engine_path_goes_to_a_replica_and_its_refusal_comes_back_as_it_is():
    replica = Recorder(whole(b'{"detail":"Not Found"}', 404, server="engine", x_mine="1"))
    paths = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings"]
    without_model = ["/tokenize", "/detokenize", "/inference/v1/generate", "/generate"]
    async with door(replica) as opened:
        for path in paths + without_model:
            status, headers, body = await opened.post(f"{path}?q=%20", data=b'{"model":"m"}')
            assert (status, body, headers["x-mine"]) == (404, b'{"detail":"Not Found"}', "1")
        for path in without_model:
            assert (await opened.post(path, data=b"{}"))[0] == 404
        opened.register("http://127.0.0.1:1", name="b", model="other")
        assert (await opened.error("/generate", data=b"{}"))[1]["param"] == "model"
    assert [seen.target for seen in replica.requests[:8]] == [f"{path}?q=%20" for path in paths + without_model]


async def test_hop_by_hop_headers_stay_on_their_hop():
    replica = Recorder(whole(b"{}", connection="x-mine", x_mine="1", keep_alive="timeout=9"))
    hop = "connection: keep-alive, X-Hop\r\nx-hop: 1\r\nte: trailers\r\nkeep-alive: 5\r\nproxy-authorization: no\r\n"
    async with door(replica) as opened:
        answer = await opened.talk(request(extra=hop) + request(extra="connection: close\r\n"))
    assert set(replica.requests[0].headers) == {"host", "content-length"}
    assert b"x-mine" not in answer
    assert b"keep-alive" not in answer


async def test_a_kept_connection_that_the_replica_closed_is_no_error():
    async def twice(seen, reader, writer):
        """Closes each connection at its second request, without a byte, as after an idle time."""
        if sum(one.connection == seen.connection for one in replica.requests) == 2:
            await die(seen, reader, writer)
        await whole(seen.body)(seen, reader, writer)

    replica = Recorder(twice)
    async with door(replica) as opened:
        for number in range(6):
            assert (await opened.post(user=str(number)))[0] == 200
    assert replica.connections == 6
    assert len(replica.requests) == 11, "all but the first went out twice"


async def test_a_new_connection_that_breaks_moves_the_request_once():
    replicas = [Recorder(die), Recorder(), Recorder(die), Recorder(die)]
    async with door(*replicas[:2]) as opened:
        assert (await opened.post())[0] == 200
    async with door(*replicas[2:]) as opened:
        status, error = await opened.error()
    assert (status, error["code"]) == (502, "generation_lost")
    assert [len(replica.requests) for replica in replicas] == [1, 1, 1, 1]


@pytest.mark.parametrize("answer", [hang, stream(GO_ON, then=hang)])
async def test_a_client_that_goes_away_cancels_at_the_replica(answer):
    replica = Recorder(answer)
    async with door(replica) as opened, asyncio.timeout(HANG_SECONDS):
        reader, writer = await opened.connect()
        writer.write(request())
        await replica.arrived.wait()
        if answer is not hang:
            await reader.readuntil(GO_ON)
        assert not replica.gone.is_set()
        writer.close()
        await replica.gone.wait()
        while opened.dispatcher.fleet.ledger.running:
            await asyncio.sleep(0)
    assert opened.dispatcher.fleet.ledger.cancelled == 1
    assert opened.dispatcher.fleet.ledger.balanced()


@pytest.mark.parametrize("cut", [b"", b'data: {"choices": [{"te'])
async def test_a_stream_that_breaks_ends_with_an_error_event(cut):
    replica = Recorder(stream(GO_ON, *([cut] if cut else []), then=die))
    async with door(replica) as opened:
        status, _, body = await opened.post(stream=True)
    assert status == 200
    assert body.startswith(GO_ON + cut)
    rest = body[len(GO_ON + cut) :]
    assert rest.startswith(b"\n\ndata: " if cut else b"data: "), "an event of its own, whatever came before it"
    event = rest.strip().removeprefix(b"data: ")
    assert json.loads(event)["error"]["code"] == "generation_lost"
    assert body.endswith(b"\n\n")
    assert b"finish_reason" not in body
    assert b"[DONE]" not in body


async def test_a_large_answer_that_breaks_is_seen_to_be_cut():
    async def cut(seen, reader, writer):
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 9000000\r\n\r\n")
        for _ in range(100):
            writer.write(bytes(80_000))
            await writer.drain()
        await die(seen, reader, writer)

    async with door(Recorder(cut)) as opened:
        with pytest.raises(aiohttp.ClientPayloadError):
            await opened.post()


async def test_a_large_answer_comes_whole():
    body = bytes(range(256)) * 40_000
    async with door(Recorder(whole(body))) as opened:
        assert (await opened.post())[2] == body


async def test_a_client_that_does_not_read_holds_the_replica_back():
    written = 0

    async def flood(seen, reader, writer):
        nonlocal written
        piece = b"10000\r\n" + bytes(65_536) + b"\r\n"
        try:
            while written < 256 << 20:
                writer.write(piece)
                await asyncio.wait_for(writer.drain(), 0.3)
                written += len(piece)
        except TimeoutError:
            held.set()
        writer.write(b"0\r\n\r\n")

    held = asyncio.Event()
    async with door(Recorder(stream(GO_ON, then=flood))) as opened, asyncio.timeout(HANG_SECONDS):
        reader, writer = await opened.connect()
        writer.write(request())
        await held.wait()
        assert written < 64 << 20
        await reader.readuntil(b"\r\n0\r\n\r\n") if written < 1 << 15 else await read_until_end(reader)
        writer.close()


async def read_until_end(reader):
    tail = b""
    while not tail.endswith(b"\r\n0\r\n\r\n"):
        tail = (tail + await reader.read(1 << 20))[-7:]


async def test_answers_without_a_length_interim_answers_and_old_clients():
    async def until_close(seen, reader, writer):
        writer.write(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.0 200 OK\r\ncontent-type: text/x\r\n\r\nabc")
        writer.close()
        await writer.wait_closed()
        raise ConnectionResetError

    async with door(Recorder(until_close)) as opened:
        status, headers, body = await opened.post()
        assert (status, headers["content-type"], body) == (200, "text/x", b"abc")
    async with door(Recorder(stream(GO_ON, GO_ON))) as opened:
        answer = await opened.talk(request().replace(b"HTTP/1.1", b"HTTP/1.0"))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert body == GO_ON * 2


async def test_requests_sent_ahead_are_answered_in_their_order():
    async def echo(seen, reader, writer):
        if seen.body.endswith(b'"0"}'):
            await asyncio.sleep(0.02)
        await whole(seen.body)(seen, reader, writer)

    bodies = [b'{"model": "m", "user": "%d"}' % number for number in range(40)]
    async with door(Recorder(echo)) as opened:
        answer = await opened.talk(
            b"".join(map(request, bodies)) + request(method="GET", extra="connection: close\r\n")
        )
    parts = answer.split(b"HTTP/1.1 ")[1:]
    assert [part.rpartition(b"\r\n\r\n")[2] for part in parts[:-1]] == bodies
    assert parts[-1].startswith(b"405")


async def test_many_clients_get_their_own_answers_over_few_connections():
    async def echo(seen, reader, writer):
        digest = hashlib.sha256(seen.body).hexdigest().encode()
        await (whole(digest) if len(seen.body) % 2 else stream(digest))(seen, reader, writer)

    replicas = [Recorder(echo), Recorder(echo)]
    async with door(*replicas) as opened:

        async def client(number):
            for turn in range(10):
                body = json.dumps({"model": "m", "user": f"{number}-{turn}" * (1 + number % 3)}).encode()
                _, _, answer = await opened.post(data=body)
                assert answer.decode() == hashlib.sha256(body).hexdigest()

        await asyncio.gather(*(client(number) for number in range(16)))
        ledger = opened.dispatcher.fleet.ledger
    assert (ledger.completed, ledger.running) == (160, 0)
    assert [len(replica.requests) for replica in replicas] == [80, 80]
    assert sum(replica.connections for replica in replicas) <= 32
