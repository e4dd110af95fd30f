"""Runs a parser of foreign files in a forked child with limits on processor time and memory."""

import os
import pickle
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
_WALL_FACTOR = 10
"""A busy machine stretches wall time; processor time is the limit that counts."""


class OverLimit(ValueError):
    """The call was stopped: it took more processor time or memory than it may, or died."""


def call_bounded(function: Callable[..., T], *arguments: Any, cpu_seconds: int = 10, memory_mib: int = 1024) -> T:
    """`function(*arguments)` in a forked child; its result, or its ValueError again. Raises OverLimit.

    `memory_mib` counts beyond what this process has. The result must pickle. Linux only.
    """
    sys.stdout.flush()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _child(writer, function, arguments, cpu_seconds, memory_mib)
    os.close(writer)
    try:
        data = _read(reader, time.monotonic() + _WALL_FACTOR * cpu_seconds)
    finally:
        os.close(reader)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)  # it has answered, or its time is over
        _, status = os.waitpid(child, 0)
    if not data:
        raise OverLimit(f"stopped after {cpu_seconds} s of processor time or {memory_mib} MiB (status {status})")
    kind, value = pickle.loads(data)  # written by our own child
    if kind == "error":
        raise ValueError(value)
    return value


def _child(writer: int, function: Callable[..., Any], arguments: tuple[Any, ...], cpu: int, memory_mib: int) -> None:
    """Never returns: answers by the pipe and leaves without the parent's exit handlers."""
    try:
        held = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        limit = held + memory_mib * 2**20
        for kind, soft, hard in ((resource.RLIMIT_AS, limit, limit), (resource.RLIMIT_CPU, cpu, cpu + 1)):
            ours = resource.getrlimit(kind)[1]  # where we are confined already, the narrower limit stays
            if ours == resource.RLIM_INFINITY or ours > hard:
                resource.setrlimit(kind, (soft, hard))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        try:
            answer = ("value", function(*arguments))
        except MemoryError:
            answer = ("error", f"needs more than {memory_mib} MiB")
        except Exception as error:  # process boundary: a parser of foreign files raises anything
            answer = ("error", str(error)[:500] or type(error).__name__)
        data = pickle.dumps(answer)
        while data:
            data = data[os.write(writer, data) :]
    finally:
        os._exit(0)


def _read(reader: int, deadline: float) -> bytes:
    """All that the child writes until it closes; empty when the time runs out first."""
    parts: list[bytes] = []
    while (left := deadline - time.monotonic()) > 0:
        ready, _, _ = select.select([reader], [], [], left)
        if ready:
            part = os.read(reader, 1 << 20)
            if not part:
                return b"".join(parts)
            parts.append(part)
    return b""
