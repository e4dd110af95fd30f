"""Scheduler and agents as real processes on free ports, and a client that waits by watching."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import grpc

from reflux.common.v1 import common_pb2
from reflux.scheduler.v1 import job_pb2
from reflux.scheduler.v1 import scheduler_service_pb2 as pb
from reflux.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub

HANG_SECONDS = 60
SLEEPER = "import time; time.sleep(600)"
State = job_pb2.Job.State
METHODS = ("CreateJob", "GetJob", "ListJobs", "CancelJob", "GetTopology", "ExplainJob")
RETRY = [f"reflux.scheduler.v1.SchedulerService/{name}" for name in METHODS]

TOPOLOGY = """
[cluster]
name = "test"
[node_types.node]
gpus = 4
cpus = 4
memory = "8GiB"
rails = ["mlx5_0", "mlx5_1"]
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


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return b") Z " not in Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False


class Process:
    """One process that the zygote forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait(self, seconds: float = HANG_SECONDS) -> bool:
        end = time.monotonic() + seconds
        while alive(self.pid):
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
        return True


class Zygote:
    """Forks scheduler and agents, with more modules imported already if they are named."""

    def __init__(self, *modules: str) -> None:
        command = [sys.executable, str(Path(__file__).with_name("zygote.py")), *modules]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def start(self, module: str, environment: dict[str, str], log: Path) -> Process:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin and stdout  # noqa: PT018
        stdin.write(json.dumps({"module": module, "env": environment, "log": str(log)}) + "\n")
        stdin.flush()
        return Process(int(stdout.readline()))

    def close(self) -> None:
        self._process.communicate()


class Stack:
    """Processes of one test; everything is ended by pid when the test is over."""

    def __init__(self, folder: Path, redis_url: str, zygote: Zygote) -> None:
        self.folder = folder
        self._zygote = zygote
        self.processes: dict[str, Process] = {}
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
            # Tests kill the agents of a node more often than its work would suffer.
            "REFLUX_SCHEDULER_FLAP_HALF_LIFE_SECONDS": "0.5",
            "REFLUX_SCHEDULER_FLAP_LONGEST_SECONDS": "1.5",
            "REFLUX_AGENT_DRAIN_SECONDS": "0",
        }

    free_port = staticmethod(free_port)

    def start(self, name: str, module: str, **environment: str) -> None:
        log = self.folder / f"{name}.log"
        self.processes[name] = self._zygote.start(module, {**self.environment, **environment}, log)

    def start_scheduler(self, **environment: str) -> None:
        self.start("scheduler", "reflux_scheduler.main", **environment)

    def start_agent(self, node: str = "n1", **environment: str) -> None:
        environment = {"REFLUX_AGENT_NODE": node, "REFLUX_STATE_DIR": str(self.folder / node), **environment}
        self.start(node, "reflux_scheduler.agent.main", **environment)

    def ensure(self) -> None:
        for name, start in (("scheduler", self.start_scheduler), ("n1", self.start_agent), ("n2", self.start_agent)):
            process = self.processes.get(name)
            if process is None or not alive(process.pid):
                start(*([] if name == "scheduler" else [name]))

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        process = self.processes.pop(name)
        process.signal(number)
        assert process.wait(), f"{name} does not end"

    def close(self) -> None:
        for process in self.processes.values():
            process.signal(signal.SIGTERM)
        for process in self.processes.values():
            if not process.wait(15):
                process.signal(signal.SIGKILL)
                process.wait()

    def log(self, name: str, suffix: str = ".log") -> str:
        return (self.folder / f"{name}{suffix}").read_text()

    alive = staticmethod(alive)

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

    async def topology(self) -> list[pb.TopologyNode]:
        request = pb.GetTopologyRequest()
        return list((await self.stub.GetTopology(request, timeout=HANG_SECONDS, wait_for_ready=True)).nodes)

    async def until_agents(self, count: int) -> None:
        async with asyncio.timeout(HANG_SECONDS):
            while True:
                answer = await self.stub.GetTopology(pb.GetTopologyRequest(), wait_for_ready=True)
                if sum(bool(node.agent_address) for node in answer.nodes) >= count:
                    return
                await asyncio.sleep(0.02)

    async def cancel_all(self) -> None:
        jobs = (await self.stub.ListJobs(pb.ListJobsRequest(), timeout=HANG_SECONDS)).jobs
        open_jobs = [job.name for job in jobs if not job.ended_at]
        for name in open_jobs:
            await self.cancel(name)
        for name in open_jobs:
            await self.until(name, lambda job: job.ended_at)

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

    async def until_rss(self, name: str) -> job_pb2.Job:
        async with asyncio.timeout(HANG_SECONDS):
            while True:
                job = await self.get(name)
                if all(member.rss_bytes for member in job.members):
                    return job
                await asyncio.sleep(0.05)

    async def until_state(self, name: str, state: str) -> job_pb2.Job:
        return await self.until(name, lambda job: job.state == State.Value(f"STATE_{state}"))
