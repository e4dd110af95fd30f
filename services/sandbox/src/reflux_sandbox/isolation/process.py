"""The weak tier: a process per child with limits and, where possible, a call filter; files and users are shared."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import asdict

from reflux_sandbox.isolation import syscalls
from reflux_sandbox.isolation.base import (
    ChildLimits,
    Isolation,
    IsolationUnavailable,
    Tier,
    VerifierInfo,
    verifier_infos,
)
from reflux_sandbox.isolation.handle import ChildHandle, ChildPipes
from reflux_sandbox.isolation.pool import ChildPool
from reflux_sandbox.isolation.prefork import ENVIRONMENT
from reflux_sandbox.isolation.zygote import ZygoteConfig

_MODULE = "reflux_sandbox.isolation.plain"
_MOST_IDLE = 2
"""Every idle child is an interpreter of its own here."""


class ProcessIsolation(Isolation):
    """Owns a pool of started interpreters; each takes one piece of work."""

    name = "process"
    tier = Tier.PROCESS

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
    ) -> None:
        self._output_bytes = output_bytes
        self._pool = ChildPool(self._spawn, min(idle_target, _MOST_IDLE), most_children)
        self._verifiers: list[VerifierInfo] = []
        self._notes: list[str] = []
        config = ZygoteConfig(
            limits=limits,
            cells=most_children,
            first_user_id=0,
            in_user_namespace=False,
            cgroup_procs=(),
            warm_modules=warm_modules,
            graders=graders,
            cache_folder=cache_folder,
            import_folders=import_folders,
            new_root="",
        )
        self._command = [sys.executable, "-I", "-m", _MODULE, json.dumps(asdict(config))]

    @property
    def reasons(self) -> list[str]:
        filtered = "a seccomp filter refuses sockets and exec" if syscalls.supported() else "no seccomp filter"
        weak = "WEAK isolation: children share files, user and process space with the service; only limits hold"
        return [weak, filtered, *self._notes]

    @property
    def verifiers(self) -> list[VerifierInfo]:
        return self._verifiers

    @property
    def idle_children(self) -> int:
        return self._pool.idle

    @property
    def busy_children(self) -> int:
        return self._pool.busy

    async def start(self) -> None:
        process = await asyncio.create_subprocess_exec(
            *self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT
        )
        out, err = await process.communicate()
        if process.returncode != 0:
            last = (err.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
            raise IsolationUnavailable(f"a plain child does not start: {last}")
        described = json.loads(out)
        self._verifiers, self._notes = verifier_infos(described["verifiers"]), described["notes"]
        self._pool.start()

    async def acquire(self) -> ChildHandle:
        return await self._pool.acquire()

    async def close(self) -> None:
        await self._pool.close()

    async def _spawn(self) -> ChildHandle:
        ours, theirs = socket.socketpair()
        pipes = [os.pipe() for _ in range(3)]
        (status, status_w), (stdout, stdout_w), (stderr, stderr_w) = pipes
        command = [*self._command, str(theirs.fileno()), str(status_w)]
        process = subprocess.Popen(  # noqa: ASYNC220  a few ms; from this thread, which PDEATHSIG is tied to
            command,
            pass_fds=(theirs.fileno(), status_w),
            stdin=subprocess.DEVNULL,
            stdout=stdout_w,
            stderr=stderr_w,
            env=ENVIRONMENT,
            start_new_session=True,
        )
        theirs.close()
        for descriptor in (status_w, stdout_w, stderr_w):
            os.close(descriptor)
        child_pipes = ChildPipes(ours, status, stdout, stderr, os.pidfd_open(process.pid))
        child = ChildHandle(child_pipes, process.pid, self._output_bytes, signal.SIGTERM)
        child.when_ended(lambda: _reap(process))
        await child.hello()
        return child


def _reap(process: "subprocess.Popen[bytes]") -> None:
    process.wait()
