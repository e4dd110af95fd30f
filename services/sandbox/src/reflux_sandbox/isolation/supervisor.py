"""Process 1 of a child: forks the worker, waits, reports its end on a pipe that the worker lacks, ends the rest."""

import os
import socket
from collections.abc import Callable
from typing import Never

from reflux_sandbox.isolation import kernel


def supervise(status: int, channel: socket.socket, work: Callable[[socket.socket], Never]) -> Never:
    """Never returns. `work` runs in a process of its own that cannot trace this one (not dumpable, other memory).

    Writes `exit_code cpu_seconds max_rss_kib` to `status`. When this process ends, the kernel kills whatever the worker
    left in the pid namespace; orphans that end earlier are reaped here.
    """
    worker = os.fork()
    if worker == 0:
        os.close(status)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
        work(channel)
    channel.close()
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.write(status, " ".join(map(str, wait_for(worker))).encode())
    os._exit(0)


def wait_for(worker: int) -> tuple[int, float, int]:
    """Reaps children until `worker` has ended: its exit code (minus the signal), processor seconds, most RSS in KiB."""
    while True:
        pid, wait_status, usage = os.wait4(-1, 0)
        if pid == worker:
            break
    return os.waitstatus_to_exitcode(wait_status), round(usage.ru_utime + usage.ru_stime, 6), usage.ru_maxrss
