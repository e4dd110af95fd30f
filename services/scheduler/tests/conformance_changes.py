"""Jobs that change while they run: members leave draining nodes, elastic jobs grow and shrink, jobs migrate."""

import pytest
from conformance_world import World, all_run, nodes_of, pids_of
from scheduler_stack import alive

from reflux.scheduler.v1 import job_pb2


async def start_on(world: World, node: str) -> job_pb2.Job:
    """A job of one member that has a node to itself: all others are closed while it is placed."""
    others = [each for each in world.nodes if each != node]
    await world.drain(*others)
    job = await world.create(world.role("rollout", 1, world.gpus))
    job = await world.client.until_state(job.name, "RUNNING")
    await world.undrain(*others)
    return job


async def test_members_leave_a_draining_node_at_a_checkpoint_and_the_others_run_on(world):
    world.scheduler()
    await world.until_up()
    count = min(map(len, world.racks)) - 1  # whichever rack it gets, there is room for one more
    job = await world.create(world.role("learner", count, world.gpus, required_level="rack"))
    before = await world.client.until_state(job.name, "RUNNING")
    drained = nodes_of(before)["learner/0"]
    await world.drain(drained)
    # Another job is placed meanwhile: the policy has looked at the drain, and left the job alone.
    probe = await world.create(world.role("probe"))
    probe = await world.client.until_state(probe.name, "RUNNING")
    assert nodes_of(probe)["probe/0"] != drained
    assert pids_of(await world.client.get(job.name)) == pids_of(before)
    await world.saved(job)
    after = await world.client.until(
        job.name, lambda job: all_run(job) and nodes_of(job)["learner/0"] not in ("", drained)
    )
    home = next(each for each in world.racks if drained in each)
    assert nodes_of(after)["learner/0"] in home
    kept = {member: pid for member, pid in pids_of(before).items() if member != "learner/0"}
    assert {member: pids_of(after)[member] for member in kept} == kept
    assert not alive(pids_of(before)["learner/0"])
    assert after.attempt == 1
    assert (await world.topology())[drained].free.gpus == world.gpus
    await world.end(job, probe)


@pytest.mark.slow
async def test_a_drain_ends_even_if_the_jobs_on_the_node_never_save(world):
    world.scheduler(REFLUX_SCHEDULER_NODE_DRAIN_SECONDS="1")
    await world.until_up()
    job = await world.create(world.role("learner", 2, world.gpus))
    before = await world.client.until_state(job.name, "RUNNING")
    drained = nodes_of(before)["learner/1"]
    await world.drain(drained)
    after = await world.client.until(
        job.name, lambda job: all_run(job) and nodes_of(job)["learner/1"] not in ("", drained)
    )
    assert pids_of(after)["learner/0"] == pids_of(before)["learner/0"]
    assert not alive(pids_of(before)["learner/1"])
    await world.undrain(drained)
    await world.end(job)
    # A job that has no other place goes back into the queue, and starts again when the node is open again.
    job = await world.create(world.role("learner", len(world.nodes), world.gpus))
    before = await world.client.until_state(job.name, "RUNNING")
    await world.drain(drained)
    waiting = await world.client.until_state(job.name, "PENDING")
    assert drained in "".join(event.text for event in waiting.events if event.kind == "requeued")
    assert not any(alive(pid) for pid in pids_of(before).values())
    await world.undrain(drained)
    after = await world.client.until_state(job.name, "RUNNING")
    assert (after.attempt, after.requeues) == (2, 1)
    await world.end(job)


@pytest.mark.slow
async def test_an_elastic_job_grows_into_idle_room_and_gives_it_back_without_touching_the_others(world):
    world.scheduler()
    await world.until_up()
    most = len(world.nodes)
    # A grant cannot be given back in pieces: where nodes have no agents of their own the first members stay.
    least = 1 if world.own_agents else 2
    job = await world.create(world.role("rollout", 2, world.gpus, min_count=1, max_count=most))
    small = await world.client.until_state(job.name, "RUNNING")
    large = await world.client.until(job.name, lambda job: all_run(job) and len(pids_of(job)) == most)
    assert pids_of(small).items() <= pids_of(large).items()
    assert set(pids_of(large)) == {f"rollout/{rank}" for rank in range(most)}
    assert set(nodes_of(large).values()) == set(world.nodes)
    other = await world.create(world.role("learner", most - least, world.gpus))
    other = await world.client.until_state(other.name, "RUNNING")
    shrunk = await world.client.get(job.name)
    assert shrunk.state == job_pb2.Job.STATE_RUNNING
    assert pids_of(shrunk) == {f"rollout/{rank}": pids_of(large)[f"rollout/{rank}"] for rank in range(least)}
    assert not any(alive(pid) for member, pid in pids_of(large).items() if member not in pids_of(shrunk))
    await world.client.cancel(other.name)
    again = await world.client.until(job.name, lambda job: all_run(job) and len(pids_of(job)) == most)
    assert pids_of(shrunk).items() <= pids_of(again).items()
    assert again.attempt == 1
    assert all(len(world.starts()[member]) == 1 for member in pids_of(shrunk))
    await world.end(job)


@pytest.mark.slow
async def test_a_movable_job_migrates_so_that_a_gang_fits(world):
    world.scheduler(policy="defragmentation_seconds = 0")
    await world.until_up()
    first, second = world.racks
    mover, stayer = await start_on(world, first[0]), await start_on(world, second[0])
    gang = await world.create(world.role("learner", len(first), world.gpus, required_level="rack"))
    gang = await world.client.until(gang.name, lambda job: job.message.startswith("waits"))
    assert pids_of(await world.client.get(mover.name)) == pids_of(mover)  # without a checkpoint nobody moves
    await world.saved(mover)
    gang = await world.client.until_state(gang.name, "RUNNING")
    assert set(nodes_of(gang).values()) == set(first)
    moved = await world.client.until(mover.name, lambda job: job.attempt == 2 and all_run(job))
    assert nodes_of(moved)["rollout/0"] in second
    assert "migrated" in [event.kind for event in moved.events]
    assert not alive(pids_of(mover)["rollout/0"])
    assert pids_of(await world.client.get(stayer.name)) == pids_of(stayer)
    await world.end(gang, moved, stayer)


__all__ = [name for name in dir() if name.startswith("test_")]
