"""A run's transport between learner and engines, and an engine whose transport does not work."""

import asyncio

import pytest

from reflux.weight_broker.v1.weight_broker_service_pb2 import ListPathsRequest
from reflux_inference_gateway.engine.main import build as build_engine
from reflux_inference_gateway.engine.settings import EngineSettings
from reflux_kit.errors import StartupError
from reflux_transfer.settings import TransferSettings

from .learner_and_engines import RUN, model_folder, world


async def test_weights_travel_by_the_transport_that_was_asked_for(tmp_path):
    async with world(tmp_path, transport="tcp") as w:
        await w.engine(transport="tcp")
        published = await w.publish("p")
        assert await w.fingerprints() == [(published.epoch, published.fingerprint)]
        async with asyncio.timeout(30):
            while not (read := [path.transport for path in await paths(w) if path.peer]):
                await asyncio.sleep(0.01)
        assert read == ["tcp"]
        assert [path.transport for path in await paths(w) if path.chosen and not path.peer] == ["tcp"]


async def paths(w):
    answer = await w.broker.ListPaths(ListPathsRequest())
    return [path for process in answer.processes for path in process.paths]


@pytest.mark.parametrize("transport", ["ucx", "auto"])
async def test_an_engine_whose_transport_fails_its_self_test_says_so_and_does_not_start(tmp_path, transport):
    nothing = TransferSettings(ucx_library="/nonexistent/libucp.so.0", floor_gb_per_second=1e6)
    folder = model_folder(tmp_path / "model")
    settings = EngineSettings(model=folder, run=RUN, transport=transport, transfer=nothing, drain_seconds=0)
    with pytest.raises(StartupError, match=rf"REFLUX_TRANSPORT={transport}: .*/nonexistent/libucp\.so\.0"):
        async with build_engine(settings):
            pass
