"""The worlds of the conformance suite: a cluster with a scheduler in front of it, and what tests ask of it.

Members and agents are real processes of this machine everywhere, so that the tests can look whether they live.
"""

import asyncio
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from scheduler_stack import HANG_SECONDS, Client, Stack, alive

from reflux.scheduler.v1 import job_pb2
from reflux.scheduler.v1 import scheduler_service_pb2 as pb

WRITES = (
    "import json, os, pathlib, time; e = os.environ; "
    "p = pathlib.Path(e['OUT'], f\"{e['REFLUX_ROLE']}-{e['REFLUX_RANK']}-{os.getpid()}\"); "
    "p.with_suffix('.new').write_text(json.dumps(dict(e))); p.with_suffix('.new').rename(p); time.sleep(600)"
)
"""A member that leaves one file per start, named by role, rank and process id, with its environment."""

FAST = {
    # Members outlive every absence of the scheduler that is not a hang: a start under load takes seconds.
    "REFLUX_SCHEDULER_LEASE_SECONDS": str(HANG_SECONDS),
    "REFLUX_SCHEDULER_LOST_MARGIN_SECONDS": "0.5",
    "REFLUX_SCHEDULER_HEARTBEAT_SECONDS": "0.3",
    "REFLUX_SCHEDULER_POLL_SECONDS": "0.2",
    "REFLUX_SCHEDULER_LEADER_SECONDS": "2",
}
SHORT_LEASE = {"REFLUX_SCHEDULER_LEASE_SECONDS": "3"}
"""For tests in which nodes die: only the end of the lease tells that on backend `local`."""


