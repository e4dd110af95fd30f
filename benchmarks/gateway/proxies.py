"""The proxies that are compared, each as a process group of its own whose processor time and memory can be read."""

import contextlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from registration import Registered, registered

from reflux_kit.auth import mint

HERE = Path(__file__).parent
ROUTERS_PYTHON = HERE.parents[1] / ".venv-routers" / "bin" / "python"
MODEL = "mock"
PEERS = ("vllm", "sglang")

_SECRET = "a secret of the benchmark, long enough"
_START_SECONDS = 60.0
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_MODULES = {"vllm": "vllm_router.launch_router", "sglang": "sglang_router.launch_router"}


@dataclass(frozen=True)
class Proxy:
    """One proxy; `pid` leads its process group. `direct` is a worker itself and has none."""

    name: str
    url: str
    pid: int = 0
    token: str = ""
    grpc: str = ""

    def cpu_seconds(self) -> float:
        """User and system time of the group so far, children that have ended included."""
        fields = [_stat(pid) for pid in self._pids()]
        return sum(sum(map(int, each[11:15])) for each in fields if each) / _TICKS

    def rss_mb(self) -> float:
        """Resident memory of the group now; pages that its processes share count once for each."""
        return sum(int(each[21]) for each in map(_stat, self._pids()) if each) * _PAGE / 1e6

    def _pids(self) -> list[int]:
        if not self.pid:
            return []
        numbers = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
        return [number for number in numbers if (found := _stat(number)) and int(found[2]) == self.pid]

    def load(self, **options: object) -> dict[str, float]:
        """Runs `load.py` against it; what it printed. A peer's wrong answers are told, ours are a `RuntimeError`."""
        result = run_load("load.py", self.url, {"token": self.token, **options})
        if result["failed"]:
            told = f"{self.name}: {result['failed']} of {result['requests']} answers were no success"
            if self.name not in _MODULES:
                raise RuntimeError(told)
            print(told, flush=True)
        return result


def run_load(script: str, target: str, options: Mapping[str, object]) -> dict[str, float]:
    """A load client as a process of its own, so that no proxy pays for it; its last line."""
    command = [sys.executable, str(HERE / script), target]
    for name, value in options.items():
        if value not in (False, ""):
            command += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    return json.loads(done.stdout.splitlines()[-1])


