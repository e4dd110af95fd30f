"""The adapter's half of SGLang: from a file in memory and by broadcast, with the bytes that arrive."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer
from safetensors.torch import load_file
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, rendezvous

from reflux_inference_gateway.foreign.base import EngineFailed, EngineUnfit
from reflux_inference_gateway.foreign.http_client import EngineHttp, engine_http
from reflux_inference_gateway.foreign.replica import engine_layout
from reflux_inference_gateway.foreign.sglang import SglangDisk, SglangSink
from reflux_inference_gateway.foreign.sglang_distributed import SglangDistributed
from reflux_inference_gateway.foreign.weight_file import WeightFile
from reflux_transfer.arenas.publisher import PublisherArenas
from reflux_transfer.backends.shm import ShmBackend
from reflux_transfer.client.offer import Offer, Route, SourceRegion, layout_of_rank
from reflux_transfer.intake import Intake
from reflux_weightplan.spec import SpecLayout

PAUSE, LOAD, GO_ON = "/pause_generation", "/update_weights_from_disk", "/continue_generation"
Answer = Callable[[dict[str, Any]], Awaitable[tuple[int, Any]]]


class FakeSglang:
    """Answers 200 to every route; `answers` replaces single ones by functions of the body."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.answers: dict[str, Answer] = {}

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else {}
        self.calls.append((request.path, body))
        status, content = 200, {"success": True}
        if request.path in self.answers:
            status, content = await self.answers[request.path](body)
        return web.json_response(content, status=status)

    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]

    def fails(self, path: str, times: int = 1000) -> None:
        left = iter([400] * times)

        async def answer(_body: dict[str, Any]) -> tuple[int, Any]:
            return next(left, 200), {"success": False, "message": "no room"}

        self.answers[path] = answer


@pytest.fixture
def fake() -> FakeSglang:
    return FakeSglang()


@asynccontextmanager
async def opened(
    fake: FakeSglang, layout: SpecLayout, new: Callable[[EngineHttp], SglangSink]
) -> AsyncIterator[SglangSink]:
    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", fake.answer)
    async with TestServer(app) as server, engine_http(str(server.make_url("")), "") as http:
        sink = new(http)
        await sink.open(layout)
        fake.calls.clear()
        try:
            yield sink
        finally:
            await sink.close()


@asynccontextmanager
async def offer_of(layout: SpecLayout, seed: int) -> AsyncIterator[tuple[Offer, dict[str, bytes]]]:
    owner, rng = ShmBackend(), np.random.default_rng(seed)
    arenas = PublisherArenas(owner, layout_of_rank(layout, 0))
    tensors = {spec.name: rng.integers(0, 1 << 16, spec.shape, np.uint16) for spec in layout.tensors}
    staging = arenas.begin(0.0)
    staging.write(tensors)
    region, end = SourceRegion(0, staging.offer(), "shm", staging.generation), time.monotonic() + 20
    offer = Offer(3, 9, "full", (region,), Route(layout, layout, 0), end, 20.0)
    yield offer, {name: tensor.tobytes() for name, tensor in tensors.items()}
    owner.close()


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


async def test_the_file_that_is_named_holds_the_bytes_that_were_pulled(fake, model_folder, tmp_path) -> None:
    layout = engine_layout(model_folder, "bfloat16")
    seen: dict[str, Any] = {}

    async def load(body: dict[str, Any]) -> tuple[int, Any]:
        folder = Path(body["model_path"])
        seen.update({name: raw(tensor) for name, tensor in load_file(folder / "model.safetensors").items()})
        seen["files"] = sorted(path.name for path in folder.iterdir())
        return 200, {"success": True}

    fake.answers[LOAD] = load
    async with opened(fake, layout, lambda http: SglangDisk(http, model_folder, tmp_path)) as sink:
        async with offer_of(layout, seed=1) as (offer, tensors):
            await sink.receive(offer, lambda: False)
        assert await sink.commit(3, 9) > 0
    assert seen.pop("files") == sorted(path.name for path in model_folder.iterdir())
    assert seen == tensors
    assert fake.paths() == [PAUSE, LOAD, GO_ON]
    assert fake.calls[0][1] == {"mode": "retract"}
    assert (fake.calls[1][1]["weight_version"], fake.calls[1][1]["flush_cache"]) == ("3", True)
    assert list(tmp_path.glob("reflux-weights-*")) == [], "the file outlives its adapter"


@pytest.mark.parametrize("path", [LOAD, GO_ON])
async def test_a_commit_that_fails_leaves_the_engine_stopped(fake, model_folder, tmp_path, path: str) -> None:
    layout = engine_layout(model_folder, "float32")
    fake.fails(path)
    async with opened(fake, layout, lambda http: SglangDisk(http, model_folder, tmp_path)) as sink:
        with pytest.raises(EngineFailed, match="no room"):
            await sink.commit(1, 1)
    assert fake.calls[-1] == (PAUSE, {"mode": "abort"})


def test_what_a_killed_adapter_left_is_removed_and_what_is_in_use_is_not(model_folder, tmp_path) -> None:
    layout = Intake(engine_layout(model_folder, "bfloat16")).layout
    (tmp_path / "reflux-weights-left").mkdir()
    first = WeightFile(model_folder, layout, tmp_path)
    second = WeightFile(model_folder, layout, tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([first.folder, second.folder])
    first.close()
    second.close()
    assert list(tmp_path.iterdir()) == []


async def test_a_scratch_folder_that_does_not_exist_is_refused_at_the_start(fake, model_folder, tmp_path) -> None:
    layout = engine_layout(model_folder, "float32")
    with pytest.raises(EngineUnfit, match="nowhere"):
        async with opened(fake, layout, lambda http: SglangDisk(http, model_folder, tmp_path / "nowhere")):
            pass


async def test_a_broadcast_reaches_a_group_that_the_engine_made_its_way(fake, model_folder) -> None:
    layout, groups, seen = engine_layout(model_folder, "bfloat16"), [], {}

    async def join(body: dict[str, Any]) -> tuple[int, Any]:
        groups.append(await asyncio.to_thread(join_like_sglang, body))
        return 200, {"success": True}

    async def receive(body: dict[str, Any]) -> tuple[int, Any]:
        for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            await asyncio.to_thread(groups[0].broadcast(tensor, 0).wait)
            seen[name] = raw(tensor)
        return 200, {"success": True}

    fake.answers |= {"/init_weights_update_group": join, "/update_weights_from_distributed": receive}
    fake.fails("/begin_weight_update", times=1)  # an adapter that died has left its session open
    async with opened(fake, layout, lambda http: SglangDistributed(http, "127.0.0.1", 1)) as sink:
        async with offer_of(layout, seed=2) as (offer, tensors):
            await sink.receive(offer, lambda: False)
        await sink.commit(3, 9)
    assert seen == tensors
    begin, end = "/begin_weight_update", "/end_weight_update"
    update = "/update_weights_from_distributed"
    assert fake.paths() == [PAUSE, begin, end, begin, update, end, GO_ON, "/destroy_weights_update_group"]


def join_like_sglang(body: dict[str, Any]) -> Any:
    """Rank 1, by the calls that SGLang's `init_custom_process_group` makes."""
    timeout = timedelta(seconds=20)
    address = f"tcp://{body['master_address']}:{body['master_port']}"
    store, rank, world = next(rendezvous(address, body["rank_offset"], body["world_size"], timeout=timeout))
    store = PrefixStore(body["group_name"], store)
    group, _ = _new_process_group_helper(
        world, rank, [], Backend(body["backend"]), store, group_name=body["group_name"], timeout=timeout
    )
    return group
