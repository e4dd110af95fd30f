"""kill -9 of every process of a run: the same number of steps, every prompt trained exactly once."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import psutil
import pytest
from e2e_stack import HANG_SECONDS, small_run

from reflux.trainer.v1.run_pb2 import Run

STEPS = 12
SERVICES = ["sandbox", "valkey", "trainer", "weight-broker", "inference-gateway", "checkpoint", "scheduler"]
ROLES = ["engine", "rollout", "learner"]


KINDS = [
    {},
    {"staleness": "pace", "max_lag": 2},
    {"staleness": "drop", "oversampling": 1.5},
    {"in_flight": "adaptive", "max_lag": 2, "curriculum": "pass_rate"},
]
"""Ways to fill a batch, over which the random moments go round."""


async def run_to_the_end(harness, name, victims, after_seconds=0.0, **rl):
    """Starts a run, kills the victims one after another, sees each come back, checks the ledger at the end."""
    steps = STEPS * len(victims)
    created = await harness.create(small_run(name, rl={"steps": steps, "kl_coefficient": 0.01, **rl}))
    for number, victim in enumerate(victims):
        running = await harness.wait_step(created.name, STEPS * number + 3)
        assert running.state == Run.STATE_RUNNING, running.message
        await asyncio.sleep(after_seconds)
        pid = await pid_of(harness, running, victim)
        harness.kill(pid)
        back = asyncio.create_task(came_back(harness, running, victim, pid))
        if victim != victims[-1]:
            await asyncio.wait_for(back, HANG_SECONDS)
    ended = await harness.wait_end(created.name)
    assert ended.state == Run.STATE_SUCCEEDED, ended.message
    if victim in SERVICES or after_seconds == 0:
        await asyncio.wait_for(back, HANG_SECONDS)
    back.cancel()
    summary = harness.summary(ended)
    assert summary["steps"] == steps
    assert summary["ledger"]["violations"] == []
    assert summary["ledger"]["trained"] == steps * 4
    distances = harness.figures(ended, "kl_reference")
    assert distances[0] < 1e-6 < max(distances), "the reference is the policy that the run began with, kills or not"


async def pid_of(harness, run, victim):
    return await harness.role_pid(run, victim) if victim in ROLES else harness.record.pids[victim]


async def came_back(harness, run, victim, old_pid):
    """Returns when another process has taken the victim's place, while the run goes on."""
    while True:
        try:
            if await pid_of(harness, run, victim) != old_pid:
                return
        except grpc.aio.AioRpcError:
            pass  # the scheduler itself is coming back
        await asyncio.sleep(0.05)


TOGETHER = [
    ("sandbox", "scheduler", "learner"),
    ("trainer", "weight-broker", "engine"),
    ("valkey", "inference-gateway", "checkpoint", "rollout"),
]
"""All of them in three runs, since most of a run's time is the start of its processes; those that take long last."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("victims", TOGETHER, ids="-".join)
async def test_a_run_survives_kill_9(harness, victims):
    assert sorted(victim for group in TOGETHER for victim in group) == sorted([*ROLES, *SERVICES])
    await run_to_the_end(harness, f"kill-{victims[0]}", victims)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
async def test_a_run_survives_kill_9_of_any_process_at_any_time(harness, seed):
    victims = [*ROLES, *SERVICES]
    victim = victims[seed % len(victims)]
    kind = KINDS[(seed + seed // len(victims)) % len(KINDS)]
    await run_to_the_end(harness, f"soak-{victim}-{seed}", [victim], after_seconds=(seed * 0.37) % 2.0, **kind)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_redis_that_does_not_answer_for_ten_seconds_costs_no_prompt(harness):
    created = await harness.create(small_run("redis-away", rl={"steps": 30}))
    running = await harness.wait_step(created.name, 5)
    pid = harness.record.pids["valkey"]
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(10)
    finally:
        os.kill(pid, signal.SIGCONT)
    ended = await harness.wait_end(created.name)
    assert (ended.state, ended.attempt) == (Run.STATE_SUCCEEDED, running.attempt), ended.message
    summary = harness.summary(ended)
    assert summary["ledger"]["violations"] == []
    assert summary["ledger"]["trained"] == 30 * 4


async def test_ctrl_c_of_the_demo_leaves_no_process_behind(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        'name = "interrupted"\n[model]\nhidden_size = 32\nnum_layers = 2\nnum_heads = 2\n'
        "[warmup]\nsteps = 500\n[rl]\nsteps = 15\n"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith("REFLUX_")}
    environment["REFLUX_TRAINER_RUNS_DIR"] = str(tmp_path / "runs")
    process = subprocess.Popen(
        [sys.executable, "-m", "reflux_client.main", "demo", "--file", str(path)],
        env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        tree: list[psutil.Process] = []
        for _ in range(int(HANG_SECONDS * 5)):
            tree = psutil.Process(process.pid).children(recursive=True)
            started = [" ".join(_command_line(each)) for each in tree]
            if all(sum(role in line for line in started) >= 2 for role in ("engine.main", "rollout.main")):
                break
            await asyncio.sleep(0.2)
        assert len(tree) >= 10
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=HANG_SECONDS)
    finally:
        process.kill()
    assert process.returncode == 130, output
    psutil.wait_procs(tree, timeout=20)
    left = [
        each
        for each in psutil.process_iter()
        if _environment(each).get("REFLUX_TRAINER_RUNS_DIR") == str(tmp_path / "runs")
    ]
    assert [_command_line(each) for each in left] == []


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def test_a_killed_supervisor_leaves_no_process_behind(tmp_path):
    folder = tmp_path / "state"
    environment = os.environ | {"REFLUX_STATE_DIR": str(folder)}
    subprocess.run(
        [sys.executable, "-m", "reflux_client.main", "up"],
        env=environment,
        check=True,
        timeout=HANG_SECONDS,
        stdout=subprocess.DEVNULL,
    )
    supervisor = psutil.Process(_supervisor_pid(folder))
    tree = supervisor.children(recursive=True)
    assert len(tree) >= 8
    supervisor.kill()
    _, alive = psutil.wait_procs([supervisor, *tree], timeout=30)
    assert alive == []


def _supervisor_pid(folder: Path) -> int:
    from reflux_client.connection import read_record

    record = read_record(folder)
    assert record is not None
    return record.pid
