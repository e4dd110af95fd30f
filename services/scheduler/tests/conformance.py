"""What every backend has to keep: one set of tests against a small `World`, a cluster with a scheduler in front of it.

A test module of a backend says `globals().update(suite(...))` and has a fixture `world` that yields its World, started.
"""

import os
import signal
import uuid
from collections.abc import Collection
from types import FunctionType

import pytest
from conformance_changes import *  # noqa: F403
from conformance_crashes import *  # noqa: F403
from conformance_world import SHORT_LEASE, all_run, nodes_of, pids_of, restarts_of
from scheduler_stack import alive

from reflux.scheduler.v1 import job_pb2


async def test_the_life_of_a_gang(world):
    """All run -> a member dies -> the scheduler dies -> cancelled, and nothing is left."""
    world.scheduler()
    request_id = str(uuid.uuid4())
    roles = (world.role("learner", 2, world.gpus - 1), world.role("engine", 2, 1))
    job = await world.create(*roles, request_id=request_id)
    job = await world.client.until_state(job.name, "RUNNING")
    pids, nodes = pids_of(job), nodes_of(job)
    await world.until(lambda: len(world.starts()) == 4, "every member's start")
    assert world.starts() == {member: [pid] for member, pid in pids.items()}
    seen = {member: world.environment_of(member, pid) for member, pid in pids.items()}
    assert {member: (each["REFLUX_JOB"], each["REFLUX_NODE"]) for member, each in seen.items()} == {
        member: (job.name, node) for member, node in nodes.items()
    }
    devices = [(each["REFLUX_NODE"], gpu) for each in seen.values() for gpu in each["CUDA_VISIBLE_DEVICES"].split(",")]
    assert len(set(devices)) == len(devices) == 2 * world.gpus

    os.kill(pids["learner/1"], signal.SIGKILL)
    job = await world.client.until(job.name, lambda job: all_run(job) and restarts_of(job)["learner/1"] == 1)
    expected = {**pids, "learner/1": pids_of(job)["learner/1"]}
    assert (pids_of(job), nodes_of(job)) == (expected, nodes)
    assert expected["learner/1"] != pids["learner/1"]

    world.stack.kill("scheduler")
    world.scheduler()
    again = await world.create(*roles, request_id=request_id)
    assert again.name == job.name
    # Known only once the agents have come back to the new scheduler.
    os.kill(pids["engine/0"], signal.SIGKILL)
    job = await world.client.until(job.name, lambda job: all_run(job) and restarts_of(job)["engine/0"] == 1)
    expected["engine/0"] = pids_of(job)["engine/0"]
    assert (pids_of(job), nodes_of(job), job.attempt) == (expected, nodes, 1)
    assert all(alive(pid) for pid in expected.values())

    await world.until(lambda: sum(map(len, world.starts().values())) == 6, "every member's last start")
    await world.end(job)
    assert world.starts().keys() == expected.keys()
    assert all(len(starts) == len({pids[member], expected[member]}) for member, starts in world.starts().items())


async def test_a_lost_node_is_replaced_by_the_spare_of_its_rack_and_the_others_run_on(world):
    *used, spare = world.racks[0]
    world.scheduler(spares=(spare,), **SHORT_LEASE)
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
    world.scheduler(**SHORT_LEASE)
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
    job = await world.client.until(job.name, lambda job: job.message.startswith("waits"))
    # Another job runs meanwhile: the scheduler had every chance to start a part of the first.
    probe = await world.create(world.role("probe"))
    await world.client.until_state(probe.name, "RUNNING")
    await world.until(world.starts, "start of the probe")
    assert set(world.starts()) == {"probe/0"}
    assert (await world.client.get(job.name)).state in (job_pb2.Job.STATE_PENDING, job_pb2.Job.STATE_PLACED)
    await world.vacate(busy)
    job = await world.client.until_state(job.name, "RUNNING")
    assert len(pids_of(job)) == len(world.nodes)
    await world.end(job, probe)


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


def suite(quick: Collection[str]) -> dict[str, FunctionType]:
    """Tests of a backend's own by name, those that are not `quick` for `make soak` only: marks on the originals would
    count for every backend."""
    tests: dict[str, FunctionType] = {}
    for name in __all__:
        test = globals()[name]
        own = FunctionType(test.__code__, test.__globals__, name, test.__defaults__, test.__closure__)
        own.__dict__.update(test.__dict__)
        tests[name] = own if name in quick else pytest.mark.slow(own)
    return tests
