"""A gateway as it ships in front of one torch engine, both as processes, and OpenAI's own client on it."""

import json
import os
import re
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from openai import OpenAI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from reflux.inference_gateway.v1 import inference_gateway_service_pb2 as pb
from reflux.inference_gateway.v1.inference_gateway_service_pb2_grpc import InferenceGatewayServiceStub
from reflux_model.creation import create_folder
from reflux_model.presets import TINY

_HANG_SECONDS = 120.0
_PIECES = ["<pad>", "<eos>", *"abcdefghijklmnopqrstuvwxyz ."]
_MODEL = replace(TINY, vocab_size=len(_PIECES), max_positions=2048)


@pytest.fixture(scope="session")
def endpoint(tmp_path_factory):
    """Base URL of a gateway whose engine serves the model `tiny`: letters, and room for noise to end by itself."""
    folder = tmp_path_factory.mktemp("conformance")
    create_folder(folder / "tiny", _MODEL, seed=3)
    _write_tokenizer(folder / "tiny")
    with ExitStack() as stack:
        listen = {
            "LISTEN": "127.0.0.1:0",
            "HTTP_LISTEN": "127.0.0.1:0",
            "HEARTBEAT_SECONDS": "0.2",
            "STARTUP_GRACE_SECONDS": "0",
        }
        environment = {f"REFLUX_INFERENCE_GATEWAY_{name}": value for name, value in listen.items()}
        gateway = stack.enter_context(_process("reflux-inference-gateway", environment, folder / "gateway.log"))
        grpc_address, http_address = _announced(gateway, folder / "gateway.log")
        engine = {"MODEL": str(folder / "tiny"), "MODEL_ID": "tiny", "WEIGHTS": "folder", "MAX_ROWS": "16"}
        environment = {f"REFLUX_ENGINE_{name}": value for name, value in engine.items()}
        environment |= {"REFLUX_GATEWAY_ADDRESS": grpc_address, "OMP_NUM_THREADS": "1"}
        stack.enter_context(_process("reflux-engine", environment, folder / "engine.log"))
        _wait_for_replica(grpc_address)
        yield f"http://{http_address}"


@pytest.fixture(scope="session")
def client(endpoint):
    with OpenAI(base_url=f"{endpoint}/v1", api_key="any", max_retries=0, timeout=60) as made:
        yield made


def _write_tokenizer(folder):
    tokenizer = Tokenizer(models.WordLevel({piece: place for place, piece in enumerate(_PIECES)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))


@contextmanager
def _process(script, environment, log):
    command = [str(Path(sys.executable).parent / script)]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **environment})
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _announced(process, log):
    limit = time.monotonic() + _HANG_SECONDS
    while process.poll() is None and time.monotonic() < limit:
        if found := re.search(r"serves gRPC on (\S+) and HTTP on (\S+)", log.read_text()):
            return found[1], found[2]
        time.sleep(0.02)
    raise AssertionError(log.read_text())


def _wait_for_replica(address):
    with grpc.insecure_channel(address) as channel:
        stub = InferenceGatewayServiceStub(channel)
        for fleet in stub.WatchFleet(pb.WatchFleetRequest(), timeout=_HANG_SECONDS, wait_for_ready=True):
            if any(replica.state == replica.STATE_READY for replica in fleet.replicas):
                return
