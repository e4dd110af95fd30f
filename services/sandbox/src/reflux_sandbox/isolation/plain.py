"""One child of the `process` tier: a supervisor (a subreaper) and the worker below it. Weak: same user, same files.

python -I -m reflux_sandbox.isolation.plain CONFIG_JSON CHANNEL_FD STATUS_FD      (one piece of work)
python -I -m reflux_sandbox.isolation.plain CONFIG_JSON                           (prints the verifiers as JSON)
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from reflux_sandbox.isolation import kernel, seccomp, syscalls
from reflux_sandbox.isolation.confine import set_ceilings
from reflux_sandbox.isolation.supervisor import report_end
from reflux_sandbox.isolation.worker import Grader, run_worker
from reflux_sandbox.isolation.zygote import ZygoteConfig, warm_up

_ROUNDS = 100


def kill_descendants() -> None:
    """Kills everything below this process, whatever session or group it moved to: orphans come to a subreaper."""
    for _ in range(_ROUNDS):
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        if not children:
            return
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)
        for _ in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, 0)


def _on_term(folder: str) -> Callable[[int, FrameType | None], None]:
    def handle(_number: int, _frame: FrameType | None) -> None:
        kill_descendants()
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    return handle


def _restrict(config: ZygoteConfig) -> bytes:
    """What a process can give up without rights. NPROC is left alone: it would count all processes of our user."""
    set_ceilings(config.limits, processes=False)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    if not syscalls.supported():
        return b""
    with contextlib.suppress(OSError):
        kernel.install_filter(seccomp.allow_list())
        return seccomp.without_exec()
    return b""


def _one_piece_of_work(config: ZygoteConfig, channel: socket.socket, status: int, grade: Grader) -> None:
    folder = tempfile.mkdtemp(prefix="reflux-work-")
    signal.signal(signal.SIGTERM, _on_term(folder))
    worker = os.fork()
    if worker == 0:
        try:
            kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
            os.chdir(folder)
            kernel.close_all_but({0, 1, 2, channel.fileno()})
            run_worker(channel, grade, _restrict(config))
        except BaseException as error:  # process boundary: a fork must never run the parent's code
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(70)
    channel.close()
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    report_end(worker, status)
    kill_descendants()
    shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Warms up, then does one piece of work."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGTERM)
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    config = ZygoteConfig.from_json(sys.argv[1])
    grade, rows, notes = warm_up(config)
    if len(sys.argv) == 2:
        print(json.dumps({"verifiers": rows, "notes": notes}))
        return
    _one_piece_of_work(config, socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3]), grade)


if __name__ == "__main__":
    main()
