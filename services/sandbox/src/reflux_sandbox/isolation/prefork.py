"""The default tier: children forked from a warm parent into namespaces, a read-only tree, seccomp and own limits."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from reflux_sandbox.isolation import syscalls
from reflux_sandbox.isolation.base import (
    ChildLimits,
    Isolation,
    IsolationUnavailable,
    Tier,
    VerifierInfo,
    verifier_infos,
)
from reflux_sandbox.isolation.cgroups import CellGroups
from reflux_sandbox.isolation.handle import ChildDied, ChildHandle, ChildPipes
from reflux_sandbox.isolation.pool import ChildPool
from reflux_sandbox.isolation.zygote import ZygoteConfig

log = logging.getLogger(__name__)

ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/box",
    "LANG": "C.UTF-8",
    "TMPDIR": "/box",
    "MALLOC_ARENA_MAX": "2",  # an arena per thread would reserve 64 MiB each and count against RLIMIT_AS
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
"""All that a child inherits: no secret of the stack, no address, no thread of a linear algebra library."""
_WARM_SECONDS = 120.0
_MOUNT_POINT = "reflux-root"
_RESTART_PAUSE_SECONDS = 0.2


def _first_user_id(cells: int) -> int:
    """User ids that nobody else has, where the id map allows them; different for each service process on a machine."""
    mapped = sum(int(line.split()[2]) for line in Path("/proc/self/uid_map").read_text().splitlines())
    return 1_000_000 + (os.getpid() % 4096) * 256 if mapped > 1 << 22 else 60_000 - cells


class PreforkIsolation(Isolation):
    """Owns the warm parent, its cells and the pool. A killed warm parent takes its children along and is replaced."""

    name = "prefork"
    tier = Tier.PREFORK

    def __init__(
        self,
        *,
        limits: ChildLimits,
        idle_target: int,
        most_children: int,
        output_bytes: int,
        graders: str,
        cache_folder: str,
        import_folders: tuple[str, ...] = (),
        warm_modules: tuple[str, ...] = ("numpy", "numpy.random"),
        in_user_namespace: bool | None = None,
    ) -> None:
        """`in_user_namespace` None: only without root, who gives each child a user id of its own instead."""
        self._limits = limits
        self._most = most_children
        self._output_bytes = output_bytes
        self._graders = graders
        self._cache_folder = cache_folder
        self._import_folders = import_folders
        self._warm_modules = warm_modules
        self._in_user_namespace = os.geteuid() != 0 if in_user_namespace is None else in_user_namespace
        self._pool = ChildPool(self._spawn, idle_target, most_children)
        self._pending: deque[asyncio.Future[ChildHandle]] = deque()
        self._groups = CellGroups()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._new_root = ""
        self._verifiers: list[VerifierInfo] = []
        self._notes: list[str] = []
        self._closing = False
        self._restart: asyncio.Task[None] | None = None

    @property
    def reasons(self) -> list[str]:
        user = "user namespace" if self._in_user_namespace else "own user id per child"
        fixed = [
            f"namespaces for processes, network, mounts, IPC and host name; {user}",
            "root is a read-only tree without host data; /box, /tmp and /dev/shm are private tmpfs",
            "seccomp allow-list; no exec for model-written code and plain verifiers; no sockets",
            self._groups.reason,
        ]
        return fixed + self._notes

    @property
    def verifiers(self) -> list[VerifierInfo]:
        return self._verifiers

    @property
    def idle_children(self) -> int:
        return self._pool.idle

    @property
    def busy_children(self) -> int:
        return self._pool.busy

    @property
    def warm_parent_pid(self) -> int:
        """Process id of the warm parent's launcher."""
        assert self._process is not None, "start comes first"
        return self._process.pid

    def cgroup_procs(self, number: int) -> tuple[str, ...]:
        """`cgroup.procs` files of cell `number`; empty without cgroups."""
        return self._groups.procs(number)

    async def start(self) -> None:
        if not syscalls.supported():
            raise IsolationUnavailable(f"no system call table for {os.uname().machine}")
        self._new_root = _make_mount_point()
        self._groups = CellGroups.create(self._most, self._limits.memory_bytes, self._limits.processes)
        try:
            await self._start_warm_parent()
            first = await self._spawn()
        except (ChildDied, OSError) as error:
            await self.close()
            raise IsolationUnavailable(str(error)) from error
        except IsolationUnavailable:
            await self.close()
            raise
        await first.end()
        self._pool.start()

    async def acquire(self) -> ChildHandle:
        return await self._pool.acquire()

    async def close(self) -> None:
        self._closing = True
        if self._restart is not None:
            self._restart.cancel()
        await self._pool.close()
        await self._stop_warm_parent()
        self._groups.close()
        if self._new_root:
            with contextlib.suppress(OSError):
                Path(self._new_root).rmdir()
            self._new_root = ""

    def _config(self) -> str:
        config = ZygoteConfig(
            limits=self._limits,
            cells=self._most,
            first_user_id=_first_user_id(self._most),
            in_user_namespace=self._in_user_namespace,
            cgroup_procs=tuple(self._groups.procs(number) for number in range(self._most))
            if self._groups.parents
            else (),
            warm_modules=self._warm_modules,
            graders=self._graders,
            cache_folder=self._cache_folder,
            import_folders=self._import_folders,
            new_root=self._new_root,
        )
        return json.dumps(asdict(config))

    async def _start_warm_parent(self) -> None:
        """Starts it from this thread, the loop's: the kernel ties PDEATHSIG to the thread that forked."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-I", "-m", "reflux_sandbox.isolation.zygote", str(theirs.fileno()), self._config()]
        self._process = subprocess.Popen(  # noqa: ASYNC220  a few ms, once
            command, pass_fds=(theirs.fileno(),), env=ENVIRONMENT, stdin=subprocess.DEVNULL, start_new_session=True
        )
        theirs.close()
        ours.setblocking(False)
        self._control = ours
        try:
            raw = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(ours, 1 << 20), _WARM_SECONDS)
        except TimeoutError:
            raise IsolationUnavailable(f"the warm parent was not ready after {_WARM_SECONDS:.0f} s") from None
        if not raw:
            raise IsolationUnavailable("the warm parent died at its start")
        message = json.loads(raw)
        if message["op"] != "ready":
            raise IsolationUnavailable(message["message"])
        self._verifiers = verifier_infos(message["verifiers"])
        self._notes = message["notes"]
        asyncio.get_running_loop().add_reader(ours, self._on_message)

    async def _stop_warm_parent(self) -> None:
        self._drop_control()
        if self._process is not None:
            await asyncio.to_thread(_wait_or_kill, self._process)
            self._process = None

    def _drop_control(self) -> None:
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
            self._control = None
        while self._pending:
            if not (waiter := self._pending.popleft()).done():
                waiter.set_exception(ChildDied("the warm parent is gone"))

    async def _spawn(self) -> ChildHandle:
        if self._control is None:
            raise ChildDied("the warm parent is being replaced")
        waiter: asyncio.Future[ChildHandle] = asyncio.get_running_loop().create_future()
        self._pending.append(waiter)
        self._control.send(b"spawn")
        child = await waiter
        await child.hello()
        return child

    def _on_message(self) -> None:
        assert self._control is not None, "the reader is removed first"
        try:
            raw, descriptors, _, _ = socket.recv_fds(self._control, 1 << 16, 8)
        except BlockingIOError:
            return
        except OSError:
            raw, descriptors = b"", []
        if not raw:
            self._on_parent_death()
            return
        message: dict[str, Any] = json.loads(raw)
        waiter = self._pending.popleft() if self._pending else None
        if message["op"] != "child":
            if waiter is not None and not waiter.done():
                waiter.set_exception(ChildDied(message["message"]))
            return
        child = self._handle(message["cell"], descriptors)
        if waiter is None or waiter.done():
            asyncio.get_running_loop().create_task(child.end())
        else:
            waiter.set_result(child)

    def _handle(self, cell: int, descriptors: list[int]) -> ChildHandle:
        channel, status, stdout, stderr, process = descriptors
        pipes = ChildPipes(socket.socket(fileno=channel), status, stdout, stderr, process)
        return ChildHandle(pipes, cell, self._output_bytes, signal.SIGKILL, self._memory_kills_since(cell))

    def _memory_kills_since(self, cell: int) -> Callable[[], int]:
        before = self._groups.memory_kills(cell)
        return lambda: self._groups.memory_kills(cell) - before

    def _on_parent_death(self) -> None:
        self._drop_control()
        if not self._closing:
            log.error("the warm parent died; its children died with it; starting another")
            self._restart = asyncio.get_running_loop().create_task(self._replace_parent())

    async def _replace_parent(self) -> None:
        await self._pool.discard_idle()
        while True:
            await self._stop_warm_parent()
            await asyncio.sleep(_RESTART_PAUSE_SECONDS)
            try:
                await self._start_warm_parent()
            except (IsolationUnavailable, OSError) as error:
                log.error("the warm parent did not come back: %s", error)
                continue
            return


def _make_mount_point() -> str:
    """An empty folder named after this process; those of processes that were killed are removed on the way."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_MOUNT_POINT}-*-*"):
        owner = folder.name.split("-")[2]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            with contextlib.suppress(OSError):
                folder.rmdir()
    return tempfile.mkdtemp(prefix=f"{_MOUNT_POINT}-{os.getpid()}-")


def _wait_or_kill(process: "subprocess.Popen[bytes]") -> None:
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
