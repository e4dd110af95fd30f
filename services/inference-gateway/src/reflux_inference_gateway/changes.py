"""Wakes whoever waits for the fleet to change."""

import asyncio
from collections.abc import Callable


class Changes:
    """Wakes everyone who waits whenever the fleet changed."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.listeners: list[Callable[[], None]] = []
        """Called at each change, before the waiters run."""

    def upcoming(self) -> asyncio.Event:
        """The event of the next change; take it before reading the state that it guards."""
        return self._event

    def notify(self) -> None:
        """Wakes all waiters."""
        event, self._event = self._event, asyncio.Event()
        event.set()
        for listener in self.listeners:
            listener()

    async def wait(self, seconds: float | None) -> bool:
        """Waits for the next change; False when the time ran out first."""
        try:
            async with asyncio.timeout(seconds):
                await self._event.wait()
        except TimeoutError:
            return False
        return True
