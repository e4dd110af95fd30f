"""Pause and resume of one run, between people and the loop."""

import asyncio
from dataclasses import dataclass, field

from reflux_trainer.watchdog import Waits


@dataclass
class Control:
    """The loop passes the gate before each step; a closed gate is a pause."""

    _open: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._open.set()

    @property
    def open(self) -> bool:
        return self._open.is_set()

    def pause(self) -> None:
        self._open.clear()

    def resume(self) -> None:
        self._open.set()

    async def gate(self, waits: Waits) -> None:
        """Returns at once, or when the pause is over; the time does not count as standing still."""
        if not self._open.is_set():
            with waits.on("paused", "ResumeRun", exempt=True):
                await self._open.wait()
