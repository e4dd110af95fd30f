"""Starts scheduler and agents by fork, because importing gRPC anew for each of thirty processes takes most of the time.

One JSON line on stdin (module, env, log) per start, one line with the pid on stdout; LOG.status gets the exit status.
The program is the same that `python -m MODULE` runs; nothing but imports happens before the fork. Arguments name more
modules to import: clients of clusters, which scheduler or agents import late.
"""

import importlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from reflux_scheduler import main as scheduler
from reflux_scheduler.agent import main as agent

MAINS = {"reflux_scheduler.main": scheduler.main, "reflux_scheduler.agent.main": agent.main}


def become(order: dict) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number in (1, 2):
        os.dup2(log, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(order["env"])
    status = 1
    try:
        MAINS[order["module"]]()
        status = 0
    except SystemExit as leaving:
        status = int(leaving.code or 0)
    finally:
        sys.stderr.flush()
        Path(order["log"] + ".status").write_text(str(status))
        os._exit(status)


def serve() -> None:
    # Children are reaped by the kernel: who ended is told by its pid being gone.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for module in sys.argv[1:]:
        importlib.import_module(module)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            become(json.loads(line))
        print(pid, flush=True)


if __name__ == "__main__":
    serve()
