"""Scheduler and agents as real processes: gangs, restarts, waiting, what a start refuses."""

import asyncio
import json
import os
import signal
import urllib.request
import uuid
from pathlib import Path

import grpc
import pytest

from reflux.scheduler.v1 import job_pb2
from reflux.scheduler.v1 import scheduler_service_pb2 as pb

RUNNING = job_pb2.RoleStatus.STATE_RUNNING


def pids_of(job: job_pb2.Job) -> dict[str, int]:
    return {member.role_id.partition("/")[2]: member.pid for member in job.members}


def kinds_of(job: job_pb2.Job) -> list[str]:
    return [event.kind for event in job.events]


def all_run(job: job_pb2.Job) -> bool:
    return bool(job.members) and all(member.state == RUNNING for member in job.members)


def event_pid(event: job_pb2.JobEvent) -> int:
    return int(event.text.split("pid ")[1].split()[0])


async def test_a_gang_starts_with_its_environment_and_stops_as_one(stack, client, tmp_path):
    script = (
        "import json, os, pathlib, time; e = os.environ; "
        "p = pathlib.Path(e['OUT'], e['REFLUX_ROLE'] + e['REFLUX_RANK']); "
        "p.with_suffix('.new').write_text(json.dumps(dict(e))); p.with_suffix('.new').rename(p); "
        "print('hello', flush=True); time.sleep(600)"
    )
    environment = [job_pb2.EnvironmentVariable(name="OUT", value=str(tmp_path))]
    job = await client.create(
        client.role("learner", script, gpus=2, environment=environment),
        client.role("engine", script, count=2, gpus=1, environment=environment),
    )
    job = await client.until_state(job.name, "RUNNING")
    pids = pids_of(job)
    assert set(pids) == {"learner/0", "engine/0", "engine/1"}
    assert all(stack.alive(pid) for pid in pids.values())
    assert [placement.node for placement in job.placements] == ["test/b1/r1/n1"] * 3
    await stack.exists(tmp_path / "learner0", tmp_path / "engine0", tmp_path / "engine1")
    seen = json.loads((tmp_path / "engine1").read_text())
    assert (seen["REFLUX_JOB"], seen["REFLUX_ROLE"], seen["REFLUX_RANK"]) == (job.name, "engine", "1")
    assert (seen["CUDA_VISIBLE_DEVICES"], seen["REFLUX_NODE"]) == ("3", "n1")
    learner = json.loads((tmp_path / "learner0").read_text())
    assert (learner["REFLUX_RAILS"], seen["REFLUX_RAILS"]) == ("mlx5_0", "mlx5_1")
    assert seen["REFLUX_REDIS_URL"] == stack.environment["REFLUX_REDIS_URL"]
    assert (await client.stub.GetTopology(pb.GetTopologyRequest())).nodes[0].free.gpus == 0
    await client.cancel(job.name)
    job = await client.until_state(job.name, "CANCELLED")
    assert not any(stack.alive(pid) for pid in pids.values())
    assert "hello" in Path(job.members[0].log_path).read_text()
    assert (await client.stub.GetTopology(pb.GetTopologyRequest())).nodes[0].free.gpus == 4


async def test_a_job_succeeds_when_its_working_roles_do_and_serving_roles_are_stopped(stack, client):
    job = await client.create(client.role("learner", "print('done')"), client.role("engine", serves=True))
    job = await client.until_state(job.name, "SUCCEEDED")
    states = {member.role_id.split("/")[1]: member.state for member in job.members}
    assert states == {"learner": job_pb2.RoleStatus.STATE_SUCCEEDED, "engine": job_pb2.RoleStatus.STATE_STOPPED}
    assert job.ended_at >= job.created_at


async def test_a_killed_member_is_restarted_with_its_environment_and_counted(stack, client, tmp_path):
    script = (
        "import os, pathlib, time; e = os.environ; "
        "pathlib.Path(e['OUT'], e['REFLUX_RESTARTS'] + e['NOTE']).touch(); time.sleep(600)"
    )
    environment = [
        job_pb2.EnvironmentVariable(name="OUT", value=str(tmp_path)),
        job_pb2.EnvironmentVariable(name="NOTE", value="kept"),
    ]
    job = await client.create(client.role("engine", script, environment=environment, max_restarts=3))
    job = await client.until_state(job.name, "RUNNING")
    pid = job.members[0].pid
    await stack.exists(tmp_path / "0kept")
    os.kill(pid, signal.SIGKILL)
    job = await client.until(job.name, lambda job: job.members[0].restarts == 1 and all_run(job))
    assert job.members[0].pid != pid
    assert "restarted" in kinds_of(job)
    await stack.exists(tmp_path / "1kept")


