"""Tiny model folders and real servers on port 0."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass

import grpc
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from reflux.inference_gateway.v1 import inference_gateway_service_pb2 as pb
from reflux.inference_gateway.v1.inference_gateway_service_pb2_grpc import InferenceGatewayServiceStub
from reflux_inference_gateway.main import build as build_gateway
from reflux_inference_gateway.settings import GatewaySettings
from reflux_kit.server import running
from reflux_model.creation import create_folder
from reflux_model.presets import TINY

torch.set_num_threads(1)

LETTERS = "abcdefghijklmnopqrstuvwxyz ."
PIECES = ["<pad>", "<eos>", *LETTERS, *("ab", "bc", "cd", "the", "xyz", "\n", "d.", ". ", "\u00e9", "user")]


def write_tokenizer(folder):
    vocab = {piece: index for index, piece in enumerate(PIECES)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    create_folder(folder, TINY, seed=3)
    write_tokenizer(folder)
    return folder


class GatewayThread:
    """A real gateway in a thread of its own, so that session-wide engines can live with it."""

    def __init__(self):
        self._settings = GatewaySettings(
            listen="127.0.0.1:0", http_listen="127.0.0.1:0", drain_seconds=0, heartbeat_seconds=0.2
        )
        self.grpc = self.http = ""

    def start(self):
        self._started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)
        self._thread.start()
        assert self._started.wait(20)
        assert self._thread.is_alive(), "the gateway did not start"

    def stop(self):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)

    async def _serve(self):
        try:
            async with build_gateway(self._settings) as service, running(service, self._settings) as bound:
                self.grpc, self.http = bound.grpc, f"http://{bound.http}"
                self._settings = self._settings.model_copy(update={"listen": bound.grpc, "http_listen": bound.http})
                self._started.set()
                await self._stop.wait()
        finally:
            self._started.set()


class EngineProcess:
    """A real `reflux-engine` process that registers with a gateway."""

    def __init__(self, folder, gateway, log, **settings):
        fields = {"MODEL": str(folder), "MODEL_ID": "tiny", "WEIGHTS": "folder", **settings}
        env = dict(os.environ) | {f"REFLUX_ENGINE_{name}": value for name, value in fields.items()}
        env |= {"REFLUX_GATEWAY_ADDRESS": gateway, "OMP_NUM_THREADS": "1"}
        self.log = log
        with log.open("w") as stderr:
            command = [sys.executable, "-m", "reflux_inference_gateway.engine.main"]
            self.process = subprocess.Popen(command, env=env, stderr=stderr)

    def kill(self, number=signal.SIGKILL):
        self.process.send_signal(number)

    def stop(self):
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(20)


async def wait_for_replicas(address, model_id, count, seconds=120.0):
    """Waits on the fleet's stream until `count` replicas of a model are ready; returns them."""
    async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(seconds):
        async for fleet in InferenceGatewayServiceStub(channel).WatchFleet(pb.WatchFleetRequest()):
            ready = [r for r in fleet.replicas if r.model_id == model_id and r.state == r.STATE_READY]
            if len(ready) >= count:
                return ready
    raise AssertionError("the fleet's stream ended")


@pytest.fixture(scope="session")
def ready_replicas():
    return wait_for_replicas


@dataclass(frozen=True)
class Fleet:
    gateway: GatewayThread
    engines: list[EngineProcess]
    folder: object


@pytest.fixture(scope="session")
def fleet(model_folder, tmp_path_factory):
    """A gateway with two real engines; one of them may be dead after the tests of faults."""
    logs = tmp_path_factory.mktemp("engines")
    gateway = GatewayThread()
    gateway.start()
    engines = [EngineProcess(model_folder, gateway.grpc, logs / f"{i}.log", MAX_ROWS="32") for i in range(2)]
    try:
        asyncio.run(wait_for_replicas(gateway.grpc, "tiny", 2))
        yield Fleet(gateway, engines, model_folder)
    finally:
        for engine in engines:
            engine.stop()
        gateway.stop()


@pytest.fixture
def start_engine(tmp_path):
    """Starts an engine process."""
    return lambda folder, gateway, **settings: EngineProcess(folder, gateway, tmp_path / "engine.log", **settings)


@pytest.fixture
async def stub(fleet):
    async with grpc.aio.insecure_channel(fleet.gateway.grpc) as channel:
        yield InferenceGatewayServiceStub(channel)
