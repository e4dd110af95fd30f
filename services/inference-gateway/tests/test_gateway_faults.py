"""The gateway in front of fake replicas that die, stall or refuse on command; everything else is real."""

import asyncio
import json
import random

import grpc
import pytest
from aiohttp import web

from reflux.inference_gateway.v1 import inference_gateway_service_pb2 as pb
from reflux.inference_gateway.v1.replica_pb2 import Replica
from reflux_kit.auth import mint
from reflux_kit.errors import reason_of

from .gateway_harness import FakeEngine, answers, engine_server, gateway, group, http_server


async def test_replica_that_dies_before_the_first_sample_is_replaced_once():
    dead, alive = FakeEngine("die"), FakeEngine()
    async with gateway() as door, engine_server(dead) as first, engine_server(alive) as second:
        await door.register("dead", grpc_address=first)
        await door.register("alive", grpc_address=second)
        responses = await answers(door.stub.GenerateGroup(group(), timeout=10))
    assert [response.replica for response in responses] == ["replicas/alive"] * 2
    assert dead.requests == alive.requests


async def test_replica_that_dies_after_a_sample_ends_the_group_with_a_reason():
    dead, alive = FakeEngine("die", delivered=1), FakeEngine()
    async with gateway() as door, engine_server(dead) as first, engine_server(alive) as second:
        await door.register("dead", grpc_address=first)
        await door.register("alive", grpc_address=second)
        received = []
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answers(door.stub.GenerateGroup(group(), timeout=10), received)
    assert (caught.value.code(), reason_of(caught.value)) == (grpc.StatusCode.UNAVAILABLE, "GENERATION_LOST")
    assert len(received) == 1
    assert not alive.requests


async def test_request_that_kills_two_replicas_does_not_get_a_third():
    engines = [FakeEngine("die") for _ in range(3)]
    async with (
        gateway() as door,
        engine_server(engines[0]) as a,
        engine_server(engines[1]) as b,
        engine_server(engines[2]) as c,
    ):
        for name, address in (("a", a), ("b", b), ("c", c)):
            await door.register(name, grpc_address=address)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answers(door.stub.GenerateGroup(group(), timeout=10))
    assert reason_of(caught.value) == "GENERATION_LOST"
    assert [len(engine.requests) for engine in engines] == [1, 1, 0]


async def test_min_version_waits_for_a_replica_that_has_it():
    engine = FakeEngine()
    async with gateway() as door, engine_server(engine) as address:
        replica = await door.register("a", version=3, grpc_address=address)
        call = asyncio.create_task(answers(door.stub.GenerateGroup(group(min_version=5), timeout=20)))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answers(door.stub.GenerateGroup(group("late", min_version=9), timeout=0.3))
        assert caught.value.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
        assert not call.done()
        replica.version = 5
        assert not (await door.stub.Heartbeat(pb.HeartbeatRequest(replica=replica), timeout=5)).register_again
        assert len(await asyncio.wait_for(call, 10)) == 2


async def test_nobody_in_time_is_unavailable_and_503_with_the_reason():
    async with gateway(replica_wait_seconds=0.1) as door, engine_server(FakeEngine()) as address:
        await door.register("a", version=3, grpc_address=address, http_url="http://127.0.0.1:1")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answers(door.stub.GenerateGroup(group(min_version=9), timeout=10))
        assert (caught.value.code(), reason_of(caught.value)) == (grpc.StatusCode.UNAVAILABLE, "NO_REPLICA")
        headers = {"X-Reflux-Min-Version": "9"}
        async with door.http.post("/v1/completions", json={"model": "m", "prompt": "x"}, headers=headers) as response:
            assert response.status == 503
            assert (await response.json())["error"]["code"] == "no_replica"


