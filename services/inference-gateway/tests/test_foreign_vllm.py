"""The adapter's half of vLLM: which routes it calls, in which order, and what it makes of their answers."""

import base64
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from reflux_inference_gateway.foreign.base import EngineFailed, EngineUnfit
from reflux_inference_gateway.foreign.http_client import engine_http
from reflux_inference_gateway.foreign.vllm import VllmSink
from reflux_transfer.client.layouts import single_rank
from reflux_transfer.client.offer import Offer, Route, SourceRegion
from reflux_transfer.client.wire import scope_of
from reflux_transfer.errors import ReadCancelled, WrongHandle
from reflux_transfer.handles import ANYWHERE, Scope, seal
from reflux_transfer.layout import Layout
from reflux_weightplan.wire import parse

LAYOUT = single_rank(Layout.from_shapes({"a": ([2, 3], "bfloat16")}))
OFFER = Offer(7, 41, "full", (SourceRegion(0, b"handle", "shm", 5),), Route(LAYOUT, LAYOUT, 0), 1e9, 20.0)
COMMIT = ["/pause?mode=keep", "/start_weight_update", "/update_weights", "/finish_weight_update"]
RESET = "/reset_prefix_cache?reset_running_requests=true"
FENCE = "/pause?mode=abort"


class FakeVllm:
    """Answers 200 to every route of vLLM; `answers` replaces single ones by functions of the body."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.bodies: dict[str, Any] = {}
        self.statuses: list[list[dict[str, Any]]] = []
        self.answers: dict[str, Callable[[], tuple[int, Any]]] = {
            "/collective_rpc": lambda: (200, {"results": self.statuses.pop(0) if self.statuses else [{}]}),
            "/reset_prefix_cache": lambda: (200, {"success": True}),
            "/weight_info": lambda: (200, {"weight_version": "7"}),
        }

    async def answer(self, request: web.Request) -> web.Response:
        query = f"?{request.query_string}" if request.query_string else ""
        self.calls.append(request.path + query)
        if request.can_read_body:
            self.bodies[request.path] = await request.json()
        status, content = self.answers.get(request.path, lambda: (200, {"message": "done"}))()
        return web.json_response(content, status=status)

    def fails(self, path: str, *times: int) -> None:
        """Has a route answer 500, once or as often as it is asked."""
        left = list(times)
        self.answers[path] = lambda: (left.pop(0) if left else 200 if times else 500, {"error": "out of memory"})


@pytest.fixture
def fake() -> FakeVllm:
    return FakeVllm()


@asynccontextmanager
async def sink_of(fake: FakeVllm, scope: Scope = ANYWHERE) -> AsyncIterator[VllmSink]:
    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", fake.answer)
    async with TestServer(app) as server, engine_http(str(server.make_url("")), "") as http:
        yield VllmSink(http, scope)


def ready(fingerprint: str = "00000000000000ff", **more: object) -> dict[str, Any]:
    took = {"bytes": 12, "slices": 1, "seconds": 0.5}
    return {"state": "ready", "epoch": OFFER.epoch, "fingerprint": fingerprint, **took, **more}


async def test_a_commit_pauses_loads_names_the_version_drops_old_keys_and_resumes(fake) -> None:
    async with sink_of(fake) as sink:
        assert await sink.commit(7, 41) > 0
        assert await sink.version() == "7"
    assert fake.calls == [*COMMIT, RESET, "/resume", "/weight_info"]
    assert fake.bodies["/update_weights"] == {"update_info": {"epoch": 41}}
    assert fake.bodies["/finish_weight_update"] == {"weight_version": "7"}


@pytest.mark.parametrize("path", ["/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"])
async def test_a_commit_that_fails_leaves_the_engine_stopped(fake, path: str) -> None:
    fake.fails(path)
    async with sink_of(fake) as sink:
        with pytest.raises(EngineFailed, match="out of memory"):
            await sink.commit(7, 41)
    assert fake.calls[-1] == FENCE
    assert "/resume" not in fake.calls or path == "/resume"


async def test_old_keys_that_cannot_be_dropped_are_a_failure(fake) -> None:
    fake.answers["/reset_prefix_cache"] = lambda: (200, {"success": False})
    async with sink_of(fake) as sink:
        with pytest.raises(EngineFailed, match="reset_prefix_cache"):
            await sink.commit(7, 41)
    assert fake.calls[-2:] == [RESET, FENCE]


async def test_a_session_that_a_dead_adapter_left_open_is_ended_first(fake) -> None:
    fake.fails("/start_weight_update", 500, 200)
    async with sink_of(fake) as sink:
        await sink.commit(7, 41)
    start, finish = "/start_weight_update", "/finish_weight_update"
    assert fake.calls == ["/pause?mode=keep", start, finish, start, *COMMIT[2:], RESET, "/resume"]


async def test_an_offer_is_pulled_by_every_worker_and_reported_as_one(fake) -> None:
    pulling = {"state": "pulling", "epoch": 41}
    fake.statuses = [[pulling, pulling], [ready(), pulling], [ready(), ready(seconds=2.0)]]
    async with sink_of(fake) as sink:
        received = await sink.receive(OFFER, lambda: False)
    assert (received.fingerprint, received.bytes, received.seconds) == (0xFF, 24, 2.0)


async def test_workers_are_handed_offers_of_their_run_only(fake) -> None:
    secret = "a secret of the stack"

    def offer(scope: Scope, generation: int = 3) -> Offer:
        region = SourceRegion(0, seal("shm", {}, replace(scope, generation=3)), "shm", generation)
        return replace(OFFER, regions=(region,))

    async with sink_of(fake, scope_of("m", secret)) as sink:
        forged = offer(replace(scope_of("m"), key=b"guessed"))
        for wrong in (forged, offer(scope_of("m")), offer(scope_of("n", secret)), offer(scope_of("m", secret), 4)):
            with pytest.raises(WrongHandle):
                await sink.receive(wrong, lambda: False)
        assert fake.calls == []
        fake.statuses = [[ready()]]
        assert (await sink.receive(offer(scope_of("m", secret)), lambda: False)).fingerprint == 0xFF


@pytest.mark.parametrize(
    ("statuses", "text"),
    [
        ([ready(), {"state": "failed", "epoch": 41, "error": "ChecksumMismatch: a"}], "worker 1: ChecksumMismatch: a"),
        ([ready(), ready("0000000000000001")], "workers disagree about epoch 41"),
        ([ready(epoch=40)], "worker 0"),
        (["None"], "reflux_prepare"),
    ],
)
async def test_what_a_worker_says_against_it_fails_the_offer(fake, statuses, text: str) -> None:
    fake.statuses = [statuses]
    async with sink_of(fake) as sink:
        with pytest.raises(EngineFailed, match=text):
            await sink.receive(OFFER, lambda: False)


async def test_a_pull_that_is_given_up_ends_on_the_workers(fake) -> None:
    fake.statuses = [[{"state": "pulling", "epoch": 41}]]
    async with sink_of(fake) as sink:
        with pytest.raises(ReadCancelled):
            await sink.receive(OFFER, lambda: True)
    assert fake.bodies["/collective_rpc"]["method"] == "reflux_cancel"


async def test_workers_learn_the_layout_and_get_offers_as_text(fake) -> None:
    async with sink_of(fake) as sink:
        await sink.open(LAYOUT)
        assert parse(fake.bodies["/init_weight_transfer_engine"]["init_info"]["layout"].encode()) == LAYOUT
        fake.statuses = [[ready()]]
        await sink.receive(OFFER, lambda: False)
    body = fake.bodies["/collective_rpc"]
    assert body["method"] == "reflux_prepare"
    assert json.loads(body["args"][0])["regions"] == [[0, base64.b64encode(b"handle").decode(), "shm", 5]]


@pytest.mark.parametrize(
    ("path", "status", "hint"),
    [
        ("/is_paused", 404, "VLLM_SERVER_DEV_MODE=1"),
        ("/init_weight_transfer_engine", 500, "--weight-transfer-config"),
        ("/collective_rpc", 500, "--worker-extension-cls"),
    ],
)
async def test_an_engine_that_was_started_without_its_flags_is_told_which(fake, path, status, hint) -> None:
    fake.answers[path] = lambda: (status, {})
    async with sink_of(fake) as sink:
        with pytest.raises(EngineUnfit, match=hint):
            await sink.open(LAYOUT)


async def test_an_engine_that_does_not_come_up_is_named() -> None:
    async with engine_http("http://127.0.0.1:1", "") as http:
        with pytest.raises(EngineUnfit, match=r"no engine at http://127\.0\.0\.1:1"):
            await http.until_up(VllmSink.up_route, 0.0)
