"""The control plane as a job of Ray's Jobs API. The dashboard needs ray[default], which gets its own environment."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from contextlib import contextmanager
from pathlib import Path

import pytest
from ray_cluster import ENVIRONMENT
from scheduler_stack import RETRY, Client, alive, free_port

from reflux_kit.channel import open_channel

ROOT = Path(__file__).parents[3]
SECRET = "not-on-the-dashboard"


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """An interpreter with all that this one has, and the dashboard's distributions."""
    folder = tmp_path_factory.mktemp("dashboard")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    purelib = Path(sysconfig.get_path("purelib"))
    inside = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (inside / "ours.pth").write_text(f"import site; site.addsitedir({str(purelib)!r})\n")
    install = [str(python), "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), "ray[default]"]
    done = subprocess.run(install, capture_output=True, text=True, timeout=170)
    if done.returncode:
        pytest.skip(f"ray[default] cannot be installed here: {done.stderr[-300:]}")
    return str(python)


@contextmanager
def head(python: str, folder: Path, port: int):
    """A Ray head with its dashboard, in the foreground."""
    environment = {**os.environ, **ENVIRONMENT, "RAY_TMPDIR": str(folder)}
    command = [
        python, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats", "--node-name=n0",
        "--num-cpus=4", "--num-gpus=4", "--object-store-memory=80000000", f"--temp-dir={folder}",
        "--labels=ray.io/gpu-domain=nvl-a", "--include-dashboard=true", f"--dashboard-port={port}",
        f"--port={free_port()}", f"--ray-client-server-port={free_port()}",
    ]  # fmt: skip
    with (folder / "head.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        yield
    except AssertionError:
        print((folder / "head.log").read_text()[-3000:])
        raise
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture
def folder():
    """Below /tmp: the path of a unix socket has 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="rayj", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
async def test_the_jobs_api_starts_the_scheduler_on_the_cluster_and_stops_it(python, valkey, folder):
    dashboard, address = free_port(), f"127.0.0.1:{free_port()}"
    (folder / "ray.toml").write_text('address = "auto"\nnamespace = "jobs"\n')
    settings = {
        "REFLUX_REDIS_URL": f"{valkey}/2", "REFLUX_SCHEDULER_LISTEN": address, "REFLUX_SCHEDULER_ADDRESS": address,
        "REFLUX_SCHEDULER_BACKEND": "ray", "REFLUX_SCHEDULER_BACKEND_OPTIONS": str(folder / "ray.toml"),
        "REFLUX_STATE_DIR": str(folder / "state"), "REFLUX_TEST_NOTE": SECRET,
    }  # fmt: skip
    (folder / "env").write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    submit = [python, str(ROOT / "deploy/ray/submit.py"), "--dashboard", f"http://127.0.0.1:{dashboard}"]
    start = [*submit, "start", "--env-file", str(folder / "env"), "--", python, "-m", "reflux_scheduler.main"]

    def run(command: list[str]) -> str:
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    with head(python, folder, dashboard):
        wait = [python, "-c", _WAIT, f"http://127.0.0.1:{dashboard}"]
        run(wait)
        assert "reflux: RUNNING" in run(start)
        assert "reflux is RUNNING already" in run(start)
        async with open_channel(address, retry=RETRY) as channel:
            client = Client(channel)
            job = await client.create(client.role("learner", gpus=4))
            job = await client.until_state(job.name, "RUNNING")
            (member,) = job.members
            assert job.placements[0].node == "ray/nvl-a/n0"
            await client.cancel(job.name)
            await client.until_state(job.name, "CANCELLED")
            assert not alive(member.pid)
        jobs = run([python, "-c", _JOBS, f"http://127.0.0.1:{dashboard}"])
        assert json.loads(jobs)["reflux"]["status"] == "RUNNING"
        assert SECRET not in jobs
        assert "reflux: " in run([*submit, "stop"])


_WAIT = """
import sys, time, requests
end = time.monotonic() + 90
while True:
    try:
        if requests.get(sys.argv[1] + "/api/version", timeout=5).ok:
            break
    except requests.ConnectionError:
        pass
    assert time.monotonic() < end, "no dashboard"
    time.sleep(0.2)
"""
_JOBS = """
import json, sys
from ray.job_submission import JobSubmissionClient
print(json.dumps({job.submission_id: dict(job) for job in JobSubmissionClient(sys.argv[1]).list_jobs()}, default=str))
"""
