"""A real Ray cluster on loopback: a head and nodes in racks, each with a raylet and workers of its own.

Two side processes of a node are played by idle ones, which saves some 8 s of CPU and 1 GB for five nodes: the dashboard
agent, which without ray[default] only says that it offers nothing, and the runtime environment agent, which is asked
only where a task has such an environment.

As a program it is the cluster's parent: it forks one process per node, takes orders on stdin, and when stdin ends (or
it is killed) everything below it ends.
"""

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

GIB = 1 << 30
DOMAIN = "ray.io/gpu-domain"
GPUS, CPUS, MEMORY_BYTES = 4, 4, 8 * GIB
ENVIRONMENT = {
    # Off: nodes and drivers use 127.0.0.1 instead of this machine's address.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_open_telemetry": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "300",
}
_PR_SET_PDEATHSIG = 1
_TENANT_SECONDS = 30


class RayCluster:
    """A running cluster; `running` makes one."""

    def __init__(self, folder: Path, process: "subprocess.Popen[str]") -> None:
        self.folder = folder
        self._process = process
        self.address = self._order(start="head", labels={}, head=True)["address"]

    environment = ENVIRONMENT
    """What a driver's process needs in its environment to use this cluster."""

    def add(self, *names: str) -> None:
        """Starts nodes at the same time; "r1n0" lies in rack r1."""
        for name in names:
            self._tell(start=name, labels={DOMAIN: f"nvl-{name[:2]}"}, head=False)
        started = [self._answer() for _ in names]
        assert all(each["address"] for each in started), f"not every node started; see {self.folder}"

    def kill(self, name: str) -> None:
        """Ends a node as a power cut would."""
        self._order(kill=name)

    def occupy(self, node: str, gpus: int = GPUS) -> None:
        """Somebody else's Ray job takes GPUs of a node."""
        assert self._order(occupy=node, gpus=gpus)["address"], f"no tenant on {node}; see {self.folder}"

    def vacate(self, node: str) -> None:
        """The other job is killed."""
        self._order(kill=_tenant(node))

    def _order(self, **order: Any) -> dict[str, Any]:
        self._tell(**order)
        return self._answer()

    def _tell(self, **order: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the Ray cluster did not start; see {self.folder}"
        return json.loads(line)


@contextlib.contextmanager
def running(*names: str) -> Iterator[RayCluster]:
    """A cluster of a head, which has no room for work, and nodes of these names."""
    # Below /tmp: the path of a unix socket has 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="rayx", dir="/tmp"))
    with (folder / "cluster.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, __file__, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            text=True, env={**os.environ, **ENVIRONMENT, "RAY_TMPDIR": str(folder)},
        )  # fmt: skip
    try:
        cluster = RayCluster(folder, process)
        cluster.add(*names)
        yield cluster
    finally:
        process.communicate()
        shutil.rmtree(folder, ignore_errors=True)


class NodeParents:
    """The parent's table: one forked process per node."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._pids: dict[str, int] = {}
        self._address = ""

    def obey(self, order: dict[str, Any]) -> None:
        if "kill" in order:
            self._end(order["kill"], signal.SIGUSR1)
            _write({"killed": order["kill"]})
        elif "occupy" in order:
            self._fork(_tenant(order["occupy"]), lambda: self._be_tenant(order), 1)
        elif order["head"]:
            read, write = os.pipe()
            self._fork(order["start"], lambda: self._be_node(order, write), write)
            os.close(write)
            with os.fdopen(read) as pipe:
                line = pipe.readline()
            self._address = json.loads(line)["address"] if line else ""
            _write({"address": self._address})
        else:
            self._fork(order["start"], lambda: self._be_node(order, 1), 1)

    def close(self) -> None:
        for name in reversed(list(self._pids)):
            os.kill(self._pids[name], signal.SIGTERM)
        for name in list(self._pids):
            os.waitpid(self._pids.pop(name), 0)

    def _end(self, name: str, number: int) -> None:
        pid = self._pids.pop(name)
        os.kill(pid, number)
        os.waitpid(pid, 0)

    def _fork(self, name: str, life: Callable[[], None], output: int) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid:
            self._pids[name] = pid
            return
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() == parent:
                life()
        finally:
            os.write(output, b'{"address": ""}\n')
            os._exit(1)

    def _be_tenant(self, order: dict[str, Any]) -> None:
        import ray
        from ray.util.placement_group import placement_group

        ray.init(self._address, log_to_driver=False, configure_logging=False)
        (node_id,) = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeName"] == order["occupy"]]
        selector = [{"ray.io/node-id": node_id}]
        taken = placement_group([{"GPU": order["gpus"]}], bundle_label_selector=selector).wait(_TENANT_SECONDS)
        _write({"address": self._address if taken else ""})
        signal.pause()

    def _be_node(self, order: dict[str, Any], output: int) -> None:
        # Not blocked signals: all below would inherit the mask.
        read, write = os.pipe()
        os.set_blocking(write, False)
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(write)
        node = _start_node(self._folder, order, self._address)
        os.write(output, json.dumps({"address": node.gcs_address}).encode() + b"\n")
        os.read(read, 1)
        node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
        os._exit(0)


def _tenant(node: str) -> str:
    return f"tenant of {node}"


def _start_node(folder: str, order: dict[str, Any], address: str) -> Any:
    from ray._private import services
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    services._build_python_executable_command_memory_profileable = lambda *_, **__: [
        sys.executable, "-I", "-S", __file__
    ]  # fmt: skip

    class QuietNode(Node):
        """No hooks into this process; no dashboard, which needs packages that the tests do without."""

        def _register_shutdown_hooks(self) -> None:
            return

        def start_api_server(self, **_: Any) -> None:
            return

    name = order["start"]
    room = {"num_cpus": 0, "num_gpus": 0} if order["head"] else {"num_cpus": CPUS, "num_gpus": GPUS}
    joining = {} if order["head"] else {"gcs_address": address, "redis_address": address, "node_manager_port": 0}
    sockets = {"raylet_socket_name": f"{folder}/{name}.r", "plasma_store_socket_name": f"{folder}/{name}.p"}
    for socket in sockets.values():
        Path(socket).unlink(missing_ok=True)  # of the node's former life
    parameters = RayParams(
        node_name=name, labels=order["labels"], temp_dir=folder, memory=MEMORY_BYTES, object_store_memory=80 << 20,
        min_worker_port=0, max_worker_port=0, include_log_monitor=False, include_dashboard=False, no_monitor=True,
        dashboard_agent_listen_port=None, **room, **joining, **sockets,
    )  # fmt: skip
    return QuietNode(parameters, head=order["head"], shutdown_at_exit=True, spawn_reaper=True)


def _idle_agent(arguments: list[str]) -> None:
    """Says that it offers nothing, in the files that the raylet waits for, and lives as long as the raylet."""
    raylet = os.pidfd_open(os.getppid())
    values = dict(argument.removeprefix("--").split("=", 1) for argument in arguments if "=" in argument)
    for port in ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port"):
        path = Path(values["session-dir"]) / f"{port}_{values['node-id']}"
        whole = path.with_name(f"{path.name}.{os.getpid()}")
        whole.write_text("-1")
        whole.replace(path)  # the raylet reads as soon as there is a file
    # No signal of the parent's death here: the kernel means the thread that forked, and raylets end such threads.
    select.select([raylet], [], [])
    os._exit(0)


def _write(answer: dict[str, Any]) -> None:
    os.write(1, json.dumps(answer).encode() + b"\n")


def main() -> None:
    if sys.argv[1].endswith(".py"):
        _idle_agent(sys.argv[2:])
    import ray  # noqa: F401  # once, before the forks

    parents = NodeParents(sys.argv[1])
    try:
        for line in sys.stdin:
            parents.obey(json.loads(line))
    finally:
        parents.close()


if __name__ == "__main__":
    main()
