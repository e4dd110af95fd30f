"""Owns one role process from start to end; a program of its own that needs nothing but the standard library.

The agent starts a keeper, the keeper starts the role. When the agent goes away, however it goes, the pipe on the
keeper's stdin closes and the keeper kills the role with everything below it. When the keeper is killed, the kernel
kills the role (PR_SET_PDEATHSIG). As a child subreaper the keeper also gets hold of descendants that left the role's
session.

stdin: one JSON line (argv, env, cwd, log_path, log_limit_bytes, groups), then lines "stop SECONDS", of which a
later one can only bring the kill forward; end of file means kill.
stdout: "started PID", then "exited CODE" (negative for a signal); or "refused MESSAGE" when the program cannot be
executed.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_REAP_SECONDS = 1.0
_PROC_PPID = 1  # Fields of /proc/PID/stat after the command name: state, ppid, ...
_EXIT_SETUP = 127
_PUMP_CHUNKS = 64


def parents() -> dict[int, int]:
    """The parent of every process that can be seen."""
    table: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            # A process may end while its entry is read.
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
                table[int(entry.name)] = int(fields[_PROC_PPID])
    return table


def descendants(root: int, table: dict[int, int]) -> list[int]:
    """All processes below `root`, parents first."""
    children: dict[int, list[int]] = {}
    for pid, parent in table.items():
        children.setdefault(parent, []).append(pid)
    found = list(children.get(root, ()))
    for pid in found:
        found.extend(children.get(pid, ()))
    return found


class RollingLog:
    """A file of at most `limit_bytes` and its predecessor, PATH.1."""

    def __init__(self, path: Path, limit_bytes: int) -> None:
        self._path = path
        self._limit = limit_bytes
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)

    def write(self, chunk: bytes) -> None:
        """Appends; on a full disk output is dropped, because the role must not block on its log."""
        with contextlib.suppress(OSError):
            if self._file.tell() + len(chunk) > self._limit:
                self._path.replace(self._path.with_name(self._path.name + ".1"))
                self._file.close()
                self._file = self._path.open("ab", buffering=0)
            self._file.write(chunk)


def _spawn(argv: list[str], env: dict[str, str], cwd: str, output: int, groups: list[str]) -> int:
    """Forks the role into a session and groups of its own. Raises OSError when the program cannot be executed."""
    keeper = os.getpid()
    error_read, error_write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(error_write)
        with os.fdopen(error_read, "rb") as pipe:
            code = pipe.read()
        if code:
            os.waitpid(pid, 0)
            raise OSError(int(code), os.strerror(int(code)))
        return pid
    try:
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:
            os._exit(_EXIT_SETUP)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        for group in groups:
            # A group that went away costs the limit, not the member.
            with contextlib.suppress(OSError):
                Path(group).write_text("0")
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(cwd)
        os.execvpe(argv[0], argv, env)
    except OSError as error:
        os.write(error_write, str(error.errno or 1).encode())
    os._exit(_EXIT_SETUP)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl failed")


class Keeper:
    """The event loop: commands, output and the end of one role process."""

    def __init__(self, pid: int, output: int, log: RollingLog) -> None:
        self._pid = pid
        self._output = output
        self._log = log
        self._kill_at: float | None = None
        self._commands = b""
        self._watched = select.poll()
        self._pidfd = os.pidfd_open(pid)
        os.set_blocking(output, False)
        os.set_blocking(0, False)
        for source in (0, output, self._pidfd):
            self._watched.register(source, select.POLLIN)

    def run(self) -> int:
        """Returns the exit code once the role and everything below it is gone."""
        while True:
            ready = [source for source, _ in self._watched.poll(self._wait_seconds() * 1000)]
            if self._output in ready:
                self._pump()
            if 0 in ready:
                self._obey()
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._kill()
            code = self._reap()
            if code is not None:
                self._sweep()
                self._pump()
                return code

    def _wait_seconds(self) -> float:
        if self._kill_at is None:
            return _REAP_SECONDS
        return min(_REAP_SECONDS, max(0.0, self._kill_at - time.monotonic()))

    def _pump(self) -> None:
        # Bounded, so that a role that floods its output cannot keep the keeper from its commands.
        with contextlib.suppress(BlockingIOError):
            for _ in range(_PUMP_CHUNKS):
                chunk = os.read(self._output, 1 << 16)
                if not chunk:
                    # Everybody closed the pipe. No event mask hides a hang-up: while it is registered, polling spins.
                    with contextlib.suppress(KeyError):
                        self._watched.unregister(self._output)
                    return
                self._log.write(chunk)

    def _obey(self) -> None:
        try:
            chunk = os.read(0, 4096)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        if not chunk:
            self._watched.unregister(0)
            self._kill_at = 0.0
            return
        *lines, self._commands = (self._commands + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"stop "):
                kill_at = time.monotonic() + float(line[5:])
                if self._kill_at is None:
                    self._signal(signal.SIGTERM)
                self._kill_at = kill_at if self._kill_at is None else min(self._kill_at, kill_at)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, number)

    def _kill(self) -> None:
        self._kill_at = time.monotonic() + _REAP_SECONDS
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        for pid in descendants(os.getpid(), parents()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _reap(self) -> int | None:
        """Collects ended children, adopted ones too; the exit code when the role is among them."""
        code: int | None = None
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return code
            if pid == 0:
                return code
            if pid == self._pid:
                code = os.waitstatus_to_exitcode(status)

    def _sweep(self) -> None:
        """Kills what the role left behind, until nothing is below the keeper."""
        for _ in range(100):
            left = descendants(os.getpid(), parents())
            if not left:
                return
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._reap()
            time.sleep(0.01)


def main() -> int:
    """Starts the role that stdin describes and stays until it is gone."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    line = sys.stdin.buffer.raw.readline()  # type: ignore[attr-defined]  # unbuffered: commands follow on the same pipe
    if not line:
        return 0
    order = json.loads(line)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    read, write = os.pipe()
    try:
        log = RollingLog(Path(order["log_path"]), order["log_limit_bytes"])
        pid = _spawn(order["argv"], order["env"], order["cwd"], write, order.get("groups", []))
    except OSError as error:
        _tell(f"refused {order['argv'][0]}: {error}")
        return 0
    os.close(write)
    _tell(f"started {pid}")
    _tell(f"exited {Keeper(pid, read, log).run()}")
    return 0


def _tell(line: str) -> None:
    # The agent may be gone; the role ends all the same.
    with contextlib.suppress(OSError):
        os.write(1, line.encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
