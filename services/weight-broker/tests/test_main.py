import os
import subprocess
import sys
from pathlib import Path


def run(**environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "reflux_weight_broker.main"]
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60, check=False
    )


def test_an_unreachable_redis_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    done = run(REFLUX_REDIS_URL=f"unix://{tmp_path}/none.sock", REFLUX_WEIGHT_BROKER_LISTEN="127.0.0.1:0")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "none.sock" in done.stderr


def test_a_setting_of_the_wrong_type_is_named() -> None:
    done = run(REFLUX_WEIGHT_BROKER_RECONNECT_SECONDS="soon")
    assert done.returncode == 2
    assert "reconnect_seconds" in done.stderr.lower()
    assert "Traceback" not in done.stderr
