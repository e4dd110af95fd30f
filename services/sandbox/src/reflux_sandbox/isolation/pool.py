"""Keeps a few children ready, so that a dispatch never waits for a fork; a child is handed out once."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from reflux_sandbox.isolation.handle import ChildDied, ChildHandle

log = logging.getLogger(__name__)

_PAUSE_SECONDS = 0.5
"""After a failed start: a broken machine must not turn into a fork loop."""


class ChildPool:
    """Refills up to `idle_target` behind the scenes, `most` children in all; `spawn` raises ChildDied or OSError."""

    def __init__(self, spawn: Callable[[], Awaitable[ChildHandle]], idle_target: int, most: int) -> None:
        self._spawn = spawn
        self._idle_target = idle_target
        self._most = most
        self._idle: asyncio.Queue[ChildHandle] = asyncio.Queue()
        self._waiting = 0
        self._alive = 0
        self._wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.failures = 0

    @property
    def idle(self) -> int:
        return self._idle.qsize()

    @property
    def busy(self) -> int:
        return max(0, self._alive - self._idle.qsize())

    def start(self) -> None:
        self._wanted.set()
        self._task = asyncio.create_task(self._refill())

    async def acquire(self) -> ChildHandle:
        """The next ready child; waits while none is. Dead ones (the warm parent was killed) are skipped."""
        while True:
            self._waiting += 1
            self._wanted.set()
            try:
                child = await self._idle.get()
            finally:
                self._waiting -= 1
            self._wanted.set()
            if child.alive:
                return child
            await child.end()

    async def discard_idle(self) -> None:
        """Ends the children that wait; used when their warm parent is replaced and at the end."""
        while not self._idle.empty():
            await self._idle.get_nowait().end()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self.discard_idle()

    def _missing(self) -> int:
        target = self._idle_target + self._waiting - self._idle.qsize()
        return min(target, self._most - self._alive)

    async def _refill(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            while self._missing() > 0:
                try:
                    child = await self._spawn()
                except (ChildDied, OSError) as error:
                    self.failures += 1
                    log.warning("child start failed (%d so far): %s", self.failures, error)
                    await asyncio.sleep(_PAUSE_SECONDS)
                    continue
                self._alive += 1
                child.when_ended(self._on_ended)
                self._idle.put_nowait(child)

    def _on_ended(self) -> None:
        self._alive -= 1
        self._wanted.set()
