"""Which learner process serves which run: announced by the learners every few seconds, kept in memory."""

import asyncio
from dataclasses import dataclass

HEARTBEAT_SECONDS = 2.0


@dataclass(frozen=True)
class LearnerEntry:
    """One announced learner process."""

    address: str
    incarnation: str
    """Random id of the process: a new one has an empty memory."""


class LearnerRegistry:
    """Last announcement per run. A restarted trainer hears from all learners within one heartbeat."""

    def __init__(self) -> None:
        self._entries: dict[str, LearnerEntry] = {}
        self._changed = asyncio.Event()
        self.expected: set[str] = set()
        """Learners that serve no run of the loop: those of base models of the Tinker API."""

    def announce(self, run: str, entry: LearnerEntry) -> None:
        """Stores an announcement."""
        if self._entries.get(run) != entry:
            self._entries[run] = entry
            self._changed.set()
            self._changed = asyncio.Event()

    def get(self, run: str) -> LearnerEntry | None:
        """The last announced learner of `run`."""
        return self._entries.get(run)

    async def changed(self, timeout_seconds: float) -> None:
        """Returns when any run has a new learner, or after the timeout."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._changed.wait()
        except TimeoutError:
            return

    def forget(self, run: str) -> None:
        """Drops the learner of an ended run."""
        self._entries.pop(run, None)