async def test_full_replica_is_resource_exhausted_and_a_hang_up_reaches_the_replica():
    full, hanging = FakeEngine("full"), FakeEngine("hang")
    async with gateway() as door, engine_server(full) as first, engine_server(hanging) as second:
        await door.register("full", grpc_address=first)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answers(door.stub.GenerateGroup(group(), timeout=10))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await door.stub.DeregisterReplica(pb.DeregisterReplicaRequest(name="replicas/full"), timeout=5)
        await door.register("hanging", grpc_address=second)
        call = asyncio.create_task(answers(door.stub.GenerateGroup(group("hang"), timeout=30)))
        while not hanging.requests:
            await asyncio.sleep(0.005)
        call.cancel()
        await asyncio.wait_for(hanging.cancelled.wait(), 5)


async def test_held_requests_are_bounded():
    async with gateway(max_held_requests=2) as door, engine_server(FakeEngine()) as address:
        await door.register("a", grpc_address=address, http_url="http://127.0.0.1:1")
        await door.stub.PauseFleet(pb.PauseFleetRequest(), timeout=5)
        calls = [asyncio.create_task(answers(door.stub.GenerateGroup(group(f"h{i}"), timeout=20))) for i in range(3)]
        done, _ = await asyncio.wait(calls, timeout=10, return_when=asyncio.FIRST_COMPLETED)
        error = done.pop().exception()
        assert (error.code(), reason_of(error)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
        async with door.http.post("/v1/completions", json={"model": "m", "prompt": "x"}) as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "1")
        assert (await door.stub.ResumeFleet(pb.ResumeFleetRequest(), timeout=5)).released == 2
        await asyncio.gather(*calls, return_exceptions=True)


async def test_watch_shows_pause_and_replicas_after_each_change():
    async with gateway() as door:
        stream = door.stub.WatchFleet(pb.WatchFleetRequest(), timeout=10)
        assert await stream.read() == pb.WatchFleetResponse()
        await door.register("a", grpc_address="127.0.0.1:1")
        assert [replica.name for replica in (await stream.read()).replicas] == ["replicas/a"]
        await door.stub.PauseFleet(pb.PauseFleetRequest(model_id="m"), timeout=5)
        assert list((await stream.read()).paused_models) == ["m"]
        stream.cancel()


async def test_unknown_heartbeat_asks_for_registration_and_unknown_names_are_not_found():
    async with gateway(replica_wait_seconds=0) as door:
        replica = Replica(name="replicas/x", model_id="m", grpc_address="a:1", role=Replica.ROLE_BOTH)
        assert (await door.stub.Heartbeat(pb.HeartbeatRequest(replica=replica), timeout=5)).register_again
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await door.stub.DeregisterReplica(pb.DeregisterReplicaRequest(name="replicas/x"), timeout=5)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answers(door.stub.GenerateGroup(group(), timeout=5))
        assert (caught.value.code(), reason_of(caught.value)) == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_MODEL")


async def test_body_and_headers_pass_unchanged_both_ways():
    seen = {}

    async def echo(request):
        seen["body"], seen["headers"], seen["path"] = await request.read(), request.headers, request.path_qs
        return web.Response(status=418, body=b'{"odd" :  "reply"}', headers={"X-Mine": "1", "Content-Type": "text/odd"})

    draw = random.Random(5)
    body = {"model": "m", "prompt": [1, 2], "nested": {"a": [1, {"b": None}]}, "text": "\u00e9\u2028" * 3}
    body |= {f"unknown_{i}": draw.random() for i in range(20)}
    raw = json.dumps(body, ensure_ascii=False, indent=3).encode()
    async with gateway() as door, http_server(echo) as url:
        await door.register("a", http_url=url)
        headers = {"x-session-id": "s1", "X-Custom": "c", "Connection": "keep-alive, x-hop", "x-hop": "no"}
        async with door.http.post("/v1/completions?a=%20b", data=raw, headers=headers) as response:
            assert (response.status, await response.read()) == (418, b'{"odd" :  "reply"}')
            assert (response.headers["X-Mine"], response.headers["Content-Type"]) == ("1", "text/odd")
    assert seen["body"] == raw
    assert seen["path"] == "/v1/completions?a=%20b"
    assert (seen["headers"]["x-session-id"], seen["headers"]["X-Custom"]) == ("s1", "c")
    assert "x-hop" not in seen["headers"]


