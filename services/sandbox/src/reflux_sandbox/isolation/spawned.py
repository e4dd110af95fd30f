"""What the tiers share that start an interpreter per child: two pools, the pipes, the look at the verifiers."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from reflux_sandbox.isolation.base import ChildLimits, Isolation, IsolationUnavailable, VerifierInfo, offered
from reflux_sandbox.isolation.cells import Cells
from reflux_sandbox.isolation.handle import ChildDied, ChildHandle, ChildPipes
from reflux_sandbox.isolation.plain import PlainConfig
from reflux_sandbox.isolation.pool import ChildPool
from reflux_sandbox.isolation.template import ENVIRONMENT

_MOST_IDLE = 2
"""Every idle child is an interpreter of its own here."""


@dataclass(frozen=True)
class Launch:
    """One child to start: the descriptors that it inherits, and the cell that it lives in."""

    cell: int
    channel: int
    status: int
    groups: list[int]
    """Open `cgroup.procs` files."""
    stdout: int
    stderr: int


class SpawnedIsolation(Isolation):
    """Owns two pools of started interpreters, with verifiers and without; each child takes one piece of work."""

    stop_signal: ClassVar[signal.Signals] = signal.SIGKILL
    says_status: ClassVar[bool] = True
    """False where a child inherits only its three standard streams: the channel is its input, and says the status."""

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
        only_families: tuple[str, ...] = (),
        warm_modules: tuple[str, ...] = ("numpy", "numpy.random"),
    ) -> None:
        idle = min(idle_target, _MOST_IDLE)
        self._most = most_children
        self._output_bytes = output_bytes
        self.limits = limits
        self.cells = Cells(limits)
        self.config = PlainConfig(
            limits=limits,
            warm_modules=warm_modules,
            graders=graders,
            cache_folder=cache_folder,
            import_folders=import_folders,
            only_families=only_families,
        )
        self._code = ChildPool(lambda: self._spawn(graded=False), idle, most_children)
        self._graded = ChildPool(lambda: self._spawn(graded=True), idle, most_children)
        self._verifiers: list[VerifierInfo] = []
        self._notes: list[str] = []

    @property
    def verifiers(self) -> list[VerifierInfo]:
        return self._verifiers

    @property
    def notes(self) -> list[str]:
        """What the look at the verifiers said."""
        return self._notes

    @property
    def idle_children(self) -> int:
        return self._code.idle + self._graded.idle

    @property
    def busy_children(self) -> int:
        return self._code.busy + self._graded.busy

    @abstractmethod
    def check(self) -> None:
        """Raises IsolationUnavailable where this machine lacks something."""

    @abstractmethod
    def command(self, launch: Launch, config: PlainConfig) -> list[str]:
        """How to start `plain` with `config`."""

    async def start(self) -> None:
        self.check()
        self.cells.open()
        self.cells.add(2 * self._most)
        try:
            await self._look_at_verifiers()
            first = await self._spawn(graded=False)
        except (ChildDied, OSError) as error:
            await self.close()
            raise IsolationUnavailable(f"a child does not start: {error}") from error
        await first.end()
        self._code.start()
        if self._verifiers:
            self._graded.start()

    async def _look_at_verifiers(self) -> None:
        """Asks an interpreter outside, as it runs no answer."""
        command = [sys.executable, "-I", "-m", "reflux_sandbox.isolation.plain", json.dumps(asdict(self.config))]
        process = await asyncio.create_subprocess_exec(
            *command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT
        )
        out, err = await process.communicate()
        if process.returncode != 0:
            last = (err.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
            raise ChildDied(last)
        described: dict[str, Any] = json.loads(out)
        self._verifiers, withheld = offered(described["verifiers"], self.tier)
        self._notes = [*described["notes"], *withheld]

    async def acquire(self, family: str = "") -> ChildHandle:
        return await (self._graded if family else self._code).acquire()

    async def close(self) -> None:
        await asyncio.gather(self._code.close(), self._graded.close())
        self.cells.close()

    async def _spawn(self, *, graded: bool) -> ChildHandle:
        cell = self.cells.take()
        if cell is None:
            raise ChildDied("no cell is free")
        try:
            with self._pipes() as (inside, outside), self.cells.opened(cell) as groups:
                channel, status, stdout, stderr = inside
                launch = Launch(cell, channel, status, groups, stdout, stderr)
                process = self._popen(launch, graded=graded)
                pipes = outside(os.pidfd_open(process.pid))
        except OSError:
            self.cells.give_back(cell)
            raise
        counts = self.cells.counts_since(cell)
        child = ChildHandle(pipes, process.pid, self._output_bytes, self.stop_signal, counts)
        child.when_ended(lambda: self._ended(process, cell))
        await child.hello()
        return child

    def _popen(self, launch: Launch, *, graded: bool) -> "subprocess.Popen[bytes]":
        config = self.config if graded else self.config.without_verifiers()
        inherited = (launch.channel, launch.status, *launch.groups)
        return subprocess.Popen(  # from this thread, the loop's, which PDEATHSIG is tied to; a few ms
            self.command(launch, config),
            pass_fds=inherited if self.says_status else launch.groups,
            stdin=subprocess.DEVNULL if self.says_status else launch.channel,
            stdout=launch.stdout,
            stderr=launch.stderr,
            env=ENVIRONMENT,
            start_new_session=True,
        )

    @contextmanager
    def _pipes(self) -> Iterator[tuple[tuple[int, int, int, int], Any]]:
        """The inner ends, closed afterwards, and what makes ChildPipes of the outer ends, closed after an error."""
        ours, theirs = socket.socketpair()
        pairs = [os.pipe() for _ in range(3)]
        (status, status_w), (stdout, stdout_w), (stderr, stderr_w) = pairs
        if not self.says_status:
            os.close(status)
        try:
            yield (
                (theirs.fileno(), status_w, stdout_w, stderr_w),
                lambda process: ChildPipes(ours, status if self.says_status else None, stdout, stderr, process),
            )
        except OSError:
            ours.close()
            for descriptor in (stdout, stderr, *((status,) if self.says_status else ())):
                os.close(descriptor)
            raise
        finally:
            theirs.close()
            for descriptor in (status_w, stdout_w, stderr_w):
                os.close(descriptor)

    def _ended(self, process: "subprocess.Popen[bytes]", cell: int) -> None:
        with contextlib.suppress(OSError):
            process.wait()
        self.cells.give_back(cell)
        self.tidy(cell)

    def tidy(self, cell: int) -> None:
        """Removes what a child of `cell` left on the host; most mechanisms leave nothing."""