@dataclass
class Bench:
    """What a question has running: its workers and the proxies in front of them, all gone when the block ends."""

    _stack: ExitStack
    _folder: Path
    workers: list[Registered] = field(default_factory=list)

    def start_workers(self, script: str, count: int, *arguments: str, capacity: int = 0) -> list[Registered]:
        """Replicas that pretend; a process prints the addresses of its replicas in its first line: HTTP[,gRPC] ..."""
        for number in range(count):
            process = self._popen([sys.executable, str(HERE / script), *arguments], f"worker{number}")
            for addresses in _first_line(process, self._folder / f"worker{number}.log").split():
                url, _, grpc_address = addresses.partition(",")
                self.workers.append(Registered(f"mock{len(self.workers)}", url, grpc_address, capacity))
        return self.workers

    def start_engines(self, count: int, environment: Mapping[str, str], capacity: int) -> list[Registered]:
        """Real replicas, `reflux-engine`; registered by the benchmark like the others."""
        script = Path(sys.executable).parent / "reflux-engine"
        started = [self._popen([str(script)], f"engine{number}", environment) for number in range(count)]
        for number, process in enumerate(started):
            grpc_address, http_address = _announced(process, self._folder / f"engine{number}.log")
            self.workers.append(Registered(f"engine{number}", f"http://{http_address}", grpc_address, capacity))
        return self.workers

    def direct(self) -> Proxy:
        """The first worker without anything in front of it."""
        return Proxy("direct", self.workers[0].url)

    def reflux(self, name: str = "reflux", settings: Mapping[str, str] | None = None) -> Proxy:
        """Our gateway as it ships: tokens checked, metrics, one trace in a hundred written, default routing."""
        state = self._folder / "state"
        environment = {
            "REFLUX_STACK_SECRET": _SECRET,
            "REFLUX_STATE_DIR": str(state),
            "REFLUX_TRACE_RATIO": "0.01",
            "REFLUX_INFERENCE_GATEWAY_LISTEN": "127.0.0.1:0",
            "REFLUX_INFERENCE_GATEWAY_HTTP_LISTEN": "127.0.0.1:0",
            **(settings or {}),
        }
        script = Path(sys.executable).parent / "reflux-inference-gateway"
        process = self._popen([str(script)], "reflux", environment)
        grpc_address, http_address = _announced(process, self._folder / "reflux.log")
        token = mint(_SECRET, "benchmark")
        self._stack.enter_context(registered(grpc_address, token, MODEL, self.workers))
        proxy = Proxy(name, f"http://{http_address}", process.pid, token, grpc_address)
        _wait_for_answer(proxy, process)
        return proxy

    def router(self, name: str, policy: str, *arguments: str) -> Proxy | None:
        """A peer with one of its policies, called `name`; None, and why is printed, when it is not installed."""
        if not ROUTERS_PYTHON.exists():
            print(f"{name}: left out, {ROUTERS_PYTHON} does not exist (deploy/bench/routers.sh makes it)", flush=True)
            return None
        port, metrics = _free_ports(2)
        command = [str(ROUTERS_PYTHON), "-m", _MODULES[name], "--host", "127.0.0.1", "--port", str(port)]
        command += ["--prometheus-port", str(metrics), "--policy", policy, "--log-level", "error", *arguments]
        command += ["--worker-urls", *(worker.url for worker in self.workers)]
        process = self._popen(command, f"{name}-{policy}")
        proxy = Proxy(name, f"http://127.0.0.1:{port}", process.pid)
        _wait_for_answer(proxy, process)
        return proxy

    def routers(self, policy: str) -> list[Proxy]:
        """Both peers with the same policy, those that are installed."""
        return [found for name in PEERS if (found := self.router(name, policy))]

    def _popen(
        self, command: list[str], log: str, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        with (self._folder / f"{log}.log").open("wb") as out:
            process = subprocess.Popen(
                command, stdout=out, stderr=out, env={**os.environ, **(environment or {})}, start_new_session=True
            )
        self._stack.callback(end, process)
        return process


@contextmanager
def bench() -> Iterator[Bench]:
    """Everything that a question starts ends with the block. It may open as many files as this user may at all."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        yield Bench(stack, Path(folder))


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process group that `Popen` started in a session of its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(3)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def complete(proxy: Proxy, **fields: Any) -> dict[str, Any]:
    """One completion; raises what urllib raises."""
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 1, **fields}).encode()
    headers = {"Content-Type": "application/json"}
    headers |= {"Authorization": f"Bearer {proxy.token}"} if proxy.token else {}
    with urlopen(Request(f"{proxy.url}/v1/completions", body, headers), timeout=10) as answer:
        return json.load(answer)


def _wait_for_answer(proxy: Proxy, process: subprocess.Popen[bytes]) -> None:
    limit, error = time.monotonic() + _START_SECONDS, None
    while time.monotonic() < limit and process.poll() is None:
        try:
            complete(proxy)
            return
        except OSError as caught:
            error = caught
            time.sleep(0.1)
    raise RuntimeError(f"{proxy.name} did not start: {error}, status {process.poll()}")


def _first_line(process: subprocess.Popen[bytes], log: Path) -> str:
    return _wait_for(process, log, re.compile(r"^(.+)\n"))[1]


def _announced(process: subprocess.Popen[bytes], log: Path) -> tuple[str, str]:
    found = _wait_for(process, log, re.compile(r"serves gRPC on (\S+) and HTTP on (\S+)"))
    return found[1], found[2]


def _wait_for(process: subprocess.Popen[bytes], log: Path, pattern: re.Pattern[str]) -> re.Match[str]:
    limit = time.monotonic() + _START_SECONDS
    while time.monotonic() < limit and process.poll() is None:
        if found := pattern.search(log.read_text()):
            return found
        time.sleep(0.02)
    raise RuntimeError(f"{log.stem} did not start:\n{log.read_text()[-3000:]}")


def _stat(pid: int) -> list[str] | None:
    """Fields 3 and further of /proc/PID/stat (proc(5)), by index from 0; None when the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _free_ports(count: int) -> Sequence[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
