"""Owns the agent of one node inside a Slurm step; a program that srun starts once per node.

`python -m reflux_scheduler.backends.slurm.launcher node|loopback ARGV...`

The agent is restarted when it fails, because an allocation without its agent is lost room; one that ends with status 0
was told to leave, and the step ends with it. Slurm ends a step with SIGTERM, then SIGKILL. When slurmstepd dies, the
kernel sends SIGTERM instead (PR_SET_PDEATHSIG); when this program dies, the kernel kills the agent, whose keepers then
kill their roles. What the agent leaves behind becomes ours (PR_SET_CHILD_SUBREAPER) and is killed.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping

from reflux_scheduler.agent.keeper import descendants, parents

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
_HEALTHY_SECONDS = 60.0
_STOP_SECONDS = 60.0
"""After SIGTERM; Slurm's own KillWait is shorter as a rule."""

_LEAVE_SECONDS = 2.0


class Launcher:
    """Keeps the agent running until it leaves by itself or is told to stop."""

    def __init__(self, argv: list[str], environment: Mapping[str, str]) -> None:
        self._argv = argv
        self._environment = environment
        self._child: subprocess.Popen[bytes] | None = None
        self._stop_at: float | None = None
        self._libc = ctypes.CDLL(None)

    def run(self) -> int:
        """The exit status of the last agent."""
        self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._stop)
        stepd = os.getppid()
        self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != stepd:
            return 1
        failures = 0
        while True:
            began = time.monotonic()
            status = self._once()
            _sweep()
            if status == 0 or self._stop_at is not None:
                return max(0, status)
            failures = 0 if time.monotonic() - began > _HEALTHY_SECONDS else failures + 1
            pause = _PAUSES[min(failures, len(_PAUSES)) - 1]
            print(f"the agent ended with status {status}; starting it again in {pause:g} s", flush=True)
            self._wait_until(time.monotonic() + pause)
            if self._stop_at is not None:
                return 0

    def _once(self) -> int:
        try:
            self._child = subprocess.Popen(
                self._argv,
                env=dict(self._environment),
                cwd="/",  # `python -m` imports from here first; the job's folder may be anybody's.
                # One thread, no locks: preexec_fn is safe here.
                preexec_fn=lambda: self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
            )
        except OSError as error:
            print(f"{self._argv[0]} cannot be started: {error}", flush=True)
            return 1
        if self._stop_at is not None:
            self._child.terminate()
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._child.wait(1.0)
            if self._stop_at is not None and time.monotonic() > self._stop_at:
                self._child.kill()

    def _wait_until(self, end: float) -> None:
        while self._stop_at is None and time.monotonic() < end:
            time.sleep(0.1)

    def _stop(self, _number: int, _frame: object) -> None:
        if self._stop_at is None:
            self._stop_at = time.monotonic() + _STOP_SECONDS
        # Slurm may have told the agent already; it takes a second SIGTERM as the first.
        if self._child is not None:
            self._child.terminate()


def _sweep() -> None:
    """Gives what the agent left behind a moment to go (keepers end with it), then kills it."""
    end = time.monotonic() + _LEAVE_SECONDS
    while left := descendants(os.getpid(), parents()):
        if time.monotonic() > end:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)


def agent_environment(own: Mapping[str, str], host: str) -> dict[str, str]:
    """The environment of the agent: which node it is, and where peers reach it. Where the scheduler itself is reached
    came along with its environment and is not true here."""
    node = own["SLURMD_NODENAME"]
    environment = {**own, "REFLUX_AGENT_NODE": node}
    for name in ("REFLUX_ADVERTISE_HOST", "REFLUX_AGENT_ADVERTISE"):
        environment.pop(name, None)
    if host == "node":
        environment.setdefault("REFLUX_AGENT_LISTEN", "0.0.0.0:0")
        environment["REFLUX_ADVERTISE_HOST"] = node
    return environment


def main() -> int:
    """Runs the agent of this node."""
    host, *argv = sys.argv[1:]
    return Launcher(argv, agent_environment(os.environ, host)).run()


if __name__ == "__main__":
    sys.exit(main())
