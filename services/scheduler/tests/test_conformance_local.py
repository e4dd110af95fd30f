"""The conformance suite on backend `local`, where six agents of this machine are the nodes; and what moves members."""

import pytest
from conformance import *  # noqa: F403
from conformance import World, all_run, nodes_of, pids_of
from scheduler_stack import HANG_SECONDS, alive

from reflux.scheduler.v1 import job_pb2
from reflux.scheduler.v1 import scheduler_service_pb2 as pb


class LocalWorld(World):
    """Nodes are agents; a node that somebody else uses is one whose agent is away."""

    racks = (("n1", "n2", "n3"), ("n4", "n5", "n6"))
    own_agents = True

    def settings(self) -> dict[str, str]:
        return {"REFLUX_SCHEDULER_BACKEND": "local"}

    def begin(self) -> None:
        for node in self.nodes:
            self.stack.start_agent(node, REFLUX_AGENT_LEASE_SECONDS="1.5")

    async def kill_node(self, node: str) -> None:
        self.stack.kill(node)

    async def revive_node(self, node: str) -> None:
        self.stack.start_agent(node)

    async def occupy(self, node: str) -> None:
        self.stack.kill(node)

    async def vacate(self, node: str) -> None:
        self.stack.start_agent(node)

    def agents(self) -> list[int]:
        return [
            process.pid for name, process in self.stack.processes.items() if name != "scheduler" and alive(process.pid)
        ]


@pytest.fixture
def world(own_stack, client) -> LocalWorld:
    world = LocalWorld(own_stack, client)
    world.begin()
    return world


async def test_members_leave_a_draining_node_after_a_checkpoint_and_the_others_run_on(world):
    world.scheduler()
    await world.until_up()
    job = await world.create(world.role("learner", 2, world.gpus, required_level="rack"))
    before = await world.client.until_state(job.name, "RUNNING")
    drained = nodes_of(before)["learner/0"]
    await world.client.stub.DrainNode(pb.DrainNodeRequest(node=drained), timeout=HANG_SECONDS)
    await world.client.stub.MarkJobSaved(pb.MarkJobSavedRequest(name=job.name), timeout=HANG_SECONDS)
    after = await world.client.until(
        job.name, lambda job: all_run(job) and nodes_of(job)["learner/0"] != drained and job.members[0].pid
    )
    (rack,) = [rack for rack in world.racks if drained in rack]
    assert nodes_of(after)["learner/0"] in rack
    assert pids_of(after)["learner/1"] == pids_of(before)["learner/1"]
    await world.until(lambda: not alive(pids_of(before)["learner/0"]), "end of the member on the drained node")
    assert (after.attempt, after.requeues) == (1, 0)


async def test_an_elastic_gang_grows_into_idle_nodes_and_gives_them_back_to_who_needs_them(world):
    world.scheduler()
    await world.until_up()
    elastic = await world.create(world.role("rollout", 2, world.gpus, min_count=1, max_count=4))
    before = await world.client.until(elastic.name, lambda job: all_run(job) and len(job.placements) == 4)
    rigid = await world.create(world.role("learner", 4, world.gpus))
    await world.client.until_state(rigid.name, "RUNNING")
    after = await world.client.get(elastic.name)
    assert sorted(nodes_of(after)) == ["rollout/0", "rollout/1"]
    pids = pids_of(before)
    assert {member: pids_of(after)[member] for member in ("rollout/0", "rollout/1")} == {
        member: pids[member] for member in ("rollout/0", "rollout/1")
    }
    assert not any(alive(pids[member]) for member in ("rollout/2", "rollout/3"))
    assert (after.state, after.attempt) == (job_pb2.Job.STATE_RUNNING, 1)


async def test_room_that_was_freed_for_a_job_is_its_own_after_a_kill_of_the_scheduler(world):
    world.scheduler()
    low = await world.create(world.role("rollout", len(world.nodes), world.gpus, stop_grace_seconds=1.0))
    await world.client.until_state(low.name, "RUNNING")
    high = await world.create(world.role("learner", len(world.nodes), world.gpus), priority=10)
    await world.client.until(low.name, lambda job: job.preemptions)
    world.stack.kill("scheduler")
    world.scheduler()
    await world.client.until_state(high.name, "RUNNING")
    low = await world.client.get(low.name)
    assert (low.state, low.preemptions) == (job_pb2.Job.STATE_PENDING, 1)
