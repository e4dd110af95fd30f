"""Scheduler and agents as real processes: gangs, restarts, crashes of each part."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
import redis

from reflux.scheduler.v1 import job_pb2
from reflux.scheduler.v1 import scheduler_service_pb2 as pb

RUNNING = job_pb2.RoleStatus.STATE_RUNNING


def pids_of(job: job_pb2.Job) -> dict[str, int]:
    return {member.role_id.partition("/")[2]: member.pid for member in job.members}


def kinds_of(job: job_pb2.Job) -> list[str]:
    return [event.kind for event in job.events]


def all_run(job: job_pb2.Job) -> bool:
    return bool(job.members) and all(member.state == RUNNING for member in job.members)


async def test_a_gang_starts_with_its_environment_and_stops_as_one(stack, client, tmp_path):
    stack.start_scheduler()
    stack.start_agent(REFLUX_STACK_NOTE="from the agent")
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
    assert (seen["CUDA_VISIBLE_DEVICES"], seen["REFLUX_STACK_NOTE"]) == ("3", "from the agent")
    assert seen["REFLUX_REDIS_URL"] == stack.environment["REFLUX_REDIS_URL"]
    assert (await client.stub.GetTopology(pb.GetTopologyRequest())).nodes[0].free.gpus == 0
    await client.cancel(job.name)
    job = await client.until_state(job.name, "CANCELLED")
    assert not any(stack.alive(pid) for pid in pids.values())
    assert "hello" in Path(job.members[0].log_path).read_text()
    assert (await client.stub.GetTopology(pb.GetTopologyRequest())).nodes[0].free.gpus == 4


async def test_a_job_succeeds_when_its_working_roles_do_and_serving_roles_are_stopped(stack, client):
    stack.start_scheduler()
    stack.start_agent()
    job = await client.create(client.role("learner", "print('done')"), client.role("engine", serves=True))
    job = await client.until_state(job.name, "SUCCEEDED")
    states = {member.role_id.split("/")[1]: member.state for member in job.members}
    assert states == {"learner": job_pb2.RoleStatus.STATE_SUCCEEDED, "engine": job_pb2.RoleStatus.STATE_STOPPED}
    assert job.ended_at >= job.created_at


async def test_a_killed_member_is_restarted_with_its_environment_and_counted(stack, client, tmp_path):
    stack.start_scheduler()
    stack.start_agent()
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
    stack.start_scheduler()
    stack.start_agent()
    job = await client.create(
        client.role("learner", "import sys; sys.exit('out of luck')", max_restarts=2), client.role("engine")
    )
    job = await client.until_state(job.name, "FAILED")
    assert "learner/0 ended with status 1; 2 restarts within 600 s; last output: out of luck" in job.message
    assert {member.role_id.split("/")[1]: member.restarts for member in job.members} == {"learner": 2, "engine": 0}
    await stack.gone(*(event_pid(event) for event in job.events if event.kind == "started"))


def event_pid(event: job_pb2.JobEvent) -> int:
    return int(event.text.split("pid ")[1].split()[0])


async def test_a_program_that_cannot_be_executed_fails_the_job_at_once(stack, client):
    stack.start_scheduler()
    stack.start_agent()
    job = await client.create(job_pb2.RoleSpec(role="x", count=1, argv=["/no/such/program"], max_restarts=5))
    job = await client.until_state(job.name, "FAILED")
    assert "/no/such/program" in job.message
    assert "No such file" in job.message


async def test_a_killed_scheduler_comes_back_to_the_same_processes(stack, client):
    stack.start_scheduler()
    stack.start_agent()
    job = await client.create(client.role("learner"), client.role("engine", count=2), request_id="one")
    before = await client.until_state(job.name, "RUNNING")
    stack.kill("scheduler")
    stack.start_scheduler()
    again = await client.create(client.role("learner"), client.role("engine", count=2), request_id="one")
    assert again.name == job.name
    # A new job runs only after the agent has come back and the old one was reconciled.
    probe = await client.create(client.role("probe", "pass"))
    await client.until_state(probe.name, "SUCCEEDED")
    after = await client.get(job.name)
    assert after.state == job_pb2.Job.STATE_RUNNING
    assert pids_of(after) == pids_of(before)
    assert all(stack.alive(pid) for pid in pids_of(after).values())
    assert [member.restarts for member in after.members] == [0, 0, 0]


async def test_a_scheduler_killed_while_starting_starts_nothing_twice(stack, client, tmp_path):
    stack.start_scheduler()
    stack.start_agent()
    script = "import os, pathlib, time; pathlib.Path(os.environ['OUT'], str(os.getpid())).touch(); time.sleep(600)"
    environment = [job_pb2.EnvironmentVariable(name="OUT", value=str(tmp_path / "pids"))]
    (tmp_path / "pids").mkdir()
    await client.until_agent()
    job = await client.create(client.role("rollout", script, count=5, environment=environment))
    stack.kill("scheduler")
    stack.start_scheduler()
    job = await client.until(job.name, lambda job: job.state == job_pb2.Job.STATE_RUNNING and all_run(job))
    pids = set(pids_of(job).values())
    await stack.exists(*(tmp_path / "pids" / str(pid) for pid in pids))
    assert {int(path.name) for path in (tmp_path / "pids").iterdir()} == pids


async def test_members_that_the_scheduler_does_not_know_are_stopped(stack, client, redis_url, tmp_path):
    stack.start_scheduler()
    stack.start_agent()
    job = await client.create(client.role("engine"))
    job = await client.until_state(job.name, "RUNNING")
    stack.kill("scheduler")
    redis.Redis.from_url(redis_url).flushall()
    stack.start_scheduler()
    await stack.gone(job.members[0].pid)


async def test_a_killed_agent_leaves_nothing_behind_and_the_next_one_starts_the_members_anew(stack, client, tmp_path):
    stack.start_scheduler()
    stack.start_agent()
    # The member's child leaves its session and ignores SIGTERM: only the keeper can find it.
    script = (
        "import os, pathlib, subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', "
        "'import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)'], start_new_session=True); "
        "pathlib.Path(os.environ['OUT'], os.environ['REFLUX_RANK']).write_text(f'{child.pid} '); time.sleep(600)"
    )
    environment = [job_pb2.EnvironmentVariable(name="OUT", value=str(tmp_path))]
    job = await client.create(client.role("engine", script, count=2, environment=environment, max_restarts=1))
    job = await client.until_state(job.name, "RUNNING")
    await stack.exists(tmp_path / "0", tmp_path / "1")
    children = [int((tmp_path / rank).read_text()) for rank in "01"]
    members = list(pids_of(job).values())
    keepers = stack.children(stack.processes["n1"].pid)
    stack.kill("n1")
    await stack.gone(*members, *children, *keepers)
    stack.start_agent()
    job = await client.until(job.name, lambda job: all_run(job) and all(m.restarts == 1 for m in job.members))
    assert "lost" in kinds_of(job)
    assert not set(members) & set(pids_of(job).values())


async def test_a_killed_keeper_takes_its_member_along_and_counts_as_its_end(stack, client):
    stack.start_scheduler()
    stack.start_agent()
    job = await client.create(client.role("engine", max_restarts=1))
    job = await client.until_state(job.name, "RUNNING")
    (keeper,) = stack.children(stack.processes["n1"].pid)
    os.kill(keeper, signal.SIGKILL)
    await stack.gone(job.members[0].pid)
    await client.until(job.name, lambda job: all_run(job) and job.members[0].restarts == 1)


async def test_an_agent_that_ends_in_order_stops_its_members_first(stack, client):
    stack.start_scheduler()
    stack.start_agent()
    job = await client.create(client.role("engine", max_restarts=1))
    job = await client.until_state(job.name, "RUNNING")
    stack.kill("n1", signal.SIGTERM)
    assert not stack.alive(job.members[0].pid)


async def test_members_stop_when_the_scheduler_stays_away_longer_than_the_lease(stack, client):
    stack.start_scheduler(REFLUX_SCHEDULER_LEASE_SECONDS="1")
    stack.start_agent()
    job = await client.create(client.role("engine", max_restarts=2))
    job = await client.until_state(job.name, "RUNNING")
    pid = job.members[0].pid
    stack.kill("scheduler")
    await stack.gone(pid)
    stack.start_scheduler()
    job = await client.until(job.name, lambda job: all_run(job) and job.members[0].restarts == 1)
    assert "lease ended" in "".join(event.text for event in job.events if event.kind == "lost")


async def test_a_job_on_a_node_that_stays_away_fails_and_names_it(stack, client):
    stack.start_scheduler(REFLUX_SCHEDULER_LEASE_SECONDS="1", REFLUX_SCHEDULER_LOST_MARGIN_SECONDS="0.5")
    stack.start_agent("n1")
    stack.start_agent("n2")
    job = await client.create(client.role("engine", count=2, gpus=4, max_restarts=9))
    job = await client.until_state(job.name, "RUNNING")
    pids = pids_of(job)
    stack.kill("n2")
    job = await client.until_state(job.name, "FAILED")
    assert "node n2 is lost" in job.message
    await stack.gone(*pids.values())


async def test_a_waiting_job_says_for_what_and_starts_when_the_first_ends(stack, client):
    stack.start_scheduler()
    stack.start_agent("n1")
    stack.start_agent("n2")
    first = await client.create(client.role("learner", count=2, gpus=3))
    await client.until_state(first.name, "RUNNING")
    second = await client.create(client.role("learner", count=2, gpus=4), level="rack")
    third = await client.create(client.role("probe", "pass"))
    second = await client.until(second.name, lambda job: job.message.startswith("waits for"))
    answer = await client.stub.ExplainJob(pb.ExplainJobRequest(name=second.name))
    assert "one learner needs 4 GPUs on one node" in answer.sentence
    (shortage,) = answer.shortages
    assert (shortage.resource, shortage.needed, shortage.free, shortage.capacity) == ("gpus", 4, 1, 4)
    assert list(shortage.holders) == [first.name]
    answer = await client.stub.ExplainJob(pb.ExplainJobRequest(name=third.name))
    assert second.name in answer.sentence
    await client.cancel(first.name)
    await client.until_state(second.name, "RUNNING")
    await client.until_state(third.name, "SUCCEEDED")


async def test_a_job_waits_for_an_agent_and_says_so(stack, client):
    stack.start_scheduler()
    job = await client.create(client.role("engine"))
    job = await client.until(job.name, lambda job: "without a live agent" in job.message)
    stack.start_agent()
    await client.until_state(job.name, "RUNNING")


async def test_a_job_larger_than_the_cluster_fails_at_once_naming_the_largest_that_fits(stack, client):
    stack.start_scheduler()
    job = await client.create(client.role("learner", count=9, gpus=1))
    assert job.state == job_pb2.Job.STATE_FAILED
    assert job.message == (
        "learner needs 9 GPUs in one cluster, largest cluster has 8 GPUs; with 8 instead of 9 learner it would fit"
    )
    answer = await client.stub.ExplainJob(pb.ExplainJobRequest(name=job.name))
    assert "9 GPUs" in answer.sentence


async def test_the_same_request_id_makes_one_job(stack, client):
    stack.start_scheduler()
    first = await client.create(client.role("engine"), request_id="same")
    second = await client.create(client.role("engine"), request_id="same")
    assert first.name == second.name
    assert len((await client.stub.ListJobs(pb.ListJobsRequest())).jobs) == 1


async def test_a_second_agent_of_a_node_takes_it_over_and_the_first_leaves(stack, client):
    stack.start_scheduler()
    stack.start_agent()
    job = await client.create(client.role("engine", max_restarts=2))
    job = await client.until_state(job.name, "RUNNING")
    pid = job.members[0].pid
    first = stack.processes.pop("n1")
    stack.start_agent()
    await stack.gone(pid, first.pid)
    first.wait()
    await client.until(job.name, lambda job: all_run(job) and job.members[0].restarts == 1)


@pytest.mark.parametrize(
    ("module", "environment", "words"),
    [
        ("reflux_scheduler.main", {"REFLUX_SCHEDULER_TOPOLOGY": "none.toml"}, "none.toml"),
        ("reflux_scheduler.main", {"REFLUX_REDIS_URL": "redis://127.0.0.1:1/0"}, "127.0.0.1:1"),
        ("reflux_scheduler.agent.main", {"REFLUX_STATE_DIR": "/proc/none"}, "/proc/none"),
        ("reflux_scheduler.agent.main", {"REFLUX_AGENT_NODE": "n9"}, "n9"),
    ],
)
async def test_a_bad_environment_is_one_line_and_status_2(stack, client, module, environment, words):
    stack.start_scheduler()
    await client.ready()
    listen = {"REFLUX_SCHEDULER_LISTEN": "127.0.0.1:0"}
    command = [sys.executable, "-m", module]
    done = subprocess.run(
        command, env={**stack.environment, **listen, **environment}, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


async def test_without_the_stack_token_calls_are_refused(stack, client):
    stack.environment["REFLUX_STACK_SECRET"] = "secret-of-the-stack"
    stack.start_scheduler()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.create(client.role("engine"))
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
