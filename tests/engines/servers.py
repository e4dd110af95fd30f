"""Processes of an engine test: each has its log in a file, is waited for by what it answers, ends with its children."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MODEL_ID = "smol"
START_SECONDS = 400.0
_STOP_SECONDS = 20.0
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1", "OMP_NUM_THREADS": "1"}
_CORE = "0"


@dataclass
class Running:
    """A process and its log."""

    process: subprocess.Popen[bytes]
    log: Path

    def check(self) -> None:
        """Fails with the end of the log when the process has ended."""
        code = self.process.poll()
        assert code is None, f"ended with {code}:\n{self.tail()}"

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def line_with(self, text: str, seconds: float) -> str:
        """The first line of the log that holds `text`, waited for."""
        end = time.monotonic() + seconds
        while True:
            for line in self.log.read_text(errors="replace").splitlines():
                if text in line:
                    return line
            self.check()
            assert time.monotonic() < end, f"no line with {text!r} in {seconds} s:\n{self.tail()}"
            time.sleep(0.1)


@contextmanager
def running(folder: Path, name: str, command: list[str], environment: Mapping[str, str]) -> Iterator[Running]:
    """The process until the block ends; then SIGTERM to its group, later SIGKILL."""
    log = folder / f"{name}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, start_new_session=True, env={**os.environ, **_OFFLINE, **environment}
        )
    try:
        yield Running(process, log)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def service(folder: Path, name: str, environment: Mapping[str, str]) -> Iterator[tuple[Running, str]]:
    """One of our own services by its console script, with its gRPC address."""
    with running(folder, name, [str(Path(sys.executable).parent / name)], environment) as process:
        yield process, process.line_with("serves gRPC on ", 120.0).rpartition("serves gRPC on ")[2].split()[0]


@contextmanager
def vllm(folder: Path, model: Path) -> Iterator[str]:
    """A vLLM server on core 0 with the plug-in; yields its URL."""
    port = free_port()
    environment = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": _CORE,
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
    }
    command = [
        *(str(ROOT / ".venv-vllm/bin/python"), "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"),
        *("--model", str(model), "--served-model-name", MODEL_ID, "--host", "127.0.0.1", "--port", str(port)),
        *("--max-model-len", "2048", "--max-num-seqs", "32"),
        *("--weight-transfer-config", json.dumps({"backend": "reflux"})),
        *("--worker-extension-cls", "reflux_vllm_plugin.worker.RefluxWorker"),
    ]
    with running(folder, "vllm", command, environment) as process:
        yield _up(process, port)


@contextmanager
def sglang(folder: Path, model: Path) -> Iterator[str]:
    """An SGLang server; yields its URL."""
    port = free_port()
    environment = {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(ROOT / "deploy/engines/sglang-stubs")}
    command = [
        *(str(ROOT / ".venv-sglang/bin/python"), "-m", "sglang.launch_server", "--device", "cpu"),
        *("--model-path", str(model), "--served-model-name", MODEL_ID, "--host", "127.0.0.1", "--port", str(port)),
        *("--attention-backend", "torch_native", "--disable-cuda-graph", "--skip-server-warmup"),
        *("--max-total-tokens", "16384", "--max-running-requests", "32"),
    ]
    with running(folder, "sglang", command, environment) as process:
        yield _up(process, port)


def _up(process: Running, port: int) -> str:
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
    while True:
        process.check()
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return url
        except (urllib.error.URLError, OSError):
            assert time.monotonic() < end, f"not up in {START_SECONDS} s:\n{process.tail()}"
            time.sleep(0.5)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ask(url: str, body: Mapping[str, Any] | None = None, seconds: float = 300.0) -> Any:
    """The JSON that a GET, or a POST of `body`, answers."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=seconds) as answer:
        return json.load(answer)
