"""What every backend has to keep: one set of tests against a small `World`, a cluster with a scheduler in front of it.

A test module of a backend says `from conformance import *` and has a fixture `world` that yields its World, started.
Members and agents are real processes of this machine everywhere, so that the tests can look whether they live.
"""

import asyncio
import json
import os
import signal
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
    "REFLUX_SCHEDULER_LEASE_SECONDS": "1.5",
    "REFLUX_SCHEDULER_LOST_MARGIN_SECONDS": "0.5",
    "REFLUX_SCHEDULER_HEARTBEAT_SECONDS": "0.3",
    "REFLUX_SCHEDULER_POLL_SECONDS": "0.2",
    "REFLUX_SCHEDULER_LEADER_SECONDS": "2",
    "REFLUX_AGENT_LEASE_SECONDS": "1.5",
}


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

    def scheduler(self, spares: tuple[str, ...] = ()) -> None:
        """Starts the scheduler, on a topology file of these racks."""
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
        self.stack.start_scheduler(**FAST, **self.settings())

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

    async def until_up(self) -> None:
        """Waits until every node takes work."""
        async with asyncio.timeout(HANG_SECONDS):
            while True:
                answer = await self.client.stub.GetTopology(pb.GetTopologyRequest(), wait_for_ready=True)
                if all(node.state == "up" for node in answer.nodes):
                    return
                await asyncio.sleep(0.05)

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


def all_run(job: job_pb2.Job) -> bool:
    running = [member for member in job.members if member.state == job_pb2.RoleStatus.STATE_RUNNING]
    return bool(running) and len(running) == len(job.placements)


async def test_a_gang_runs_as_one_with_its_environment_and_a_cancel_leaves_nothing(world):
    world.scheduler()
    job = await world.create(world.role("learner", 2, world.gpus), world.role("engine", 2, 1))
    job = await world.client.until_state(job.name, "RUNNING")
    pids, nodes = pids_of(job), nodes_of(job)
    assert set(pids) == {"learner/0", "learner/1", "engine/0", "engine/1"}
    assert len({nodes["learner/0"], nodes["learner/1"], nodes["engine/0"]}) == 3
    await world.until(lambda: len(world.starts()) == 4, "every member's start")
    assert world.starts() == {member: [pid] for member, pid in pids.items()}
    for member, pid in pids.items():
        seen = world.environment_of(member, pid)
        assert (seen["REFLUX_JOB"], seen["REFLUX_NODE"]) == (job.name, nodes[member])
        devices = seen["CUDA_VISIBLE_DEVICES"].split(",")
        assert len(set(devices)) == (world.gpus if member.startswith("learner") else 1)
    await world.client.cancel(job.name)
    await world.client.until_state(job.name, "CANCELLED")
    await world.until_clean(*pids.values())


async def test_a_dead_member_is_restarted_where_it_was_and_the_others_are_left_alone(world):
    world.scheduler()
    job = await world.create(world.role("learner", 2, world.gpus))
    before = await world.client.until_state(job.name, "RUNNING")
    os.kill(pids_of(before)["learner/1"], signal.SIGKILL)
    after = await world.client.until(job.name, lambda job: all_run(job) and [m.restarts for m in job.members] == [0, 1])
    assert nodes_of(after) == nodes_of(before)
    assert pids_of(after)["learner/0"] == pids_of(before)["learner/0"]
    await world.client.cancel(job.name)
    await world.client.until_state(job.name, "CANCELLED")
    await world.until_clean(*pids_of(after).values())


async def test_a_restarted_scheduler_adopts_what_runs_and_can_still_stop_it(world):
    world.scheduler()
    request_id = str(uuid.uuid4())
    roles = (world.role("learner", 2, world.gpus), world.role("rollout", 3))
    job = await world.create(*roles, request_id=request_id)
    before = await world.client.until_state(job.name, "RUNNING")
    world.stack.kill("scheduler")
    world.scheduler()
    again = await world.create(*roles, request_id=request_id)
    assert again.name == job.name
    # A later job runs only after agents have come back and the first job was looked at.
    probe = await world.create(world.role("probe"))
    await world.client.until_state(probe.name, "RUNNING")
    after = await world.client.get(job.name)
    assert after.state == job_pb2.Job.STATE_RUNNING
    assert pids_of(after) == pids_of(before)
    assert all(alive(pid) for pid in pids_of(after).values())
    assert {member.restarts for member in after.members} == {0}
    for each in (job, probe):
        await world.client.cancel(each.name)
        await world.client.until_state(each.name, "CANCELLED")
    await world.until_clean(*pids_of(before).values())


async def test_a_scheduler_killed_at_any_moment_of_a_start_starts_every_member_once(world):
    world.scheduler()
    for pause in (0.0, 0.03, 0.1, 0.3):
        for path in world.out.iterdir():
            path.unlink()
        job = await world.create(world.role("learner", 2, world.gpus))
        await asyncio.sleep(pause)  # somewhere between decision, request, launch and record
        world.stack.kill("scheduler")
        world.scheduler()
        job = await world.client.until(job.name, all_run)
        pids = pids_of(job)
        await world.until(lambda: len(world.starts()) == 2, "every member's start")
        assert world.starts() == {member: [pid] for member, pid in pids.items()}
        await world.client.cancel(job.name)
        await world.client.until_state(job.name, "CANCELLED")
        await world.until_clean(*pids.values())


