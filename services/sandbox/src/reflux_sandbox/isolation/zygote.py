"""The warm parent of all prefork children: no threads, no secrets, imports done; it only forks on request and reaps.

    python -I -m reflux_sandbox.isolation.zygote CONTROL_FD CONFIG_JSON

It is process 1 of a pid namespace of its own, so that nothing outlives it, and its root is the read-only tree of
`tree`. Control socket (SEQPACKET, JSON): it sends {"op": "ready"} once, then answers every message {"cell", "user_id"}
(with the open `cgroup.procs` files of the cell) in order with {"op": "child"} and the descriptors of a child, or with
{"op": "failed"}. It ends when the socket closes.
"""

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Never

from reflux_sandbox.isolation import kernel, seccomp
from reflux_sandbox.isolation.base import ChildLimits
from reflux_sandbox.isolation.confine import Cell, confine, write_id_maps
from reflux_sandbox.isolation.supervisor import supervise
from reflux_sandbox.isolation.tree import WRITABLE, Tree
from reflux_sandbox.isolation.worker import Grader, run_worker

_OWN_NAMESPACES = kernel.CLONE_NEWNS | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
_MESSAGE_BYTES = 1 << 16
_MOST_GROUPS = 3


@dataclass(frozen=True, kw_only=True)
class ZygoteConfig:
    """Everything a warm parent is told."""

    limits: ChildLimits
    in_user_namespace: bool = False
    warm_modules: tuple[str, ...]
    graders: str
    """Module that has LoadedVerifiers and family_names, or empty when no verifiers are wanted."""
    only_families: tuple[str, ...] = ()
    """Families that are wanted; empty for all that are installed."""
    family: str = ""
    """Whose verifiers to load; empty for none."""
    cache_folder: str
    import_folders: tuple[str, ...]
    """Folders in front of sys.path; children can read them."""
    new_root: str = ""

    @classmethod
    def from_json(cls, text: str) -> "ZygoteConfig":
        values = json.loads(text)
        values["limits"] = ChildLimits(**values["limits"])
        for name in ("warm_modules", "import_folders", "only_families"):
            values[name] = tuple(values[name])
        return cls(**values)

    def for_family(self, family: str) -> "ZygoteConfig":
        """The same for other verifiers."""
        return replace(self, family=family)


@dataclass(frozen=True)
class Warm:
    """What is loaded."""

    grade: Grader
    verifiers: list[dict[str, Any]]
    families: list[str]
    notes: list[str]


def _no_verifiers(verifier: str, payload: str, answers: list[str]) -> dict[str, Any]:
    return {"error": "unavailable", "message": f"no verifier {verifier!r} here: it is not of this child's family"}


def warm_up(config: ZygoteConfig) -> Warm:
    """Imports what children will need. Without a family it only looks which ones there are."""
    sys.path[:0] = config.import_folders
    for name in config.warm_modules:
        importlib.import_module(name)
    if not config.graders:
        return Warm(_no_verifiers, [], [], ["no tasks are installed: no verifiers"])
    module = importlib.import_module(config.graders)
    if not config.family:
        return _families(module.family_names(), config.only_families)
    loaded = module.LoadedVerifiers(Path(config.cache_folder), config.family)
    return Warm(loaded.grade, loaded.rows(), [], loaded.problems)


def _families(installed: list[str], wanted: tuple[str, ...]) -> Warm:
    if not wanted:
        return Warm(_no_verifiers, [], installed, [])
    missing = [f"no task {name!r} is installed, and it was asked for" for name in wanted if name not in installed]
    return Warm(_no_verifiers, [], [name for name in installed if name in wanted], missing)