async def test_large_bodies_pass_up_to_the_limit_and_are_413_above_it():
    sizes = []

    async def size(request):
        sizes.append(len(await request.read()))
        return web.json_response({})

    async with gateway(max_body_bytes=3 << 20) as door, http_server(size) as url:
        await door.register("a", http_url=url)
        for megabytes, status in ((2, 200), (4, 413)):
            body = {"model": "m", "prompt": "x" * (megabytes << 20)}
            async with door.http.post("/v1/chat/completions", json=body) as response:
                assert response.status == status
                error = (await response.json()).get("error")
        assert error["code"] == "body_too_large"
    assert len(sizes) == 1


async def test_stream_is_relayed_byte_by_byte_and_a_break_ends_with_an_error_event():
    text = 'data: {"\u00e9": 1}\n\n'.encode()

    async def broken(request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for byte in text:
            await response.write(bytes([byte]))
        request.transport.abort()
        return response

    async with gateway() as door, http_server(broken) as url:
        await door.register("a", http_url=url)
        await door.register("b", http_url=url)
        async with door.http.post("/v1/completions", json={"model": "m", "prompt": "x", "stream": True}) as response:
            raw = await response.read()
    assert raw.startswith(text)
    events = raw[len(text) :].decode().split("\n\n")
    assert json.loads(events[0].removeprefix("data: "))["error"]["code"] == "generation_lost"
    assert events[1:] == [""]


async def test_http_request_moves_to_another_replica_when_its_own_never_answers():
    async def dies(request):
        request.transport.abort()
        return web.Response()

    async def lives(request):
        return web.json_response({"ok": True})

    async with gateway() as door, http_server(dies) as first, http_server(lives) as second:
        await door.register("dead", http_url=first)
        await door.register("alive", http_url=second)
        for _ in range(2):
            async with door.http.post("/v1/completions", json={"model": "m", "prompt": "x"}) as response:
                assert await response.json() == {"ok": True}


async def test_requests_of_a_replica_that_goes_silent_move_to_another():
    silent, started = FakeEngine("hang"), asyncio.Event()

    async def hangs(request):
        started.set()
        await asyncio.sleep(60)
        return web.Response()

    async def lives(request):
        return web.json_response({"ok": True})

    fast = {"heartbeat_seconds": 0.05, "replica_expiry_seconds": 0.3, "replica_abandon_seconds": 0.4}
    async with (
        gateway(**fast) as door,
        engine_server(silent) as first,
        engine_server(FakeEngine()) as second,
        http_server(hangs) as first_url,
        http_server(lives) as second_url,
    ):
        await door.register("silent", grpc_address=first, http_url=first_url)
        one = asyncio.create_task(answers(door.stub.GenerateGroup(group(), timeout=20)))
        two = asyncio.create_task(door.http.post("/v1/completions", json={"model": "m", "prompt": "x"}))
        await asyncio.wait_for(started.wait(), 5)
        await door.register("alive", grpc_address=second, http_url=second_url)
        while not (one.done() and two.done()):
            replica = Replica(name="replicas/alive", model_id="m", role=Replica.ROLE_BOTH)
            replica.grpc_address, replica.http_url = second, second_url
            await door.stub.Heartbeat(pb.HeartbeatRequest(replica=replica), timeout=5)
            await asyncio.wait({one, two}, timeout=0.05)
    assert [response.replica for response in await one] == ["replicas/alive"] * 2
    assert (await two).status == 200


async def test_client_that_goes_away_cancels_upstream():
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def hangs(request):
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()
        return web.Response()

    async with gateway() as door, http_server(hangs) as url:
        await door.register("a", http_url=url)
        call = asyncio.create_task(door.http.post("/v1/completions", json={"model": "m", "prompt": "x"}))
        await asyncio.wait_for(started.wait(), 5)
        call.cancel()
        await asyncio.wait_for(cancelled.wait(), 5)


BAD_BODIES = [
    (b"", 400, None),
    (b"{", 400, None),
    (b"[1]", 400, None),
    (b'"text"', 400, None),
    (b"\xff\xfe", 400, None),
    (b"[" * 200_000, 400, None),
    (b"{}", 400, "model"),
    (b'{"model": 3}', 400, "model"),
    (b'{"model": ""}', 400, "model"),
    (b'{"model": "m", "stream": "yes"}', 400, "stream"),
    (b'{"model": "other"}', 404, "model"),
]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_bad_bodies_are_openai_errors_that_name_the_field(path):
    async with gateway() as door:
        await door.register("a", http_url="http://127.0.0.1:1")
        for body, status, field in BAD_BODIES:
            async with door.http.post(path, data=body) as response:
                error = (await response.json())["error"]
                assert (response.status, error["param"]) == (status, field), body[:40]
                assert error["message"]
                assert error["type"] in ("invalid_request_error", "not_found_error")


async def test_models_and_other_paths():
    async with gateway() as door:
        await door.register("a", model="org/m", http_url="http://127.0.0.1:1")
        for path, status in (("/v1/models", 200), ("/v1/models/org/m", 200), ("/v1/models/x", 404), ("/nope", 404)):
            async with door.http.get(path) as response:
                body = await response.json()
                assert response.status == status
                assert ("error" in body) == (status == 404)
        async with door.http.get("/v1/completions") as response:
            assert (response.status, response.headers["Allow"]) == (405, "POST")
        async with door.http.get("/healthz") as response:
            assert response.status == 200


async def test_both_doors_refuse_calls_without_the_token():
    async with gateway(stack_secret="a secret of the stack, long enough") as door:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await door.stub.ListReplicas(pb.ListReplicasRequest(), timeout=5)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        async with door.http.get("/v1/models") as response:
            assert (response.status, (await response.json())["error"]["code"]) == (401, "invalid_api_key")
        token = mint("a secret of the stack, long enough", "test")
        async with door.http.get("/v1/models", headers={"Authorization": f"Bearer {token}"}) as response:
            assert response.status == 200


async def test_a_runs_token_reaches_the_runs_own_model_only():
    secret = "a secret of the stack, long enough"

    async def answer(request):
        return web.json_response({})

    headers = {"Authorization": f"Bearer {mint(secret, 'researcher', run='mine')}"}
    async with gateway(stack_secret=secret) as door, http_server(answer) as url:
        metadata = (("authorization", f"Bearer {mint(secret, 'engine')}"),)
        for model in ("mine", "other"):
            replica = Replica(name=f"replicas/{model}", model_id=model, http_url=url, role=Replica.ROLE_BOTH)
            await door.stub.RegisterReplica(pb.RegisterReplicaRequest(replica=replica), metadata=metadata, timeout=5)
        for model, status in (("mine", 200), ("other", 403)):
            body = {"model": model, "prompt": "x"}
            async with door.http.post("/v1/completions", json=body, headers=headers) as response:
                assert response.status == status
                answered = await response.json()
            async with door.http.get(f"/v1/models/{model}", headers=headers) as response:
                assert response.status == status
        assert (answered["error"]["type"], answered["error"]["code"]) == ("permission_error", "permission_denied")


async def test_every_method_answers_empty_and_random_requests_with_a_status(caplog):
    draw = random.Random(11)
    messages = [b""] + [draw.randbytes(draw.randint(1, 60)) for _ in range(12)]
    service = pb.DESCRIPTOR.services_by_name["InferenceGatewayService"]
    allowed = {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "UNAVAILABLE", "DEADLINE_EXCEEDED"}
    async with gateway(replica_wait_seconds=0.01) as door:
        for method in service.methods:
            for raw in messages:
                code = await raw_call(door.stub, method, raw)
                assert code in allowed, (method.name, raw, code)
    assert "Traceback" not in caplog.text
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def raw_call(stub, method, raw):
    """Sends bytes as they are; a stream counts as OK once it has answered."""
    call = getattr(stub, method.name)
    call._request_serializer = bytes
    try:
        if method.server_streaming:
            stream = call(raw, timeout=0.5)
            await stream.read()
            stream.cancel()
        else:
            await call(raw, timeout=5)
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"
