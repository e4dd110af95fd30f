"""The loop with its checkpoints in an S3-compatible store: streamed by the learner, resumed from there."""

import asyncio
import json
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

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
    """A moto server with one bucket."""
    pytest.importorskip("moto.server", reason="moto is not installed")
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = MotoServer(port)
    try:
        server.start()
        yield server
    finally:
        server.kill()


class MotoServer:
    """An S3-compatible server that forgets everything when it is killed."""

    def __init__(self, port):
        self.port, self.endpoint = port, f"http://127.0.0.1:{port}"
        self.client = boto3.client("s3", endpoint_url=self.endpoint)

    def start(self):
        """Starts it, with an empty bucket."""
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_listening(self.port)
        self.client.create_bucket(Bucket=BUCKET)

    def kill(self):
        """kill -9."""
        self._process.kill()
        self._process.wait()

    def stored(self):
        """Keys of all objects."""
        return [item["Key"] for item in self.client.list_objects_v2(Bucket=BUCKET).get("Contents", [])]


def wait_listening(port):
    end = time.monotonic() + HANG_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.05)


@pytest.mark.slow
async def test_a_run_resumes_on_a_fresh_stack_from_what_it_streamed_to_s3(s3, tmp_path, monkeypatch):
    monkeypatch.setenv("REFLUX_OBJECT_STORE", f"s3://{BUCKET}/lab")
    monkeypatch.setenv("REFLUX_S3_ENDPOINT", s3.endpoint)
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
    assert any(key.endswith(".safetensors") for key in s3.stored())
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


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_run_trains_on_while_s3_is_away_and_checkpoints_again_when_it_is_back(s3, tmp_path, monkeypatch):
    monkeypatch.setenv("REFLUX_OBJECT_STORE", f"s3://{BUCKET}/lab")
    monkeypatch.setenv("REFLUX_S3_ENDPOINT", s3.endpoint)
    monkeypatch.setenv("REFLUX_TRAINER_RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("REFLUX_STATE_DIR", str(tmp_path / "stack"))
    monkeypatch.delenv("REFLUX_REDIS_URL", raising=False)
    stack.start(tmp_path / "stack", die_with_parent=True)
    try:
        harness = Harness(tmp_path / "stack")
        name = (await harness.create(small_run("s3-away", rl={"steps": 400}, fleet=LEAN))).name
        before = (await harness.wait_step(name, 4)).step
        s3.kill()
        away = await harness.wait_step(name, before + 12)
        assert away.state == Run.STATE_RUNNING, away.message
        s3.start()
        assert s3.stored() == []
        end = time.monotonic() + HANG_SECONDS
        while not any("/learner-" in key for key in s3.stored()):
            assert time.monotonic() < end, "no checkpoint after the store was back"
            await asyncio.sleep(0.5)
        async with connection.channel("trainer") as channel:
            await TrainerServiceStub(channel).CancelRun(trainer_pb.CancelRunRequest(name=name))
        ended = await harness.wait_end(name)
    finally:
        stack.stop(tmp_path / "stack")
    events = [json.loads(line) for line in (Path(ended.folder) / "events.jsonl").read_text().splitlines()]
    failures = [event["step"] for event in events if event.get("detail", {}).get("checkpoint_failures")]
    assert failures, "a checkpoint that failed is told in the events"
    assert min(failures) > before - 3