class Zygote:
    """Forks a child for each message and reaps those that ended."""

    def __init__(self, control: socket.socket, config: ZygoteConfig) -> None:
        self._control = control
        self._config = config
        self._pid_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY)
        self._proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
        self._parent = os.pidfd_open(os.getpid())
        self._tree = Tree(config.new_root, (config.cache_folder, *config.import_folders))
        self._without_exec = seccomp.without_exec()

    def enter_tree(self) -> None:
        """From here on this process and its children see the read-only tree only."""
        self._tree.enter()

    def run(self, grade: Grader) -> None:
        """Serves until the control socket closes."""
        wake_read, wake_write = os.pipe()
        for descriptor in (wake_read, wake_write):
            os.set_blocking(descriptor, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write)
        while True:
            ready, _, _ = select.select([self._control, wake_read], [], [])
            if wake_read in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake_read, 4096)
            _reap()  # before the next fork: a zombie of the same cell would count against it
            if self._control in ready:
                raw, groups, _, _ = socket.recv_fds(self._control, _MESSAGE_BYTES, _MOST_GROUPS)
                if not raw:
                    return
                self._spawn(grade, self._cell(json.loads(raw), groups))

    def _cell(self, message: dict[str, int], groups: list[int]) -> Cell:
        return Cell(
            number=message["cell"],
            user_id=message["user_id"],
            in_user_namespace=self._config.in_user_namespace,
            writable=WRITABLE,
            kept=self._tree.kept,
            cgroup_procs=tuple(groups),
            proc_folder=self._proc,
            parent=self._parent,
        )

    def _spawn(self, grade: Grader, cell: Cell) -> None:
        outside, inside = socket.socketpair()
        pipes = [os.pipe() for _ in range(3)]
        try:
            kernel.unshare(kernel.CLONE_NEWPID)  # the next child is process 1 of a new namespace
            pid = os.fork()
            if pid == 0:
                self._become_child(cell, inside, [write for _, write in pipes], grade)
            kernel.setns(self._pid_namespace, kernel.CLONE_NEWPID)
            pidfd = os.pidfd_open(pid)
            descriptors = [outside.fileno(), *(read for read, _ in pipes), pidfd]
            socket.send_fds(self._control, [json.dumps({"op": "child"}).encode()], descriptors)
            os.close(pidfd)
        except OSError as error:
            _report(self._control, {"op": "failed", "message": str(error)})
        finally:
            outside.close()
            inside.close()
            for descriptor in (*cell.cgroup_procs, *(end for pair in pipes for end in pair)):
                os.close(descriptor)

    def _become_child(self, cell: Cell, channel: socket.socket, writes: list[int], grade: Grader) -> Never:
        """In the forked process: never returns, never raises."""
        status, stdout, stderr = writes
        try:
            signal.set_wakeup_fd(-1)
            for kind in (signal.SIGINT, signal.SIGCHLD):  # process 1 ignores a signal only while it has no handler
                signal.signal(kind, signal.SIG_DFL)
            null = os.open("/dev/null", os.O_RDWR)
            for source, target in ((null, 0), (stdout, 1), (stderr, 2)):
                os.dup2(source, target)
            confine(cell, self._config.limits, {channel.fileno(), status})
            supervise(status, channel, lambda link: run_worker(link, grade, self._without_exec))
        except BaseException as error:  # process boundary: a fork must never run the parent's code
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(70)


def _reap() -> None:
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


def _report(control: socket.socket, message: dict[str, Any]) -> None:
    control.send(json.dumps(message).encode())


def _serve(control: socket.socket, config: ZygoteConfig) -> None:
    """Process 1 of the new pid namespace."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        warm = warm_up(config)
        notes = warm.notes
        threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208  names only
        if threads != 1:
            notes.append(f"warm imports started {threads - 1} threads, which do not survive a fork")
        zygote = Zygote(control, config)
        zygote.enter_tree()
        gc.collect()
        gc.freeze()  # fewer pages copied after each fork
    except OSError as error:
        _report(control, {"op": "unavailable", "message": str(error)})
        return
    _report(control, {"op": "ready", "verifiers": warm.verifiers, "families": warm.families, "notes": notes})
    zygote.run(warm.grade)


def main() -> None:
    """Enters the outer namespaces and forks the warm parent into them; this process only waits for it."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    control = socket.socket(fileno=int(sys.argv[1]))
    config = ZygoteConfig.from_json(sys.argv[2])
    try:
        if config.in_user_namespace:
            outer = os.geteuid()
            kernel.unshare(kernel.CLONE_NEWUSER)
            proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
            write_id_maps(proc, inside=0, outside=outer)
            os.close(proc)
        kernel.unshare(_OWN_NAMESPACES | kernel.CLONE_NEWPID)
        warm = os.fork()
    except OSError as error:
        _report(control, {"op": "unavailable", "message": str(error)})
        return
    if warm == 0:
        try:
            _serve(control, config)
        finally:
            os._exit(0)
    control.close()
    os.waitpid(warm, 0)


if __name__ == "__main__":
    main()
