"""One warm parent and its pool of children. A killed warm parent takes its children along and is replaced."""

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
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from reflux_sandbox.isolation.base import IsolationUnavailable
from reflux_sandbox.isolation.cells import Cells
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


@dataclass(frozen=True)
class Ready:
    """What a warm parent says about itself when it is warm."""

    verifiers: list[dict[str, Any]]
    families: list[str]
    """Verifier families that are installed; only the parent of the family "" looks."""
    notes: list[str]


class Template:
    """The warm parent of one verifier family ("" for none), which refills its pool behind the scenes."""

    def __init__(self, config: ZygoteConfig, cells: Cells, idle_target: int, most: int, output_bytes: int) -> None:
        self._config = config
        self._cells = cells
        self._output_bytes = output_bytes
        self.pool = ChildPool(self._spawn, idle_target, most)
        self.ready = Ready([], [], [])
        self._new_root = ""
        self._pending: deque[tuple[int, asyncio.Future[ChildHandle]]] = deque()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._closing = False
        self._restart: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """Process id of the warm parent's launcher."""
        assert self._process is not None, "start comes first"
        return self._process.pid

    async def start(self) -> None:
        """Warms up, makes one child as a trial, then fills the pool. Raises IsolationUnavailable; `close` cleans up."""
        self._new_root = make_mount_point()
        try:
            await self._start_warm_parent()
            first = await self._spawn()
        except (ChildDied, OSError) as error:
            raise IsolationUnavailable(str(error)) from error
        await first.end()
        self.pool.start()

    async def close(self) -> None:
        """Leaves no process and no folder."""
        self._closing = True
        if self._restart is not None:
            self._restart.cancel()
        await self.pool.close()
        await self._stop_warm_parent()
        if self._new_root:
            with contextlib.suppress(OSError):
                Path(self._new_root).rmdir()
            self._new_root = ""

    async def _start_warm_parent(self) -> None:
        """Starts it from this thread, the loop's: the kernel ties PDEATHSIG to the thread that forked."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        config = json.dumps(asdict(replace(self._config, new_root=self._new_root)))
        command = [sys.executable, "-I", "-m", "reflux_sandbox.isolation.zygote", str(theirs.fileno()), config]
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
        if message.pop("op") != "ready":
            raise IsolationUnavailable(message["message"])
        self.ready = Ready(**message)
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
            cell, waiter = self._pending.popleft()
            self._cells.give_back(cell)
            if not waiter.done():
                waiter.set_exception(ChildDied("the warm parent is gone"))

    async def _spawn(self) -> ChildHandle:
        cell = self._cells.take()
        if cell is None:
            raise ChildDied("no cell is free")
        waiter: asyncio.Future[ChildHandle] = asyncio.get_running_loop().create_future()
        try:
            if self._control is None:
                raise ChildDied("the warm parent is being replaced")
            with self._cells.opened(cell) as groups:
                message = json.dumps({"cell": cell, "user_id": self._cells.user_id(cell)}).encode()
                socket.send_fds(self._control, [message], groups)
        except OSError:
            self._cells.give_back(cell)
            raise
        self._pending.append((cell, waiter))
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
        cell, waiter = self._pending.popleft()
        if message["op"] != "child":
            self._cells.give_back(cell)
            if not waiter.done():
                waiter.set_exception(ChildDied(message["message"]))
            return
        child = self._handle(cell, descriptors)
        if waiter.done():
            asyncio.get_running_loop().create_task(child.end())
        else:
            waiter.set_result(child)

    def _handle(self, cell: int, descriptors: Sequence[int]) -> ChildHandle:
        channel, status, stdout, stderr, process = descriptors
        pipes = ChildPipes(socket.socket(fileno=channel), status, stdout, stderr, process)
        counts = self._cells.counts_since(cell)
        child = ChildHandle(pipes, cell, self._output_bytes, signal.SIGKILL, counts)
        child.when_ended(lambda: self._cells.give_back(cell))
        return child

    def _on_parent_death(self) -> None:
        self._drop_control()
        if not self._closing:
            log.error("the warm parent of %r died; its children died with it; starting another", self._config.family)
            self._restart = asyncio.get_running_loop().create_task(self._replace_parent())

    async def _replace_parent(self) -> None:
        await self.pool.discard_idle()
        while True:
            await self._stop_warm_parent()
            await asyncio.sleep(_RESTART_PAUSE_SECONDS)
            try:
                await self._start_warm_parent()
            except (IsolationUnavailable, OSError) as error:
                log.error("the warm parent did not come back: %s", error)
                continue
            return


def make_mount_point() -> str:
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