async def test_a_lost_node_is_replaced_by_the_spare_of_its_rack_and_the_others_run_on(world):
    *used, spare = world.racks[0]
    world.scheduler(spares=(spare,))
    await world.until_up()
    job = await world.create(world.role("learner", len(used), world.gpus, required_level="rack"))
    before = await world.client.until_state(job.name, "RUNNING")
    assert set(nodes_of(before).values()) == set(used)  # the smallest rack that holds it
    lost = nodes_of(before)["learner/0"]
    await world.kill_node(lost)
    after = await world.client.until(
        job.name, lambda job: all_run(job) and nodes_of(job)["learner/0"] not in ("", lost)
    )
    assert nodes_of(after)["learner/0"] == spare
    kept = {member: pid for member, pid in pids_of(before).items() if member != "learner/0"}
    assert {member: pids_of(after)[member] for member in kept} == kept
    assert not alive(pids_of(before)["learner/0"])
    assert after.attempt == 1
    await world.client.cancel(job.name)
    await world.client.until_state(job.name, "CANCELLED")
    await world.until_clean(*pids_of(after).values())


async def test_a_lost_node_without_replacement_sends_the_whole_gang_back_until_there_is_room(world):
    world.scheduler()
    count = len(world.nodes)
    job = await world.create(world.role("learner", count, world.gpus))
    before = await world.client.until_state(job.name, "RUNNING")
    lost = nodes_of(before)["learner/0"]
    await world.kill_node(lost)
    job = await world.client.until_state(job.name, "PENDING")
    assert lost in job.message
    await world.until(lambda: not any(alive(pid) for pid in pids_of(before).values()), "end of the gang")
    await world.revive_node(lost)
    after = await world.client.until(job.name, lambda job: job.state == job_pb2.Job.STATE_RUNNING and all_run(job))
    assert (after.attempt, after.requeues) == (2, 1)
    await world.until(lambda: len(world.starts()) == count, "every member's start")
    await world.client.cancel(job.name)
    await world.client.until_state(job.name, "CANCELLED")
    await world.until_clean(*pids_of(after).values())


async def test_a_gang_starts_nothing_before_all_of_its_room_is_there(world):
    busy = world.racks[0][0]
    await world.occupy(busy)
    world.scheduler()
    job = await world.create(world.role("learner", len(world.nodes), world.gpus))
    # Another job runs meanwhile: the scheduler had every chance to start a part of the first.
    job = await world.client.until(job.name, lambda job: job.message.startswith("waits"))
    await asyncio.sleep(1.0)
    assert world.starts() == {}
    assert (await world.client.get(job.name)).state in (job_pb2.Job.STATE_PENDING, job_pb2.Job.STATE_PLACED)
    await world.vacate(busy)
    job = await world.client.until_state(job.name, "RUNNING")
    assert len(pids_of(job)) == len(world.nodes)
    await world.client.cancel(job.name)
    await world.client.until_state(job.name, "CANCELLED")
    await world.until_clean(*pids_of(job).values())


async def test_a_job_that_is_cancelled_while_it_waits_for_room_leaves_nothing(world):
    busy = world.racks[0][0]
    await world.occupy(busy)
    world.scheduler()
    job = await world.create(world.role("learner", len(world.nodes), world.gpus))
    await world.client.until(job.name, lambda job: job.message.startswith("waits"))
    await world.client.cancel(job.name)
    await world.client.until_state(job.name, "CANCELLED")
    await world.vacate(busy)
    other = await world.create(world.role("learner", len(world.nodes), world.gpus))
    other = await world.client.until_state(other.name, "RUNNING")
    await world.until(lambda: len(world.starts()) == len(world.nodes), "every member's start")
    assert world.starts() == {member: [pid] for member, pid in pids_of(other).items()}
    await world.client.cancel(other.name)
    await world.client.until_state(other.name, "CANCELLED")
    await world.until_clean(*pids_of(other).values())


async def test_a_job_of_higher_priority_takes_the_room_and_gives_it_back(world):
    world.scheduler()
    low = await world.create(world.role("rollout", len(world.nodes), world.gpus))
    before = await world.client.until_state(low.name, "RUNNING")
    high = await world.create(world.role("learner", len(world.nodes), world.gpus), priority=10)
    high = await world.client.until_state(high.name, "RUNNING")
    low = await world.client.get(low.name)
    assert (low.state, low.preemptions) == (job_pb2.Job.STATE_PENDING, 1)
    assert not any(alive(pid) for pid in pids_of(before).values())
    await world.client.cancel(high.name)
    after = await world.client.until(low.name, lambda job: job.state == job_pb2.Job.STATE_RUNNING and all_run(job))
    assert after.attempt == 2
    await world.client.cancel(low.name)
    await world.client.until_state(low.name, "CANCELLED")
    await world.until_clean(*pids_of(after).values())


__all__ = [name for name in dir() if name.startswith("test_")]
