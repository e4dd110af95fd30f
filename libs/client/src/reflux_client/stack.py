"""Starting and stopping the local stack: the supervisor is a process of its own, the command only talks to it."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from reflux_client.connection import RECORD, ClientError, StackRecord, read_record

_UP_SECONDS = 120.0
_DOWN_SECONDS = 60.0


def start(folder: Path, *, gateway_port: int = 0, trainer_port: int = 0, die_with_parent: bool = False) -> StackRecord:
    """Starts the supervisor and waits until all services serve. Raises `ClientError` with its last line."""
    log_path = folder / "devstack.log"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        log_path.touch()
    except OSError as error:
        raise ClientError(f"the state folder {folder} cannot be used: {error.strerror}") from None
    runs_dir = os.environ.get("REFLUX_TRAINER_RUNS_DIR") or str(Path("runs").resolve())
    argv = [sys.executable, "-m", "reflux_devstack.main", "--state-dir", str(folder)]
    argv += ["--gateway-http-port", str(gateway_port), "--trainer-http-port", str(trainer_port)]
    if die_with_parent:
        argv.append("--die-with-parent")
    environment = os.environ | {"REFLUX_TRAINER_RUNS_DIR": runs_dir}
    with log_path.open("w") as log:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=environment
        )
    with contextlib.ExitStack() as undo:  # A stack that does not come up, or Ctrl-C, leaves no process.
        undo.callback(process.wait, _DOWN_SECONDS)
        undo.callback(process.terminate)
        record = _wait_up(folder, process, log_path)
        undo.pop_all()
    return record


def _wait_up(folder: Path, process: subprocess.Popen[bytes], log_path: Path) -> StackRecord:
    end = time.monotonic() + _UP_SECONDS
    while time.monotonic() < end:
        record = read_record(folder)
        if record is not None and record.pid == process.pid:
            return record
        if process.poll() is not None:
            lines = [line for line in log_path.read_text().splitlines() if line.startswith("reflux: ")]
            raise ClientError(
                lines[-1].removeprefix("reflux: ") if lines else f"the stack did not start: see {log_path}"
            )
        time.sleep(0.05)
    raise ClientError(f"the stack did not come up within {_UP_SECONDS:.0f} s: see {log_path} and {folder / 'logs'}")


def stop(folder: Path) -> bool:
    """Stops the stack and waits until its processes are gone; False when none runs."""
    record = read_record(folder)
    if record is None:
        (folder / RECORD).unlink(missing_ok=True)
        return False
    try:
        supervisor = psutil.Process(record.pid)
        os.kill(record.pid, signal.SIGTERM)
        supervisor.wait(_DOWN_SECONDS)
    except (psutil.NoSuchProcess, ProcessLookupError):
        return True
    except psutil.TimeoutExpired:
        raise ClientError(f"the stack (process {record.pid}) did not stop within {_DOWN_SECONDS:.0f} s") from None
    return True
