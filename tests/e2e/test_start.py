"""A stack that cannot start says why in one line, exits with status 2 and leaves nothing running."""

import os
import socket
import subprocess
import sys

import psutil
import pytest
from e2e_stack import HANG_SECONDS


@pytest.fixture
def taken_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def up(folder, *arguments, **extra):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("REFLUX_")}
    environment |= {"REFLUX_STATE_DIR": str(folder), **extra}
    command = [sys.executable, "-m", "reflux_client.main", "up", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS)


def assert_refused(done, folder, *parts):
    assert done.returncode == 2, done.stdout + done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stderr
    for part in parts:
        assert part in done.stderr
    assert left_running(folder) == []


def left_running(folder):
    """Processes of the stack in `folder`, found by their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("REFLUX_STATE_DIR") == str(folder):
                found.append(process.cmdline())
        except psutil.Error:
            continue
    return found


def test_a_port_in_use_is_named(tmp_path, taken_port):
    assert_refused(up(tmp_path, "--gateway-port", str(taken_port)), tmp_path, str(taken_port), "in use")


def test_an_unreachable_redis_is_named_without_its_password(tmp_path, taken_port):
    done = up(tmp_path, REFLUX_REDIS_URL="redis://user:hunter2@127.0.0.1:1/0")
    assert_refused(done, tmp_path, "127.0.0.1:1", "REFLUX_REDIS_URL")
    assert "hunter2" not in done.stderr


def test_an_unreachable_object_store_is_named(tmp_path):
    secrets = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "hunter2", "AWS_DEFAULT_REGION": "us-east-1"}
    done = up(tmp_path, REFLUX_OBJECT_STORE="s3://bucket/prefix", REFLUX_S3_ENDPOINT="http://127.0.0.1:1", **secrets)
    assert_refused(done, tmp_path, "127.0.0.1:1")
    assert "hunter2" not in done.stderr


def test_a_second_stack_in_the_same_folder_finds_the_first(harness):
    done = up(harness.folder)
    assert done.returncode == 0
    assert "runs already" in done.stdout
