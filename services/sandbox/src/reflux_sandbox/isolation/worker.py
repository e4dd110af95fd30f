"""What runs inside a child: one piece of work from the channel, then the end. The service trusts nothing of it."""

import atexit
import builtins
import contextlib
import linecache
import os
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, Never

from reflux_sandbox.isolation import frames, kernel
from reflux_sandbox.isolation.limits_hit import (
    DISK_SIGNAL,
    MEMORY_SIGNAL,
    PIDS_SIGNAL,
    disk_is_full,
    hit_process_limit,
)
from reflux_sandbox.isolation.session_worker import serve_session

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_NEWS_SECONDS = 0.5

Grader = Callable[[str, str, list[str]], dict[str, Any]]
"""(verifier, payload as JSON text, answers) -> {"grades": [...]} or {"error": kind, "message": text}."""


def run_worker(channel: socket.socket, grade: Grader, without_exec: bytes) -> Never:
    """Says hello, does what the first frame asks for, ends the process. A closed channel means: nothing to do."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    mapped = _mapped_bytes()
    _reseed()
    _rehearse(grade)
    frames.send(channel, {"hello": True})
    request = frames.receive(channel)
    if request is None:
        os._exit(0)
    _limit(mapped + int(request["memory_bytes"]), int(request["cpu_seconds"]))
    if request["profile"] != "native" and without_exec:
        kernel.install_filter(without_exec)
    if request["profile"] == "code":
        channel.close()
        _end_with(run_code(request["code"]))
    if request["profile"] == "session":
        serve_session(channel)
    _grade_all(channel, request["nonce"], grade)
    os._exit(0)


def _mapped_bytes() -> int:
    """What the warm interpreter has mapped: the memory of a job counts on top of it."""
    with contextlib.suppress(OSError), open("/proc/self/statm") as statm:  # noqa: PTH123  no import may be needed here
        return int(statm.read().split()[0]) * _PAGE_BYTES
    return 0


def _rehearse(grade: Grader) -> None:
    """Goes once through what a job will need: the pages are copied now, while nobody waits for this child."""
    with contextlib.suppress(Exception):  # a grader that fails will fail again where it is heard
        frames.encode({"cpu_seconds": _cpu_seconds(), **grade("", "{}", [])})


def _limit(memory_bytes: int, cpu_seconds: int) -> None:
    for kind, value, spare in ((resource.RLIMIT_AS, memory_bytes, 0), (resource.RLIMIT_CPU, cpu_seconds, 1)):
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard - spare)
        resource.setrlimit(kind, (value, value + spare))  # SIGXCPU comes at the soft limit of cpu, SIGKILL at the hard


def _reseed() -> None:
    """Children of one parent would share numpy's generator state; the random module reseeds itself at fork."""
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(int.from_bytes(os.urandom(4), "little"))


def _grade_all(channel: socket.socket, nonce: str, grade: Grader) -> None:
    progress: Any = sys.modules.get("reflux_tasks.progress")
    while (job := frames.receive(channel)) is not None:
        before = _cpu_seconds()
        if progress is not None:
            progress.listener = _teller(channel, nonce)
        try:
            answer = grade(job["verifier"], job["payload"], job["answers"])
            frame = frames.encode({"nonce": nonce, "cpu_seconds": _cpu_seconds() - before, **answer})
        except Exception as error:  # task boundary: whatever a verifier raises is its result
            frame = frames.encode(
                {"nonce": nonce, "error": "crash", "message": f"{type(error).__name__}: {error}"[:2000]}
            )
        channel.sendall(frame)


def _teller(channel: socket.socket, nonce: str) -> Callable[[float], None]:
    """Sends how far the job has come, once in a while."""
    told = time.monotonic()

    def tell(fraction: float) -> None:
        nonlocal told
        if time.monotonic() - told >= _NEWS_SECONDS:
            told = time.monotonic()
            frames.send(channel, {"nonce": nonce, "progress": fraction})

    return tell


def _cpu_seconds() -> float:
    """Processor time of this process and of those that it has waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def run_code(text: str) -> int:
    """Runs `text` as __main__; returns its exit code, or minus the signal that stands for its cause of death."""
    sys.argv = ["main.py"]
    namespace = {"__name__": "__main__", "__file__": "/box/main.py", "__builtins__": builtins}
    linecache.cache["main.py"] = (len(text), None, text.splitlines(keepends=True), "main.py")
    try:
        exec(compile(text, "main.py", "exec"), namespace)
        threading._shutdown()  # type: ignore[attr-defined]  what the interpreter does at its end: wait for threads
        atexit._run_exitfuncs()
    except SystemExit as error:
        return _exit_code(error.code)
    except MemoryError:
        return -MEMORY_SIGNAL
    except BaseException as error:  # process boundary
        _print_traceback(error)
        if hit_process_limit(error):
            return -PIDS_SIGNAL
        return -DISK_SIGNAL if disk_is_full(error) else 1
    return 0


def _print_traceback(error: BaseException) -> None:
    """As the interpreter would, without the frame of this module."""
    trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
    traceback.print_exception(type(error), error, trace)


def _exit_code(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1


def _end_with(code: int) -> Never:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # process boundary: user code may have closed or replaced them
            stream.flush()
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)
