"""The loop with its checkpoints in an S3-compatible store: streamed by the learner, resumed from there."""

import shutil
import socket
import subprocess
import sys
import time

import pytest
from e2e_stack import HANG_SECONDS, LEAN, Harness, small_run

from reflux.trainer.v1 import trainer_service_pb2 as trainer_pb
from reflux.trainer.v1.run_pb2 import Run
from reflux.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub
from reflux_client import connection, stack

boto3 = pytest.importorskip("boto3", reason="boto3 is not installed")
BUCKET = "reflux-tests"
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}


@pytest.fixture
def s3(monkeypatch):
    """Endpoint of a moto server with one bucket."""
    pytest.importorskip("moto.server", reason="moto is not installed")
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_listening(port)
        endpoint = f"http://127.0.0.1:{port}"
        client = boto3.client("s3", endpoint_url=endpoint)
        client.create_bucket(Bucket=BUCKET)
        yield endpoint, client
    finally:
        server.kill()
        server.wait()


def wait_listening(port):
    end = time.monotonic() + HANG_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.05)


async def test_a_run_resumes_on_a_fresh_stack_from_what_it_streamed_to_s3(s3, tmp_path, monkeypatch):
    endpoint, client = s3
    monkeypatch.setenv("REFLUX_OBJECT_STORE", f"s3://{BUCKET}/lab")
    monkeypatch.setenv("REFLUX_S3_ENDPOINT", endpoint)
    monkeypatch.setenv("REFLUX_TRAINER_RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.delenv("REFLUX_REDIS_URL", raising=False)
    monkeypatch.setenv("REFLUX_STATE_DIR", str(tmp_path / "first"))
    stack.start(tmp_path / "first", die_with_parent=True)
    try:
        first = Harness(tmp_path / "first")
        name = (await first.create(small_run("on-s3", rl={"steps": 400}, fleet=LEAN))).name
        await first.wait_step(name, 4)
        async with connection.channel("trainer") as channel:
            await TrainerServiceStub(channel).CancelRun(trainer_pb.CancelRunRequest(name=name))
        cancelled = await first.wait_end(name)
    finally:
        stack.stop(tmp_path / "first")
    keys = [item["Key"] for item in client.list_objects_v2(Bucket=BUCKET)["Contents"]]
    assert any(key.endswith(".safetensors") for key in keys)
    shutil.rmtree(tmp_path / "first")  # Redis is gone with it
    monkeypatch.setenv("REFLUX_STATE_DIR", str(tmp_path / "second"))
    stack.start(tmp_path / "second", die_with_parent=True)
    try:
        second = Harness(tmp_path / "second")
        steps = cancelled.step + 3
        document = small_run("on-s3", rl={"steps": steps}, fleet=LEAN)
        again = await second.create(document, resume_run=name.removeprefix("runs/"))
        ended = await second.wait_end(again.name)
        assert ended.state == Run.STATE_SUCCEEDED, ended.message
        summary = second.summary(ended)
        assert (summary["steps"], summary["ledger"]["violations"]) == (steps, [])
    finally:
        stack.stop(tmp_path / "second")