class World(ABC):
    """One cluster, nothing else on it: two equal racks of at least three nodes with `gpus` GPUs and 4 CPUs each."""

    racks: tuple[tuple[str, ...], ...]
    gpus = 4
    own_agents = False
    """Nodes have agents of their own, which live without jobs (backend `local`)."""

    def __init__(self, stack: Stack, client: Client) -> None:
        self.stack = stack
        self.client = client
        self.out = stack.folder / "out"
        self.out.mkdir()

    @property
    def nodes(self) -> list[str]:
        """All node names."""
        return [node for rack in self.racks for node in rack]

    @abstractmethod
    def settings(self) -> dict[str, str]:
        """Environment of the scheduler beyond what `scheduler` sets: the backend and its options."""

    @abstractmethod
    async def kill_node(self, node: str) -> None:
        """The node is gone at once, with every process on it."""

    @abstractmethod
    async def revive_node(self, node: str) -> None:
        """It is back, empty."""

    @abstractmethod
    async def occupy(self, node: str) -> None:
        """Somebody else takes the node: room on it is not given until `vacate`."""

    @abstractmethod
    async def vacate(self, node: str) -> None:
        """The other one leaves."""

    @abstractmethod
    def agents(self) -> list[int]:
        """Process ids of all agents that live."""

    def scheduler(self, spares: tuple[str, ...] = (), policy: str = "", **environment: str) -> None:
        """Starts the scheduler, on a topology file of these racks and with these knobs of the policy (TOML)."""
        racks = "".join(
            f'[[block.rack]]\nname = "rack-{number}"\nnode_type = "node"\nnodes = {json.dumps(list(rack))}\n'
            for number, rack in enumerate(self.racks)
        )
        held_back = f"[spares]\nnodes = {json.dumps(list(spares))}\n" if spares else ""
        topology = Path(self.stack.environment["REFLUX_SCHEDULER_TOPOLOGY"])
        topology.write_text(
            '[cluster]\nname = "world"\n'
            f'[node_types.node]\ngpus = {self.gpus}\ncpus = 4\nmemory = "8GiB"\n'
            f'[[block]]\nname = "block"\n{racks}{held_back}'
        )
        queues = self.stack.folder / "queues.toml"
        queues.write_text(f"[policy]\n{policy}\n")
        own = {"REFLUX_SCHEDULER_QUEUES": str(queues), **self.settings()}
        self.stack.start_scheduler(**{**FAST, **own, **environment})

    def role(self, name: str, count: int = 1, gpus: int = 0, **fields) -> job_pb2.RoleSpec:
        """Members that write a file when they start and then stay."""
        environment = [job_pb2.EnvironmentVariable(name="OUT", value=str(self.out))]
        fields = {"max_restarts": 3, "stop_grace_seconds": 2.0, **fields}
        return self.client.role(name, WRITES, count, gpus, environment=environment, **fields)

    async def create(self, *roles: job_pb2.RoleSpec, request_id: str = "", **fields) -> job_pb2.Job:
        """Creates a job."""
        request = pb.CreateJobRequest(
            request_id=request_id or str(uuid.uuid4()), display_name="conformance", roles=roles, **fields
        )
        answer = await self.client.stub.CreateJob(request, timeout=HANG_SECONDS, wait_for_ready=True)
        return answer.job

    def starts(self) -> dict[str, list[int]]:
        """Process ids of every start so far, by member."""
        found: dict[str, list[int]] = {}
        for path in self.out.iterdir():
            if path.suffix != ".new":
                role, rank, pid = path.name.rsplit("-", 2)
                found.setdefault(f"{role}/{rank}", []).append(int(pid))
        return found

    def environment_of(self, member: str, pid: int) -> dict[str, str]:
        """The environment that a member was started with."""
        role, rank = member.split("/")
        return json.loads((self.out / f"{role}-{rank}-{pid}").read_text())

    async def topology(self) -> dict[str, pb.TopologyNode]:
        """What the scheduler says of the nodes, by name."""
        answer = await self.client.stub.GetTopology(pb.GetTopologyRequest(), timeout=HANG_SECONDS, wait_for_ready=True)
        return {node.path.rpartition("/")[2]: node for node in answer.nodes}

    async def until_up(self) -> None:
        """Waits until every node takes work."""
        async with asyncio.timeout(HANG_SECONDS):
            while any(node.state != "up" for node in (await self.topology()).values()):
                await asyncio.sleep(0.05)

    async def drain(self, *nodes: str) -> None:
        """Nodes take no new work, and what is there leaves when it can."""
        for node in nodes:
            await self.client.stub.DrainNode(pb.DrainNodeRequest(node=node, reason="a test"), timeout=HANG_SECONDS)

    async def undrain(self, *nodes: str) -> None:
        """Nodes take work again."""
        for node in nodes:
            await self.client.stub.UndrainNode(pb.UndrainNodeRequest(node=node), timeout=HANG_SECONDS)

    async def saved(self, job: job_pb2.Job) -> None:
        """The job has a checkpoint."""
        await self.client.stub.MarkJobSaved(pb.MarkJobSavedRequest(name=job.name), timeout=HANG_SECONDS)

    async def end(self, *jobs: job_pb2.Job) -> None:
        """Cancels jobs and waits until nothing of them is left: no process that ever was, no agent of a grant."""
        for job in jobs:
            await self.client.cancel(job.name)
        for job in jobs:
            await self.client.until_state(job.name, "CANCELLED")
        await self.until_clean(*(pid for pids in self.starts().values() for pid in pids))

    async def until(self, condition: Callable[[], object], what: str) -> None:
        """Waits for something that no message tells."""
        end = time.monotonic() + HANG_SECONDS
        while not condition():
            assert time.monotonic() < end, f"{what}: did not happen"
            await asyncio.sleep(0.05)

    async def until_clean(self, *pids: int) -> None:
        """Waits until processes are gone, and agents too where they belong to grants."""
        await self.until(lambda: not any(alive(pid) for pid in pids), f"end of {pids}")
        if not self.own_agents:
            await self.until(lambda: not self.agents(), "end of all agents")


def pids_of(job: job_pb2.Job) -> dict[str, int]:
    return {member.role_id.partition("/")[2]: member.pid for member in job.members}


def nodes_of(job: job_pb2.Job) -> dict[str, str]:
    return {f"{place.role}/{place.rank}": place.node.rpartition("/")[2] for place in job.placements}


def restarts_of(job: job_pb2.Job) -> dict[str, int]:
    return {member.role_id.partition("/")[2]: member.restarts for member in job.members}


def all_run(job: job_pb2.Job) -> bool:
    running = [member for member in job.members if member.state == job_pb2.RoleStatus.STATE_RUNNING]
    return bool(running) and len(running) == len(job.placements)