async def test_a_member_that_keeps_failing_fails_the_job_with_its_last_words(stack, client):
    job = await client.create(
        client.role("learner", "import sys; sys.exit('out of luck')", max_restarts=2), client.role("engine")
    )
    job = await client.until_state(job.name, "FAILED")
    assert "learner/0 ended with status 1; 2 restarts within 600 s; last output: out of luck" in job.message
    assert {member.role_id.split("/")[1]: member.restarts for member in job.members} == {"learner": 2, "engine": 0}
    await stack.gone(*(event_pid(event) for event in job.events if event.kind == "started"))


async def test_a_program_that_cannot_be_executed_fails_the_job_at_once(stack, client):
    job = await client.create(job_pb2.RoleSpec(role="x", count=1, argv=["/no/such/program"], max_restarts=5))
    job = await client.until_state(job.name, "FAILED")
    assert "/no/such/program" in job.message
    assert "No such file" in job.message


async def test_a_waiting_job_says_for_what_and_starts_when_the_first_ends(stack, client):
    first = await client.create(client.role("learner", count=2, gpus=3))
    await client.until_state(first.name, "RUNNING")
    second = await client.create(client.role("learner", count=2, gpus=4), level="rack")
    third = await client.create(client.role("learner", gpus=2))
    second = await client.until(second.name, lambda job: job.message.startswith("waits: "))
    answer = await client.stub.ExplainJob(pb.ExplainJobRequest(name=second.name))
    assert "one learner needs 4 GPUs on one node" in answer.sentence
    assert answer.cause in ("resources", "fragmentation")
    (shortage,) = answer.shortages
    assert (shortage.resource, shortage.needed, shortage.free, shortage.capacity) == ("gpus", 4, 1, 4)
    assert list(shortage.holders) == [first.name]
    third = await client.until(third.name, lambda job: job.message.startswith("waits: "))
    await client.cancel(first.name)
    await client.until_state(second.name, "RUNNING")
    assert (await client.get(third.name)).state == job_pb2.Job.STATE_PENDING
    await client.cancel(second.name)
    await client.until_state(third.name, "RUNNING")


async def test_a_job_larger_than_the_cluster_fails_at_once_naming_the_largest_that_fits(stack, client):
    job = await client.create(client.role("learner", count=9, gpus=1))
    assert job.state == job_pb2.Job.STATE_FAILED
    assert "learner needs 9 GPUs in one cluster" in job.message
    assert "room for 8 GPUs; with 8 instead of 9 learner it would fit" in job.message
    answer = await client.stub.ExplainJob(pb.ExplainJobRequest(name=job.name))
    assert "9 GPUs" in answer.sentence
    assert [(short.resource, short.needed, short.capacity) for short in answer.shortages] == [("gpus", 9, 8)]


async def test_the_same_request_id_makes_one_job(stack, client):
    before = len((await client.stub.ListJobs(pb.ListJobsRequest())).jobs)
    request_id = str(uuid.uuid4())
    calls = [client.create(client.role("engine"), request_id=request_id) for _ in range(5)]
    assert len({job.name for job in await asyncio.gather(*calls)}) == 1
    assert len((await client.stub.ListJobs(pb.ListJobsRequest())).jobs) == before + 1


async def test_without_the_stack_token_calls_are_refused(own_stack, client):
    own_stack.environment["REFLUX_STACK_SECRET"] = "secret-of-the-stack"
    own_stack.start_scheduler()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.create(client.role("engine"))
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_metrics_of_both_processes_can_be_read(own_stack, client):
    urls = {name: f"127.0.0.1:{own_stack.free_port()}" for name in ("SCHEDULER", "AGENT")}
    own_stack.environment |= {f"REFLUX_{name}_HTTP_LISTEN": address for name, address in urls.items()}
    own_stack.start_scheduler()
    own_stack.start_agent()
    job = await client.create(client.role("engine"))
    await client.until_state(job.name, "RUNNING")
    job = await client.until_rss(job.name)
    scheduler, agent = [
        (await asyncio.to_thread(urllib.request.urlopen, f"http://{address}/metrics")).read().decode()
        for address in urls.values()
    ]
    assert 'reflux_scheduler_gangs_placed_total{level="node"} 1.0' in scheduler
    assert 'reflux_scheduler_resources{resource="gpus",share="total"} 8.0' in scheduler
    assert 'reflux_agent_memory_bytes{role="engine"}' in agent
