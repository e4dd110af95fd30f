"""The adapter as a process sees it: registration at a gateway, an engine that goes away, a stop in mid-commit."""

import asyncio
import math

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from reflux.inference_gateway.v1 import inference_gateway_service_pb2 as pb
from reflux.inference_gateway.v1.inference_gateway_service_pb2_grpc import InferenceGatewayServiceStub
from reflux_inference_gateway.foreign.base import EngineFailed, WeightSink
from reflux_inference_gateway.foreign.follower import Follower
from reflux_inference_gateway.foreign.main import build
from reflux_inference_gateway.foreign.replica import Description, engine_layout
from reflux_inference_gateway.foreign.settings import AdapterSettings
from reflux_inference_gateway.main import build as build_gateway
from reflux_inference_gateway.settings import GatewaySettings
from reflux_kit.channel import open_channel
from reflux_kit.errors import StartupError
from reflux_kit.server import running
from reflux_model.shapes import parameter_shapes
from reflux_transfer.client.offer import Update
from reflux_transfer.intake import Intake
from reflux_transfer.pulling.report import PullReport

UPDATE = Update(5, 12, 0, memoryview(b""))


class FakeSink(WeightSink):
    """Commits when `may_commit` is set; tells `says`, or raises it."""

    up_route = "/health"

    def __init__(self) -> None:
        self.may_commit, self.begun, self.commits = asyncio.Event(), asyncio.Event(), 0
        self.says: str | EngineFailed = "default"
        self.asked = 0

    async def open(self, layout) -> None: ...

    async def receive(self, offer, cancelled) -> PullReport:
        return PullReport(1, 1, 0.0, 7)

    async def commit(self, version: int, epoch: int) -> float:
        self.begun.set()
        await self.may_commit.wait()
        self.says = str(version)
        self.commits += 1
        return 12.0

    async def version(self) -> str:
        self.asked += 1
        if isinstance(self.says, EngineFailed):
            raise self.says
        return self.says


async def test_a_commit_that_has_begun_ends_although_the_adapter_stops() -> None:
    sink = FakeSink()
    task = asyncio.create_task(Follower(sink).apply(UPDATE))
    await sink.begun.wait()
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    sink.may_commit.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sink.commits == 1


async def test_a_restarted_engine_is_noticed_and_one_before_its_first_version_is_not() -> None:
    sink = FakeSink()
    sink.may_commit.set()
    follower, announced = Follower(sink), asyncio.Event()
    follower.announce = announced.set
    watch = asyncio.create_task(follower.watch(0.001))
    while sink.asked < 3 and not watch.done():
        await asyncio.sleep(0)
    assert not watch.done(), "its folder's weights are what it should serve"
    assert await follower.apply(UPDATE) == 12.0
    assert (follower.version, follower.epoch, announced.is_set()) == (5, 12, True)
    sink.says = "default"
    assert "serves version 'default' instead of 5" in await asyncio.wait_for(watch, 20)


async def test_an_engine_that_stays_silent_is_gone() -> None:
    sink = FakeSink()
    sink.says = EngineFailed("connection refused")
    assert await asyncio.wait_for(Follower(sink).watch(0.001), 20) == "the engine is gone: connection refused"


def test_a_folder_without_a_configuration_is_refused(model_folder) -> None:
    with pytest.raises(StartupError, match=r"config\.json"):
        engine_layout(model_folder / "nowhere", "bfloat16")


def test_names_and_order_are_those_of_the_model_code(model_folder) -> None:
    from reflux_model.folder import load_config

    shapes = parameter_shapes(load_config(model_folder))
    layout = Intake(engine_layout(model_folder, "float32")).layout
    assert [(slot.name, slot.shape) for slot in layout.slots] == list(shapes.items())
    assert layout.parameter_bytes == 4 * sum(math.prod(shape) for shape in shapes.values())


@pytest.mark.parametrize(("way", "engine"), [("vllm", "vllm"), ("sglang", "sglang"), ("sglang-distributed", "sglang")])
def test_a_replica_says_which_engine_computes(way, engine: str) -> None:
    settings = AdapterSettings(engine=way, engine_url="http://e:1")
    assert Description(settings, "m", Follower(FakeSink()))().engine == engine


async def test_an_adapter_registers_its_engines_own_door(model_folder) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"results": [{}], "weight_version": "default"})

    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", answer)
    doors = GatewaySettings(listen="127.0.0.1:0", http_listen="127.0.0.1:0", drain_seconds=0)
    async with TestServer(app) as engine, build_gateway(doors) as gateway, running(gateway, doors) as bound:
        url = str(engine.make_url("")).rstrip("/")
        settings = AdapterSettings(
            engine_url=url,
            model=model_folder,
            model_id="tiny",
            run="runs/r1",
            drain_seconds=0,
            gateway_address=bound.grpc,
            broker_address="127.0.0.1:1",
        )
        async with build(settings) as adapter, running(adapter, settings), open_channel(bound.grpc) as channel:
            stub = InferenceGatewayServiceStub(channel)
            async with asyncio.timeout(20):
                async for fleet in stub.WatchFleet(pb.WatchFleetRequest()):
                    if fleet.replicas:
                        break
            (replica,) = fleet.replicas
        assert (replica.http_url, replica.grpc_address, replica.model_id) == (url, "", "tiny")
        assert replica.name.startswith("replicas/runs-r1-0-")
        assert replica.engine == "vllm"
        async with open_channel(bound.grpc) as channel:
            left = await InferenceGatewayServiceStub(channel).ListReplicas(pb.ListReplicasRequest())
        assert list(left.replicas) == []
