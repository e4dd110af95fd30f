"""kill -9 of every process of a run: the same number of steps, every prompt trained exactly once."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from e2e_stack import HANG_SECONDS, small_run

from reflux.trainer.v1.run_pb2 import Run

STEPS = 12
SERVICES = ["sandbox", "valkey", "trainer", "weight-broker", "inference-gateway", "checkpoint", "scheduler"]
ROLES = ["engine", "rollout", "learner"]


async def run_to_the_end(harness, name, kill):
    """Starts a run, calls `kill(run)` in the middle of it, checks the ledger at the end."""
    created = await harness.create(small_run(name, rl={"steps": STEPS}))
    running = await harness.wait_step(created.name, 3)
    assert running.state == Run.STATE_RUNNING, running.message
    await kill(running)
    ended = await harness.wait_end(created.name)
    assert ended.state == Run.STATE_SUCCEEDED, ended.message
    summary = harness.summary(ended)
    assert summary["steps"] == STEPS
    assert summary["ledger"]["violations"] == []
    assert summary["ledger"]["trained"] == STEPS * 4


@pytest.mark.parametrize("role", ROLES)
async def test_a_run_survives_kill_9_of_a_role(harness, role):
    async def kill(run):
        harness.kill(await harness.role_pid(run, role))

    await run_to_the_end(harness, f"kill-{role}", kill)


@pytest.mark.parametrize("service", SERVICES)
async def test_a_run_survives_kill_9_of_a_service(harness, service):
    async def kill(_run):
        harness.kill(harness.record.pids[service])

    await run_to_the_end(harness, f"kill-{service}", kill)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
async def test_a_run_survives_kill_9_of_any_process_at_any_time(harness, seed):
    victims = [*ROLES, *SERVICES]
    victim = victims[seed % len(victims)]

    async def kill(run):
        await asyncio.sleep((seed * 0.37) % 2.0)
        pid = await harness.role_pid(run, victim) if victim in ROLES else harness.record.pids[victim]
        harness.kill(pid)

    await run_to_the_end(harness, f"soak-{victim}-{seed}", kill)


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
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        tree: list[psutil.Process] = []
        for _ in range(int(HANG_SECONDS * 5)):
            tree = psutil.Process(process.pid).children(recursive=True)
            if any("learner" in " ".join(_command_line(each)) for each in tree):
                break
            await asyncio.sleep(0.2)
        assert len(tree) >= 10
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=HANG_SECONDS)
    finally:
        process.kill()
    assert process.returncode == 130, output
    _, alive = psutil.wait_procs(tree, timeout=20)
    assert [_command_line(each) for each in alive] == []


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
