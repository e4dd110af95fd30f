"""A whole run whose processes are Slurm's: the stack asks a real Slurm for the room, agents run inside its jobs."""

import asyncio
import time

import pytest
from e2e_stack import HANG_SECONDS, Harness, Run, small_run
from slurm_cluster import Layout, slurm_cluster, why_not

from reflux_client import stack

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "runs")


async def test_a_run_trains_inside_jobs_of_a_real_slurm_and_leaves_none(tmp_path, monkeypatch) -> None:
    with slurm_cluster(Layout(racks=(4, 4), cpus=1, gpus=0)) as cluster:
        options = tmp_path / "slurm.toml"
        options.write_text(
            f'conf = "{cluster.conf}"\nwork_dir = "{cluster.folder}"\nagent_host = "loopback"\nlog_dir = "{tmp_path}"\n'
        )
        monkeypatch.setenv("REFLUX_SCHEDULER_BACKEND", "slurm")
        monkeypatch.setenv("REFLUX_SCHEDULER_BACKEND_OPTIONS", str(options))
        monkeypatch.setenv("REFLUX_STATE_DIR", str(tmp_path))
        monkeypatch.setenv("REFLUX_TRAINER_RUNS_DIR", str(tmp_path / "runs"))
        monkeypatch.setenv("REFLUX_STACK_SECRET", "secret of the stack on Slurm")
        stack.start(tmp_path, die_with_parent=True)
        try:
            harness = Harness(tmp_path)
            run = await harness.create(
                small_run("on-slurm", rl={"steps": 2}, fleet={"engines": 2, "rollout_workers": 3})
            )
            await harness.wait_step(run.name, 1)
            where = cluster.run("squeue", "-h", "-t", "RUNNING", "-o", "%N").split()
            run = await harness.wait_end(run.name)
            assert run.state == Run.STATE_SUCCEEDED, run.message
            nodes = cluster.run("scontrol", "show", "hostnames", ",".join(where)).split()
            assert len(nodes) > 1, f"{nodes}: no node has room for all of the gang"
            assert len({node[:2] for node in nodes}) == 1, f"{nodes}: a rack holds the gang, so it lies in one"
            assert harness.summary(run)["steps"] == 2
            end = time.monotonic() + HANG_SECONDS
            while cluster.run("squeue", "-h", "-t", "RUNNING,PENDING,COMPLETING"):
                assert time.monotonic() < end, "the job in Slurm outlives the run"
                await asyncio.sleep(0.2)
        finally:
            stack.stop(tmp_path)
